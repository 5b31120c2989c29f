"""Conversion between `generation_config.json` (formerly keys of config.json) and a recipe's `generation` section.

    max_new_tokens, max_length       max_new_tokens (their lengths count the decoder's start; a decoder's prompt too)
    do_sample, temperature, top_*    temperature 0 where they never sample; min_p has the same name
    num_beams, early_stopping        beam_size, stopping: true is `beam`, false `heuristic`, "never" `exhaustive`
    length_penalty                   length_penalty of the type `avg`
    eos_token_id                     the first is the recipe's eos, the others are stop_tokens
    suppress_tokens, bad_words_ids   suppress_tokens: what they do not forbid, a model from there may write

Settings without a counterpart on the other side are reported by `generation_notes` and `left_unsaid`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tformer.interop.architecture import AUTO_CLASSES
from tformer.interop.config import Config
from tformer.interop.tokenizer_config import end_ids, special_ids, special_keys
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.support.files import read_object
from tformer.tokenizer import Tokenizer

GENERATION_CONFIG = "generation_config.json"
MAX_BYTES = 16 << 20
SEQ2SEQ = AUTO_CLASSES["AutoModelForSeq2SeqLM"]
WRITES = (*AUTO_CLASSES["AutoModelForCausalLM"], *SEQ2SEQ)
STOPPING: Mapping[bool | str, str] = {True: "beam", False: "heuristic", "never": "exhaustive"}
SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # transformers' defaults
MAX_LENGTH_PENALTY = 10

# Keys that change what is generated and have no counterpart in tformer -> the values that switch them off.
WITHOUT_COUNTERPART: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ([],),
    "forced_decoder_ids": ([],),
    "sequence_bias": ({},),
    "guidance_scale": (1.0,),
    "penalty_alpha": (0.0,),
    "constraints": ([],),
    "force_words_ids": ([],),
    "num_beam_groups": (1,),
    "watermarking_config": (),
    "dola_layers": (),
    "token_healing": (False,),
    "max_time": (),
}


def read_generation(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the `generation` section; {} for a model that does not generate.

    Raises InputError for a file that is damaged, or a value of another type than expected.
    """
    if not _writes(config):
        return {}
    keys, values = _keys(folder, config), {}
    start = _start_tokens(folder, config)
    forced = max(0, len(start) - 1)
    new, longest = keys.take("max_new_tokens", default=None), keys.take("max_length", default=None)
    if new is None and longest is not None and start:
        new = longest - 1
    if new is not None:
        values["max_new_tokens"] = max(1, new - forced)
    least, shortest = keys.take("min_new_tokens", default=None), keys.take("min_length", default=None)
    if least is None and shortest is not None and start:
        least = shortest - 1
    if least:
        values["min_new_tokens"] = max(0, least - forced)
    values |= _choice(keys)
    for name, ours in (("repetition_penalty", "repetition_penalty"), ("no_repeat_ngram_size", "no_repeat_ngram")):
        found = keys.take(name, default=None, kind=(int, float))
        if found is not None:
            values[ours] = found
    suppressed = _checked_ids(keys, "suppress_tokens", keys.take("suppress_tokens", default=[], kind=list))
    values["suppress_tokens"] = sorted({*suppressed, *_forbidden(keys)[0]})
    if further := end_ids(config, generation_document(folder))[1:]:
        values["stop_tokens"] = list(further)
    stops = keys.take("stop_strings", default=[], kind=(str, list))
    texts = [stops] if isinstance(stops, str) else stops
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise InputError(f"{keys.name}: stop_strings: found {wrong[0]!r}, expected a text")
    if texts:
        values["stop"] = texts
    return values


