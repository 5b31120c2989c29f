"""Kinds by name and options by `--set`, and every way to get them wrong."""

from __future__ import annotations

import pytest

from tformer.bench.attention_kinds import KINDS
from tformer.bench.attention_options import choose_kinds, read_settings
from tformer.errors import InputError
from tformer.nn.attention import ENCODER_ONLY

ALL = tuple(KINDS)


def test_full_attention_is_always_there_and_first() -> None:
    assert choose_kinds(None, causal=False) == (list(ALL), [])
    kinds, notes = choose_kinds(["dense-masked", "dense-masked"], causal=False)
    assert kinds == ["full", "dense-masked"] and "full" in notes[0]
    assert choose_kinds(["dense-masked", "full"], causal=False) == (["full", "dense-masked"], [])


def test_kinds_without_a_causal_mode() -> None:
    kinds, notes = choose_kinds(None, causal=True)
    assert not ENCODER_ONLY & set(kinds)
    for kind in ENCODER_ONLY & set(ALL):
        assert any(kind in note for note in notes)
        with pytest.raises(InputError, match=f"{kind} has no causal mode"):
            choose_kinds([kind], causal=True)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(InputError, match="--kinds: unknown kind 'dense'") as refusal:
        choose_kinds(["dense"], causal=False)
    assert "dense-masked" in str(refusal.value.hint)


def test_settings_by_kind() -> None:
    assert read_settings(["dense-masked.window=64"], ALL)["dense-masked"] == {"window": 64}
    assert read_settings([], ["full"]) == {"full": {}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("window=3", "expected KIND.OPTION=VALUE"),
        ("dense-masked.window", "expected KIND.OPTION=VALUE"),
        ("longformer.window=3", "unknown kind 'longformer'"),
        ("dense-masked.windw=3", "no such option"),
        ("full.qkv_bias=false", "no such option"),
        ("dense-masked.window=wide", "--set dense-masked.window: found the text 'wide', expected an integer"),
    ],
)
def test_mistakes_name_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(InputError) as refusal:
        read_settings([text], ALL)
    assert told in refusal.value.message


def test_options_of_a_kind_that_is_not_measured_are_refused() -> None:
    with pytest.raises(InputError, match="dense-masked is not measured"):
        read_settings(["dense-masked.window=64"], ["full"])


def test_the_dense_mask_has_the_window_of_the_sliding_window() -> None:
    found = read_settings(["sliding_window.window=64"], ALL)
    assert found["dense-masked"] == found["sliding_window"] == {"window": 64}
    both = read_settings(["sliding_window.window=64", "dense-masked.window=32"], ALL)
    assert both["dense-masked"] == {"window": 32}
