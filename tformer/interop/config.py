"""Reader of `config.json` that refuses every key that the architecture did not read.

An unknown key may change what the model computes. So an architecture reads its keys, and `finish` refuses the rest,
except empty ones and those that concern training, storage or generation only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tformer.support.errors import InputError
from tformer.support.formatting import finite_number

T = TypeVar("T")
ABSENT = object()
MAX_SIZE = 2**40

# Keys that do not change what the forward pass of any architecture computes.
INERT = frozenset(
    {
        *("_name_or_path", "_num_labels", "architectures", "attn_implementation", "_attn_implementation_autoset"),
        *("_attn_implementation_internal", "chunk_size_feed_forward", "classifier_dropout", "dtype"),
        *("finetuning_task", "gradient_checkpointing", "id2label", "initializer_factor", "initializer_range"),
        *("init_std", "label2id", "language", "model_type", "name_or_path", "num_labels", "output_attentions"),
        *("output_hidden_states", "output_past", "prefix", "pretraining_tp", "problem_type", "return_dict"),
        *("task_specific_params", "tokenizer_class", "torch_dtype", "torchscript"),
        *("sbert_ce_default_activation_function", "sentence_transformers", "transformers.js_config"),
        *("transformers_version", "unsloth_fixed", "unsloth_version", "use_cache", "use_bfloat16", "xla_device"),
        *("bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id"),
        *("forced_eos_token_id", "mask_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("bad_words_ids", "do_sample", "early_stopping", "length_penalty", "max_length", "min_length"),
        *("begin_suppress_tokens", "diversity_penalty", "encoder_no_repeat_ngram_size"),
        *("exponential_decay_length_penalty", "max_new_tokens", "num_beam_groups", "output_scores"),
        *("remove_invalid_values", "return_dict_in_generate", "suppress_tokens", "typical_p"),
        *("no_repeat_ngram_size", "num_beams", "num_return_sequences", "repetition_penalty", "temperature"),
        *("top_k", "top_p"),
    }
)


class Config:
    """The values of a `config.json`. Every method raises InputError that names the file and the key.

    Attributes: `values`, `name` (of the file, in messages), `taken` (the keys that were read).
    """

    def __init__(self, values: Mapping[str, Any], *, name: str = "config.json") -> None:
        self.values, self.name = dict(values), name
        self.taken: set[str] = set()

    def take(self, key: str, *, default: Any = ABSENT, kind: type | tuple[type, ...] = int) -> Any:
        """The value of a key. `kind`: `int`, `float` (which a whole number is too), `bool`, `str`, `dict`, `list`.

        A missing key, and null unless the default is None, gives `default`; without one it is an error.
        """
        self.taken.add(key)
        value = self.values.get(key)
        if value is None:
            if default is ABSENT:
                raise InputError(f"{self.name}: the key {key} is missing")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(one.__name__ for one in kinds)
            raise InputError(f"{self.name}: {key}: found {value!r}, expected {expected}")
        if float in kinds and finite_number(value) is None:
            raise InputError(f"{self.name}: {key}: found {value}, expected a finite number")
        return value

    def size(self, key: str, *, default: Any = ABSENT, most: int = MAX_SIZE) -> int:
        """The value of a key that must be an integer from 1 to `most`."""
        value = self.take(key, default=default, kind=int)
        if value is not None and not 1 <= value <= most:
            bound = "at least 1" if value < 1 else f"at most {most:,}"
            raise InputError(f"{self.name}: {key}: found {value}, expected {bound}")
        return value

    def positive(self, key: str, *, default: float) -> float:
        """The value of a key that must be a number above 0."""
        value = float(self.take(key, default=default, kind=float))
        if not value > 0:
            raise InputError(f"{self.name}: {key}: found {value:g}, expected a number above 0")
        return value

    def expect(self, key: str, *allowed: Any, default: Any = ABSENT) -> Any:
        """The value of a key that must be one of `allowed`; `default` is the value of a missing key (first allowed)."""
        self.taken.add(key)
        value = self.values.get(key)
        if value is None:
            value = allowed[0] if default is ABSENT else default
        if not any(value == option and type(value) is type(option) for option in allowed):
            known = " or ".join(map(repr, allowed))
            raise InputError(f"{self.name}: {key}: found {value!r}, tformer has this architecture with {known} only")
        return value

    def choose(self, key: str, table: Mapping[str, T], *, default: Any = ABSENT) -> T:
        """The entry of `table` that a key names, for example an activation."""
        name = self.take(key, default=default, kind=str)
        if name not in table:
            raise InputError(f"{self.name}: {key}: found {name!r}, tformer supports {', '.join(table)}")
        return table[name]

    def ignore(self, *keys: str) -> None:
        """Mark keys as read that have no effect in the models that tformer reads."""
        self.taken.update(keys)

    def left(self) -> list[str]:
        """The keys that were not read, except empty ones (null, false, empty lists and mappings) and INERT ones."""
        empty: tuple[Any, ...] = ("", [], {})
        stated = {key: value for key, value in self.values.items() if value is not None and value is not False}
        return sorted(key for key in stated if key not in self.taken | INERT and stated[key] not in empty)

    def finish(self) -> None:
        """Raise InputError for keys that were not read and may change what the model computes, see `left`."""
        if odd := self.left():
            raise InputError(
                f"{self.name}: {odd[0]}: found {self.values[odd[0]]!r}, a key that tformer does not support for "
                f"{self.values.get('model_type', 'this architecture')}",
                hint=f"if it does not change what the model computes: tformer import ... --ignore {odd[0]}",
            )
