"""BigBird (2007.14062): BERT whose queries see a window of blocks, global blocks and random ones.

Batches of up to `(5 + 2 num_random_blocks) block_size` tokens, and all with `attention_type: original_full`, have full
attention. The random blocks of longer ones are tformer's own: `transformers` draws them in training only, and in
evaluation reads the first block in their place.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tformer.interop.architectures import bert
from tformer.interop.architectures.parts import classes_of, stack_of, with_tasks
from tformer.interop.architectures.table import ConfigKey
from tformer.interop.config import Config
from tformer.nn.attention.bigbird import BigBirdOptions
from tformer.recipe.model import Model

CONFIG = replace(
    bert.CONFIG,
    rows=(
        *bert.CONFIG.rows,
        ConfigKey("use_bias", "encoder.attention.qkv_bias", True),
        ConfigKey("rescale_embeddings", "embedding.scale", False),
    ),
).defaulting(vocab_size=50358, hidden_act="gelu_new", max_position_embeddings=4096)


def read(config: Config, class_name: str) -> dict[str, Any]:
    values = bert.read_body(config, CONFIG)
    stack = values["encoder"]
    block, drawn = config.size("block_size", default=64), config.take("num_random_blocks", default=3)
    if config.expect("attention_type", "block_sparse", "original_full") == "block_sparse":
        stack["attention"] |= {
            **{"kind": "bigbird", "block": block, "window_blocks": 3, "global_blocks": 1},
            **{"random_blocks": drawn, "dense_up_to": (5 + 2 * drawn) * block},
        }
    activation = stack["feedforward"]["activation"]
    if bert.is_classifier(class_name):
        return values | {"heads": [bert.classifier_head(config, activation)]}
    heads = [{"kind": "masked_lm", "activation": activation}]
    return values | {"heads": [*heads, {"kind": "next_sentence"}] if class_name == PRETRAINING else heads}


def write(model: Model, class_name: str) -> dict[str, Any]:
    options, found = stack_of(model, "encoder").attention, bert.write(model, class_name) | CONFIG.write(model)
    found["type_vocab_size"] = model.embedding.token_types or bert.NO_TYPES
    if not isinstance(options, BigBirdOptions):
        return found | {"attention_type": "original_full"}
    blocks = {"block_size": options.block, "num_random_blocks": options.random_blocks}
    return found | {"attention_type": "block_sparse", **blocks}


NAMES = bert.Names(
    "bert",
    pooler="classifier.dense",
    project="classifier.out_proj",
    sentences=("bert.pooler", "cls.seq_relationship"),
)


def differs(model: Model) -> list[str]:
    options = stack_of(model, "encoder").attention
    if not isinstance(options, BigBirdOptions) or options.dense_up_to >= model.max_seq_len or not options.random_blocks:
        return []
    return [
        f"texts of more than {options.dense_up_to} tokens have random blocks of tformer's; transformers draws them in "
        "training only, and in evaluation reads the first block in their place"
    ]


PRETRAINING = "BigBirdForPreTraining"
PLAIN = replace(
    bert.PLAIN,
    model_type="big_bird",
    classes=classes_of("BigBird", "PreTraining", "MaskedLM", "SequenceClassification"),
    family="bigbird",
    read=read,
    write=write,
    links=partial(bert.encoder_links, names=NAMES),
    pooler="bert.pooler",
    differs=differs,
    skipped=tuple(pattern.replace(r"pooler\.dense", "pooler") for pattern in bert.PLAIN.skipped),
    special_ids={"pad": 0, "bos": 1, "eos": 2, "sep": 66},
    slow_tokenizer="BigBirdTokenizer",
)
BIG_BIRD = with_tasks(
    PLAIN,
    dropouts=dict.fromkeys(("token_classifier", "multiple_choice"), ("classifier_dropout", None)),
    tasks=("ForTokenClassification", "ForMultipleChoice"),  # its head of answers has further layers
)
