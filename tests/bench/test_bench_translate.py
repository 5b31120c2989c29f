"""`bench translate` on a tiny model: every contender writes what was asked for, and what it should translation_cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer.bench.peers import PEERS
from tformer.bench.workloads import Task
from tformer.bench.workloads.decoding import (
    TRANSLATE,
    check_translation,
    parameters_by_side,
    sources_of,
    translation_cost,
)
from tformer.build import build_model
from tformer.recipe import load_recipe
from tformer.support.errors import InputError

SIDE = {"num_layers": 1, "num_heads": 2, "feedforward.d_ff": 24}
SETS = ["model.vocab_size=60", "model.d_model=16", "model.max_seq_len=32", "data.seq_len=32"]
SETS += [f"model.{side}.{key}={value}" for side in ("encoder", "decoder") for key, value in SIDE.items()]


@pytest.fixture(scope="module")
def task() -> Task:
    recipe = load_recipe(arch="transformer", preset="base", sets=SETS, flags={}, device="cpu").recipe
    options = {"beam_size": 2, "new_tokens": 5, "sentences": 3}
    return Task("translate", recipe, 2, 4, "fp32", torch.device("cpu"), options=options)


def test_a_round_has_whole_batches_of_the_same_sources(task: Task) -> None:
    sources = sources_of(task)
    assert [[len(source) for source in batch] for batch in sources] == [[4, 4], [4, 4]]
    together = sources_of(replace(task, batch_size=4))
    assert together[0] == sources[0] + sources[1]


def test_we_write_every_token(task: Task) -> None:
    contender = TRANSLATE.contender(task, "fp32")
    contender.prepare()
    assert contender.run() == 4 * 5


@pytest.mark.parametrize(("library", "precision"), [("transformers", "bf16"), ("ctranslate2", "fp32")])
def test_peers_write_every_token(task: Task, library: str, precision: str) -> None:
    pytest.importorskip(library)
    contender = PEERS["translate", library].make(task, precision)
    contender.prepare()
    assert (contender.name, contender.precision, contender.run()) == (library, precision, 4 * 5)


def test_ctranslate2_has_the_formats_of_this_machine_and_refuses_others(task: Task) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    peer = PEERS["translate", "ctranslate2"]
    known = peer.precisions_on(task.device)
    assert "fp32" in known and len(known) <= len(ctranslate2.get_supported_compute_types("cpu"))
    with pytest.raises(InputError, match="ctranslate2 computes in fp32"):
        peer.make(task, "fp8").prepare()


def test_what_cannot_be_exported_is_said_and_leaves_nothing(
    task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    layout = [f"model.{side}.positions.layout=fairseq" for side in ("encoder", "decoder")]
    recipe = load_recipe(arch="transformer", preset="base", sets=[*SETS, *layout], flags={}, device="cpu").recipe
    with pytest.raises(InputError, match=r"--peer ctranslate2: .*layout"):
        PEERS["translate", "ctranslate2"].make(replace(task, recipe=recipe), "fp32").prepare()
    assert list(tmp_path.iterdir()) == []


def test_every_matrix_belongs_to_one_side(task: Task) -> None:
    model = build_model(task.recipe.model, device="meta")
    by_source, by_target = parameters_by_side(model)
    d, d_ff, vocabulary = 16, 24, 60
    assert by_source == (4 * d * d + 2 * d * d_ff) + 2 * d * d
    assert by_target == (4 * d * d + 2 * d * d + 2 * d * d_ff) + vocabulary * d
    matrices = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    assert by_source + by_target == sum(count for name, count in matrices.items() if "positions" not in name)


def test_cost_counts_steps_and_bytes_by_format(task: Task) -> None:
    full, half = translation_cost(task, "fp32"), translation_cost(task, "bf16")
    assert (full.steps, full.examples) == (2 * 5, 4)
    assert half.bytes_read == full.bytes_read / 2 and half.flops == full.flops > 0
    assert translation_cost(task, "int8_bf16").bytes_read < half.bytes_read


@pytest.mark.parametrize(
    ("options", "told"),
    [({"new_tokens": 33}, "--new-tokens: found 33"), ({"beam_size": 61}, "--beam-size: found 61")],
)
def test_sizes_that_do_not_fit_are_refused(task: Task, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        check_translation(replace(task, options={**task.options, **options}))


def test_a_decoder_alone_does_not_translate(task: Task) -> None:
    recipe = load_recipe(arch="gpt", preset="tiny", sets=[], flags={}, device="cpu").recipe
    with pytest.raises(InputError, match="not an encoder-decoder"):
        check_translation(replace(task, recipe=recipe))
