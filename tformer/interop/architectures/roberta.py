"""RoBERTa (1907.11692), CamemBERT (1911.03894) and XLM-RoBERTa (1911.02116): one model under three names.

Positions are counted from the padding id: padding stands in row `pad_token_id`, the first token in the next, so a table
of 514 rows reads 512 tokens. `transformers` finds padding by its id; here the attention mask says where it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures import bert
from tformer.interop.architectures.bert import CONFIG, is_classifier
from tformer.interop.architectures.parts import TASKS, classes_of, stack_of, with_tasks
from tformer.interop.architectures.table import ConfigTable
from tformer.interop.config import Config
from tformer.nn.positions.base import LearnedOptions
from tformer.recipe.model import Model
from tformer.support.errors import InputError

PAD = 1  # default of pad_token_id


def read(config: Config, class_name: str, *, table: ConfigTable = CONFIG) -> dict[str, Any]:
    values = bert.read_body(config, table)
    pad = config.take("pad_token_id", default=PAD)
    rows = values["max_seq_len"]
    below = min(values["vocab_size"], rows - 1)
    if not 0 <= pad < below:
        raise InputError(
            f"{config.name}: pad_token_id: found {pad}, expected 0 to {below - 1}: positions begin after it, and "
            f"there are {rows} of them (max_position_embeddings) and {values['vocab_size']} tokens (vocab_size)"
        )
    values["max_seq_len"] = rows - (pad + 1)
    values["encoder"]["positions"] = {"kind": "learned", "ids": "nonpad_cumsum", "offset": pad + 1}
    if is_classifier(class_name):
        return {**values, "heads": [bert.classifier_head(config, "tanh")]}
    return {**values, "heads": [{"kind": "masked_lm", "activation": "gelu"}]}


def write(model: Model, class_name: str) -> dict[str, Any]:
    positions = stack_of(model, "encoder").positions
    offset = positions.offset if isinstance(positions, LearnedOptions) else PAD + 1
    places = {"max_position_embeddings": model.max_seq_len + offset, "pad_token_id": offset - 1}
    return bert.write(model, class_name) | places


def skipped(body: str) -> tuple[str, ...]:
    """Patterns of tensors that only other classes of a body with RoBERTa's heads use."""
    heads = r"lm_head\.(bias|(dense|layer_norm|decoder)\.(weight|bias))"
    return (bert.buffers(body), rf"{body}\.pooler\.dense\.(weight|bias)", heads)


NAMES = bert.Names(
    "roberta",
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    output="lm_head.decoder",
    bias="lm_head.bias",
    pooler="classifier.dense",
    project="classifier.out_proj",
)
PLAIN = Architecture(
    model_type="roberta",
    classes=classes_of("Roberta", "MaskedLM", "SequenceClassification"),
    family="roberta",
    read=partial(read, table=CONFIG.defaulting(vocab_size=50265)),
    write=write,
    links=partial(bert.encoder_links, names=NAMES),
    prefix="roberta.",
    pooler="roberta.pooler.dense",
    renamed=bert.LEGACY_NAMES,
    skipped=skipped("roberta"),
    special_ids={"pad": 1, "bos": 0, "eos": 2},
    slow_tokenizer="RobertaTokenizer",
)
DROPOUTS = {"token_classifier": ("classifier_dropout", None)}


def renamed(model_type: str, stem: str) -> Architecture:
    """RoBERTa under another name."""
    classes = {name.replace("Roberta", stem): heads for name, heads in PLAIN.classes.items()}
    plain = replace(PLAIN, model_type=model_type, classes=classes, read=read, slow_tokenizer=f"{stem}Tokenizer")
    return with_tasks(plain, dropouts=DROPOUTS, tasks=TASKS)


ROBERTA = with_tasks(PLAIN, dropouts=DROPOUTS, tasks=TASKS)
CAMEMBERT, XLM_ROBERTA = renamed("camembert", "Camembert"), renamed("xlm-roberta", "XLMRoberta")
