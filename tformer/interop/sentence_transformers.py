"""The layout of sentence-transformers: modules.json over a folder of `transformers`, read and written.

    modules.json                  [{idx, name, path, type}]: Transformer (path ""), Pooling, perhaps Normalize
    1_Pooling/config.json         pooling_mode, or a key pooling_mode_..._token for each mode, as older versions have it
    sentence_bert_config.json     max_seq_length, do_lower_case; it may be missing
    config_sentence_transformers.json    prompts, and the name of the one before every text; it may be missing

Only the last part of a type counts: versions have the classes in other modules.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tformer.checkpoint.manifest import plain_name
from tformer.nn.classification_heads import EmbeddingHeadOptions
from tformer.recipe.model import Model
from tformer.support.errors import InputError
from tformer.support.files import read_bounded, read_object

MODULES, POOLING, LENGTH = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
SETTINGS = "config_sentence_transformers.json"
MODES = {"mean": "mean", "cls": "cls", "max": "max", "lasttoken": "eos"}
OLDER = {
    **{"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean"},
    **{"pooling_mode_lasttoken": "lasttoken", "pooling_mode_weightedmean_tokens": "weightedmean"},
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
MAX_BYTES = 1 << 20


def read_head(folder: Path) -> EmbeddingHeadOptions | None:
    """The head that the modules behind the Transformer make; None for a folder of `transformers` alone.

    Raises InputError for damaged files, and for other modules and poolings than tformer has.
    """
    path = folder / MODULES
    if not path.is_file():
        return None
    try:
        modules = json.loads(read_bounded(path, max_bytes=MAX_BYTES))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        places = [str(module["path"]) for module in modules]
        for place in places[1:]:
            plain_name(place)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{path}: damaged: expected a list of modules with path and type ({error})") from None
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]) or places[0]:
        found = ", ".join(f"{kind} in '{place}'" for kind, place in zip(kinds, places, strict=True))
        expected = "Transformer in '', Pooling and perhaps Normalize"
        raise InputError(f"{path}: found {found or 'no modules'}; tformer reads {expected}")
    config = read_object(folder / places[1] / "config.json", max_bytes=MAX_BYTES)
    older = [mode for key, mode in OLDER.items() if config.get(key)]
    mode = config.get("pooling_mode", older[0] if len(older) == 1 else older or "mean")
    if not isinstance(mode, str) or mode not in MODES:
        where = folder / places[1] / "config.json"
        raise InputError(f"{where}: pooling_mode: found {mode!r}, tformer reads one of {', '.join(MODES)}")
    return EmbeddingHeadOptions(pooling=MODES[mode], normalize=len(kinds) > 2)


def read_length(folder: Path, tokenizer_json: str, *, most: int, tokenizer_length: object) -> int:
    """The tokens that texts are cut at: max_seq_length, else the tokenizer's length, at most the model's.

    Raises InputError for texts in lower case beside a tokenizer that keeps their case.
    """
    path = folder / LENGTH
    config = read_object(path, max_bytes=MAX_BYTES) if path.is_file() else {}
    normalizer = json.dumps(json.loads(tokenizer_json).get("normalizer"))
    if config.get("do_lower_case") and not ('"lowercase": true' in normalizer or '"Lowercase"' in normalizer):
        raise InputError(f"{path}: do_lower_case: found true, expected false: the tokenizer keeps the case of texts")
    length = config.get("max_seq_length") or tokenizer_length or most
    if not isinstance(length, int | float) or not length >= 1:  # also NaN
        raise InputError(f"{path}: max_seq_length: found {length!r}, expected a number of tokens")
    return int(min(length, most))


def prompt_note(folder: Path) -> list[str]:
    """A note where sentence-transformers puts a prompt before every text, which tformer does not."""
    path = folder / SETTINGS
    settings = read_object(path, max_bytes=MAX_BYTES) if path.is_file() else {}
    if (name := settings.get("default_prompt_name")) is None:
        return []
    return [f"{SETTINGS}: default_prompt_name: tformer adds no prompt: texts must begin with that of {name!r}"]


def split_off(model: Model, *, seq_len: int) -> tuple[Model, dict[str, str]]:
    """(the model without its embedding head, {name: text} of the files that say the same)."""
    heads = [head for head in model.heads if isinstance(head, EmbeddingHeadOptions)]
    if not heads:
        return model, {}
    names = ["Transformer", "Pooling", *(["Normalize"] if heads[0].normalize else [])]
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{name}" if number else "",
         "type": f"sentence_transformers.models.{name}"}
        for number, name in enumerate(names)
    ]  # fmt: skip
    chosen = {name: theirs for theirs, name in MODES.items()}[heads[0].pooling]
    pooling: dict[str, Any] = {"word_embedding_dimension": model.d_model}
    pooling |= {key: mode == chosen for key, mode in OLDER.items()}
    files = {MODULES: modules, POOLING: pooling, LENGTH: {"max_seq_length": seq_len, "do_lower_case": False}}
    rest = tuple(head for head in model.heads if head not in heads)
    return model.model_copy(update={"heads": rest}), {name: json.dumps(each, indent=2) for name, each in files.items()}