def generation_notes(folder: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """One line for each setting that changes what `generate` of transformers writes and has no counterpart here."""
    if not _writes(config):
        return ()
    keys = _keys(folder, config)
    problems = list(_problems(keys, bool(_start_tokens(folder, config))))
    document = generation_document(folder)
    if document is not None and not end_ids({}, document) and (ends := end_ids(config, None)):
        # `generate` of transformers would write to the longest length
        problems.append(
            f"no eos_token_id, so that transformers would not stop; tformer stops at {ends[0]}, that of config.json"
        )
    return tuple(f"{keys.name}: {problem}" for problem in problems)


def write_generation(recipe: Recipe, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The content of generation_config.json; {} for a model that does not generate.

    tokenizer: of the side that is written.
    """
    if tokenizer is None or not _generates(recipe):
        return {}
    ours = recipe.generation
    ids = {key: value for key, value in special_keys(recipe, tokenizer, None).items() if key.endswith("_token_id")}
    ends = [token for token in (ids["eos_token_id"], *ours.stop_tokens) if token is not None]
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    beside_encoder = recipe.model.encoder is not None
    forced = int(beside_encoder and ids["forced_bos_token_id"] is not None)
    samples = not beside_encoder and ours.beam_size == 1 and ours.temperature > 0
    if ours.suppress_tokens is not None:
        suppressed = set(ours.suppress_tokens)
    else:  # the tokens that this model's decoder begins with
        begins = {ids.get(f"{name}_token_id") for name in ("pad", "bos", "decoder_start")}
        suppressed = {token for token in begins if token is not None} - {*ends, ids.get("forced_bos_token_id")}
    document = {
        **ids,
        "max_new_tokens": ours.max_new_tokens + forced,
        "do_sample": samples,
        "num_beams": ours.beam_size,
        "suppress_tokens": sorted(suppressed) or None,
    }
    if ours.min_new_tokens:
        document["min_new_tokens"] = ours.min_new_tokens + forced
    if samples:
        document |= {"temperature": ours.temperature, "top_k": ours.top_k, "top_p": ours.top_p}
        document |= {"min_p": ours.min_p} if ours.min_p else {}
    if ours.beam_size > 1:
        penalty = ours.length_penalty if ours.length_penalty_type == "avg" else 0.0
        theirs = next(theirs for theirs, name in STOPPING.items() if name == ours.stopping)
        document |= {"length_penalty": penalty, "early_stopping": theirs}
    for name, value, off in (
        ("repetition_penalty", ours.repetition_penalty, 1.0),
        ("no_repeat_ngram_size", ours.no_repeat_ngram, 0),
    ):
        if value != off:
            document[name] = value
    return {key: value for key, value in document.items() if value is not None}


def _generates(recipe: Recipe) -> bool:
    return any(head.kind == "lm" for head in recipe.model.heads)


def left_unsaid(recipe: Recipe) -> tuple[str, ...]:
    """Settings of the recipe that generation_config.json has no key for, one line each."""
    if not _generates(recipe):
        return ()
    ours = recipe.generation
    odd = {
        "length_penalty_type": ours.length_penalty_type == "gnmt" and ours.beam_size > 1,
        "length_margin": ours.length_margin is not None,
        "at_limit": ours.at_limit == "end",
        "stop": bool(ours.stop),  # `generate` refuses stop_strings that come without a tokenizer
    }
    return tuple(
        f"generation.{name} {getattr(ours, name)} has no counterpart in {GENERATION_CONFIG}: left out"
        for name, present in odd.items()
        if present
    )


def _writes(config: Mapping[str, Any]) -> bool:
    return any(str(name).endswith(WRITES) for name in config.get("architectures") or ())


def generation_document(folder: Path) -> dict[str, Any] | None:
    """The content of generation_config.json; None where a folder has none."""
    path = folder / GENERATION_CONFIG
    return read_object(path, max_bytes=MAX_BYTES) if path.exists() else None


def _keys(folder: Path, config: Mapping[str, Any]) -> Config:
    """The values of generation_config.json, or of config.json where a folder lacks it."""
    document = generation_document(folder)
    if document is None:
        return Config(config, name="config.json")
    return Config(document, name=str(folder / GENERATION_CONFIG))


def _start_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The first tokens of an encoder-decoder's output, which transformers counts in lengths; () if decoder-only."""
    if not str((config.get("architectures") or [""])[0]).endswith(SEQ2SEQ):
        return ()
    ids = special_ids(config, generation_document(folder), {})
    return (ids.get("decoder_start", 0), *([ids["forced_bos"]] if "forced_bos" in ids else []))


def _choice(keys: Config) -> dict[str, Any]:
    """The settings of sampling, greedy decoding or beam search."""
    values: dict[str, Any] = {}
    sampled = keys.take("do_sample", default=None, kind=bool)
    if sampled:
        values |= {name: keys.take(name, default=usual, kind=type(usual)) for name, usual in SAMPLING.items()}
    else:
        values["temperature"] = 0.0
    if (beams := keys.take("num_beams", default=1)) > 1 and not sampled:
        values["beam_size"] = beams
    values["stopping"] = STOPPING[keys.expect("early_stopping", False, True, "never")]
    penalty = keys.take("length_penalty", default=1.0, kind=float)
    if abs(penalty) <= MAX_LENGTH_PENALTY:
        values["length_penalty"] = penalty
    return values


def _checked_ids(keys: Config, key: str, found: list[Any]) -> list[int]:
    """The ids of tokens that a key gives. InputError for anything else."""
    if wrong := [token for token in found if type(token) is not int]:
        raise InputError(f"{keys.name}: {key}: found {wrong[0]!r}, expected the id of a token")
    return found


def _forbidden(keys: Config) -> tuple[list[int], bool]:
    """The single tokens of `bad_words_ids`, and whether it also forbids sequences of several."""
    words = keys.take("bad_words_ids", default=[], kind=list)
    single = [word[0] for word in words if isinstance(word, list) and len(word) == 1]
    return _checked_ids(keys, "bad_words_ids", single), len(single) < len(words)


def _problems(keys: Config, beside_encoder: bool) -> Iterator[str]:
    for name, off in WITHOUT_COUNTERPART.items():
        value = keys.values.get(name)
        if value is not None and value not in off:
            yield f"{name} {value!r} has no counterpart in tformer: left out"
    for name in () if beside_encoder else ("max_length", "min_length"):
        if keys.take(name, default=0):
            yield f"{name} {keys.values[name]} counts the prompt's tokens too, which tformer cannot: left out"
    sampled = keys.take("do_sample", default=None, kind=bool)
    if sampled and keys.take("num_beams", default=1) > 1:
        yield "do_sample with num_beams: sampled beams have no counterpart in tformer: sampling without beams"
    if sampled and beside_encoder:
        yield "do_sample: an encoder-decoder decodes greedily in tformer without --temperature, --top-k or --top-p"
    if _forbidden(keys)[1]:
        yield "bad_words_ids: tformer forbids single tokens only, not sequences of several"
    penalty = keys.take("length_penalty", default=1.0, kind=float)
    if abs(penalty) > MAX_LENGTH_PENALTY:
        yield f"length_penalty {penalty} is beyond {MAX_LENGTH_PENALTY}, the largest that tformer supports: left out"
