"""Options as keyword arguments: every command's options, their types, and messages that name keywords."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tformer.decoding.options import GenerateOptions
from tformer.evaluation.embed import EmbedOptions
from tformer.evaluation.options import EvaluationOptions
from tformer.support.errors import InputError
from tformer.support.keywords import flags_as_keywords, from_keywords
from tformer.support.options import as_keyword
from tformer.training.options import TrainOptions


@pytest.mark.parametrize("options_type", [GenerateOptions, EvaluationOptions, TrainOptions, EmbedOptions])
def test_no_keywords_give_the_defaults_of_the_command(options_type: type[Any]) -> None:
    assert from_keywords(options_type, {}, caller="call") == options_type()


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"max_new_tokens": 3, "top_p": 1}, GenerateOptions(max_new_tokens=3, top_p=1.0)),
        ({"stop": "\n"}, GenerateOptions(stop=("\n",))),
        ({"ensemble": [Path("a"), "b"]}, GenerateOptions(ensemble=("a", "b"))),
        ({"target_prefix": Path("a.txt")}, GenerateOptions(target_prefix="a.txt")),
    ],
    ids=str,
)
def test_keywords_are_the_flags_of_the_command(keywords: dict[str, Any], expected: GenerateOptions) -> None:
    assert from_keywords(GenerateOptions, keywords, caller="generate") == expected


def test_a_path_is_a_path_where_the_command_reads_one() -> None:
    options = from_keywords(TrainOptions, {"out": "a", "data": Path("b"), "config": Path("c")}, caller="train")
    assert (options.out, options.data, options.config) == (Path("a"), ("b",), Path("c"))


@pytest.mark.parametrize(
    ("keywords", "message", "hint"),
    [
        ({"top": 3}, "f has no option 'top'", "did you mean 'stop'"),
        ({"arguments": ("a",)}, "f has no option 'arguments'", "known:"),
        ({"top_k": "x"}, "top_k: found 'x', expected an integer", None),
        ({"top_k": 1.5}, "top_k: found 1.5, expected an integer", None),
        ({"logprobs": "perhaps"}, "logprobs: found 'perhaps', expected true or false", None),
        ({"quantize": "int2"}, "quantize: found 'int2', expected 'none', 'int8' or 'int4'", None),
        ({"stop": 3}, "stop: found 3, expected a list", None),
        ({"seed": None}, "seed: found None, expected an integer", None),
        ({"greedy": True}, "f takes no greedy", "why"),
        ({"json": True}, "f takes no json", "the result is returned"),
    ],
    ids=str,
)
def test_a_wrong_keyword_or_value_is_one_clear_error(keywords: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(InputError) as caught:
        from_keywords(GenerateOptions, keywords, caller="f", without={"greedy": "why"})
    assert caught.value.message.startswith(message)
    assert hint is None or hint in (caught.value.hint or "")


def test_messages_name_keywords_but_keep_whole_commands() -> None:
    with pytest.raises(InputError) as caught, flags_as_keywords():
        raise InputError("--top-k must be at least 1", hint="see 'tformer generate --top-k 5'")
    assert str(caught.value) == caught.value.message == "top_k must be at least 1"
    assert caught.value.hint == "see 'tformer generate --top-k 5'"
    assert as_keyword("--max-new-tokens") == "max_new_tokens"
