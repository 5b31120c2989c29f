"""The architectures that are read and written, by the `model_type` of their config.json."""

from __future__ import annotations

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.albert import ALBERT
from tformer.interop.architectures.bart import BART, BLENDERBOT, BLENDERBOT_SMALL, FSMT, M2M100, MARIAN, MBART, PEGASUS
from tformer.interop.architectures.bert import BERT
from tformer.interop.architectures.big_bird import BIG_BIRD
from tformer.interop.architectures.bloom import BLOOM
from tformer.interop.architectures.deberta import DEBERTA_V2
from tformer.interop.architectures.distilbert import DISTILBERT
from tformer.interop.architectures.electra import ELECTRA
from tformer.interop.architectures.falcon import FALCON
from tformer.interop.architectures.gemma import GEMMA, GEMMA2, GEMMA3
from tformer.interop.architectures.gpt2 import GPT2, GPT_BIGCODE, GPT_NEO
from tformer.interop.architectures.gpt_neox import GPT_NEOX, GPTJ, PHI, STABLELM
from tformer.interop.architectures.led import LED
from tformer.interop.architectures.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from tformer.interop.architectures.llama_kin import GRANITE, OLMO, OLMO2, PHI3, SMOLLM3, STARCODER2
from tformer.interop.architectures.longformer import LONGFORMER
from tformer.interop.architectures.modernbert import MODERNBERT
from tformer.interop.architectures.mpnet import MPNET
from tformer.interop.architectures.opt import OPT, XGLM
from tformer.interop.architectures.own import OWN
from tformer.interop.architectures.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA
from tformer.interop.architectures.t5 import MT5, T5, UMT5
from tformer.interop.architectures.vit import VIT

ARCHITECTURES: dict[str, Architecture] = {
    architecture.model_type: architecture
    for architecture in (
        *(GPT2, OPT, BLOOM, LLAMA, MISTRAL, QWEN2, QWEN3),
        *(GPT_NEOX, GPTJ, PHI, STABLELM, PHI3, SMOLLM3, FALCON),
        *(GEMMA, GEMMA2, GEMMA3, OLMO, OLMO2, GRANITE, STARCODER2, GPT_BIGCODE, GPT_NEO, XGLM),
        *(BERT, DISTILBERT, ROBERTA, CAMEMBERT, XLM_ROBERTA, ELECTRA, MPNET, ALBERT),
        *(MODERNBERT, DEBERTA_V2, LONGFORMER, BIG_BIRD, VIT),
        *(T5, MT5, UMT5, BART, MBART, PEGASUS, MARIAN, M2M100, BLENDERBOT, BLENDERBOT_SMALL, FSMT, LED),
        OWN,
    )
}
"""By `model_type`; where several compute the same, `export` takes the first."""
