"""GPT-2: pre-norm decoder, learned positions, one fused q, k, v matrix stored [in, out] (its Conv1D)."""

from __future__ import annotations

import re

from torch import Tensor

from tformer.interop.architecture import Architecture, Gguf
from tformer.interop.architectures.parts import layer_links, token_links
from tformer.interop.architectures.table import ConfigTable, Row
from tformer.interop.mapping import TRANSPOSED, Link, both, link
from tformer.recipe.model import Model

# Keys without effect here: the order of operations, sizes of the first release, the head of another class.
OF_OTHERS = (
    "n_ctx",
    "n_special",
    "predict_special_tokens",
    "reorder_and_upcast_attn",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)


CONFIG = ConfigTable(
    rows=(
        Row("vocab_size", "vocab_size", 50257),
        Row("n_positions max_position_embeddings", "max_seq_len", 1024),
        Row("n_embd hidden_size", "d_model", 768),
        Row("n_layer num_hidden_layers", "decoder.num_layers", 12),
        Row("n_head num_attention_heads", "decoder.num_heads", 12),
        Row("n_inner", "decoder.feedforward.d_ff", lambda section: 4 * section["d_model"]),
        Row("activation_function", "decoder.feedforward.activation", "gelu_new"),
        Row("layer_norm_epsilon", "decoder.norm.eps", 1e-5),
        Row("resid_pdrop", "decoder.dropout", 0.1),
        Row("attn_pdrop", "decoder.attention_dropout", 0.1),
        Row("embd_pdrop", "embedding.dropout", 0.1),
        Row("tie_word_embeddings", "tie.output", True),
    ),
    fixed={
        "decoder.positions.kind": "learned",
        "decoder.norm.place": "pre",
        "decoder.final_norm": True,
        "heads": [{"kind": "lm"}],
    },
    expected={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ignored=OF_OTHERS,
)


LAYER = {
    "self_attention_norm": "ln_1",
    "self_attention.qkv": "attn.c_attn",
    "self_attention.out": "attn.c_proj",
    "feedforward_norm": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}
LAYOUTS = {module: TRANSPOSED for module, name in LAYER.items() if ".c_" in name}


def links(model: Model, class_name: str) -> list[Link]:
    return [
        *token_links(model, "transformer.wte.weight"),
        link("decoder.positions.weight", "transformer.wpe.weight"),
        *both("decoder.final_norm", "transformer.ln_f"),
        *layer_links(model, "decoder", "transformer.h", LAYER, LAYOUTS),
    ]


CONV1D = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")


def stored_in_gguf(model: Model, name: str, tensor: Tensor) -> Tensor:
    """Matrices are [out, in] in GGUF files."""
    return tensor.T if CONV1D.fullmatch(name) else tensor


GPT2 = Architecture(
    model_type="gpt2",
    classes={"GPT2LMHeadModel": ("lm",), "GPT2Model": ()},
    family="gpt",
    read=CONFIG.read,
    write=CONFIG.write,
    links=links,
    prefix="transformer.",
    skipped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask, a buffer in old files
    special_ids={"bos": 50256, "eos": 50256},
    slow_tokenizer="GPT2Tokenizer",
    ctranslate2=("GPT2Loader", {}),
    gguf=Gguf("gpt2", "gelu_tanh", stored_in_gguf),
)
