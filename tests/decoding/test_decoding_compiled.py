"""Compiled decoding: the same tokens as uncompiled decoding, buckets, and the CUDA path on fake devices."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.decoding.random_models import random_model
from tests.pairwise import pairwise
from tests.quick import first_is_quick
from tformer.build import build_model
from tformer.decoding import buckets
from tformer.decoding.beam_search import beam_search
from tformer.decoding.buckets import BucketedCache, CompiledDecoder, RecordedDecoder, make_step
from tformer.decoding.compilation import compile_decoding, missing_compiler, no_compiled_steps
from tformer.decoding.generate import generate
from tformer.decoding.inference import cast_matrices
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.decoding.stepper import EnsembleStepper, ModelStepper
from tformer.model import Transformer
from tformer.nn.cache import ModelCache
from tformer.nn.fixed_cache import FixedCache
from tformer.recipe.model import Model
from tformer.support.errors import InputError

CPU = torch.device("cpu")
VOCAB = 29
POSITIONS: dict[str, dict[str, Any]] = {
    "rope": {"kind": "rope"},
    "learned": {"kind": "learned", "offset": 2},
    "alibi": {"kind": "alibi"},
    "t5_bias": {"kind": "t5_bias", "buckets": 8, "max_distance": 16},
    "dynamic": {"kind": "rope", "scaling": {"kind": "dynamic", "factor": 4.0, "original_max_seq_len": 8}},
}
slow = pytest.mark.slow
every_position = pytest.mark.parametrize(
    "positions", [kind if kind == "rope" else pytest.param(kind, marks=slow) for kind in POSITIONS]
)
PROMPTS = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10], [11, 12, 13, 14]]
SOURCES = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 13, 2], [14, 2], [15, 16, 17, 2]]
PREFIXES = [[1], [1, 20, 21, 22], [1, 23], [1, 24]]


def make(
    positions: str = "rope", *, encoder: bool = False, max_seq_len: int = 64, seed: int = 0, **stack: Any
) -> Transformer:
    """A tiny model whose every parameter is random."""
    given = {"positions": POSITIONS[positions], **stack}
    return random_model(given, encoder=encoder, vocab_size=VOCAB, max_seq_len=max_seq_len, seed=seed)


def attach(model: Transformer, *, backend: str = "eager", smallest: int = 8, ahead: int = 4) -> CompiledDecoder:
    model.compiled_decoder = CompiledDecoder(model, backend=backend, smallest=smallest, ahead=ahead)
    counters.clear()
    return model.compiled_decoder


def num_graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def write(model: Transformer, *, sources: list[list[int]] | None = None, **changes: Any) -> list[list[Any]]:
    settings = GenerationSettings(**{"max_new_tokens": 20, "temperature": 0.0, "logprobs": True, **changes})
    return generate(model, PROMPTS if sources is None else PREFIXES, settings, sources=sources)


def tokens(results: list[list[Any]]) -> list[list[Any]]:
    return [[one.ids for one in row] for row in results]


def assert_same(found: list[list[Any]], expected: list[list[Any]]) -> None:
    assert tokens(found) == tokens(expected)
    for row, expected_row in zip(found, expected, strict=True):
        for one, other in zip(row, expected_row, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def search(models: list[Transformer], *, beam: int = 3, **changes: Any) -> list[list[Any]]:
    steppers = [
        ModelStepper(model, PREFIXES, capacity=15)
        if model.encoder is None
        else ModelStepper(model, PREFIXES, sources=SOURCES, capacity=15)
        for model in models
    ]
    stepper = steppers[0] if len(steppers) == 1 else EnsembleStepper(steppers)
    found = beam_search(stepper, BeamSettings(beam_size=beam, max_new_tokens=15, eos_id=2, **changes))
    return [[(one.ids, pytest.approx(one.score, abs=1e-4)) for one in row] for row in found]


def record_without_gpu(model: Transformer, monkeypatch: pytest.MonkeyPatch, **sizes: int) -> list[str]:
    """Let the model record its steps, with a recording that runs the step again; returns what was recorded so far."""
    recorded: list[str] = []

    def record(run: Any) -> Any:
        recorded.append("step")
        return run

    monkeypatch.setattr(buckets, "record", record)
    model.compiled_decoder = RecordedDecoder(model, **{"smallest": 8, "ahead": 4, **sizes})
    return recorded


@every_position
@first_is_quick("encoder", [False, True], ids=["decoder", "encoder-decoder"], quick=2)
def test_recorded_steps_write_the_same(positions: str, encoder: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(positions, encoder=encoder)
    expected, beams = write(model, sources=SOURCES if encoder else None), search([model])
    recorded = record_without_gpu(model, monkeypatch)
    assert_same(write(model, sources=SOURCES if encoder else None), expected)
    assert len(recorded) == (3 if encoder else 2)  # buckets of 16 and 32, after one of 8 for short prefixes
    assert search([model]) == beams


def test_a_recording_serves_the_next_batch_and_goes_with_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    recorded = record_without_gpu(model, monkeypatch, smallest=64)
    first = write(model)
    assert tokens(write(model)) == tokens(first) and len(recorded) == 1


def test_rows_that_left_do_not_lengthen_frequencies_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frequencies of `dynamic` follow the longest row in use; a longer batch used the same memory before."""
    model = make("dynamic")
    settings = GenerationSettings(max_new_tokens=12, temperature=0.0, logprobs=True)
    batches = [[[*range(1, 21)]] * 4, [[7, 8], [5], [6, 7]]]
    expected = [generate(model, batch, settings) for batch in batches]
    record_without_gpu(model, monkeypatch, smallest=64)
    for batch, alone in zip(batches, expected, strict=True):
        assert_same(generate(model, batch, settings), alone)


def test_a_step_that_cannot_be_recorded_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    expected, tried = write(model), []

    def record(run: Any) -> Any:
        tried.append(run)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(buckets, "record", record)
    model.compiled_decoder = RecordedDecoder(model, smallest=8, ahead=4)
    assert_same(write(model), expected)
    assert len(tried) == 1


def test_a_recording_goes_with_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.setattr(buckets, "record", lambda run: lambda: torch.zeros(4, VOCAB))  # a graph holds addresses only
    decoder = model.compiled_decoder = RecordedDecoder(model, smallest=64)
    write(model)
    assert len(decoder._replays) == 1
    decoder._caches.clear()
    gc.collect()
    assert len(decoder._replays) == 0


@every_position
@pytest.mark.parametrize("encoder", [False, True], ids=["decoder", "encoder-decoder"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_replays_recorded_steps(positions: str, encoder: bool) -> None:
    model = make(positions, encoder=encoder).cuda()
    sources = SOURCES if encoder else None
    expected, beams = write(model, sources=sources), search([model])
    model.compiled_decoder = RecordedDecoder(model, smallest=8, ahead=4)
    for _ in range(2):
        found = write(model, sources=sources)
        assert tokens(found) == tokens(expected)
        assert found[0][0].logprobs == pytest.approx(expected[0][0].logprobs, abs=1e-4)
    assert search([model]) == beams


@slow
@pytest.mark.parametrize("positions", POSITIONS)
def test_prompts_of_different_lengths_are_continued_alike_across_buckets(positions: str) -> None:
    """Its quick twins are `test_recorded_steps_write_the_same` and the test after the next."""
    model = make(positions)
    expected = write(model)
    attach(model, backend="aot_eager")
    assert_same(write(model), expected)  # prompts of 6 and 20 tokens more: buckets of 16 and 32
    assert num_graphs() == 2


def test_a_bucket_is_a_power_of_two_and_the_first_one_looks_ahead() -> None:
    decoder = CompiledDecoder(make(), backend="eager")
    assert [decoder.bucket(slots) for slots in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]
    assert decoder.first_bucket(100, 120) == 128  # no more is asked for
    assert decoder.first_bucket(100, 5000) == 512  # 100 + 256


def test_nothing_is_compiled_again_within_a_bucket_nor_for_the_next_batch() -> None:
    model = make()
    expected = write(model)
    attach(model, smallest=64)
    first = write(model)
    assert_same(first, expected)
    assert num_graphs() == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert tokens(write(model)) == tokens(first)
    assert num_graphs() == 1


def test_addresses_stay_from_batch_to_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    record_without_gpu(model, monkeypatch, smallest=64)
    decoder = model.compiled_decoder
    assert decoder is not None
    write(model)
    [(cache, _)] = decoder._caches
    before = [tensor.data_ptr() for tensor in cache.tensors()]
    write(model, eos_id=2)
    generate(model, PROMPTS[:3], GenerationSettings(max_new_tokens=5))  # fits into the rows that there are
    [(again, owner)] = decoder._caches
    assert again is cache and owner() is None
    assert [tensor.data_ptr() for tensor in again.tensors()] == before


def test_rows_that_end_leave_the_others_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(seed=3)
    free = write(model, max_new_tokens=24)
    ends = free[1][0].ids[4], free[3][0].ids[9]
    expected = write(model, max_new_tokens=24, stop_tokens=ends)
    assert len({len(row[0].ids) for row in expected}) > 1
    record_without_gpu(model, monkeypatch)
    assert_same(write(model, max_new_tokens=24, stop_tokens=ends), expected)


@pytest.mark.parametrize("encoder", [False, True], ids=["decoder", "encoder-decoder"])
def test_several_samples_and_a_sliding_context(encoder: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(encoder=encoder, max_seq_len=12)
    sources = SOURCES if encoder else None
    expected = write(model, sources=sources, num_samples=2, temperature=1.0, top_p=0.8, seed=5)
    record_without_gpu(model, monkeypatch)
    decoder = model.compiled_decoder
    assert decoder is not None
    assert_same(write(model, sources=sources, num_samples=2, temperature=1.0, top_p=0.8, seed=5), expected)
    assert len(decoder._caches) <= 2  # of 8 and of 16 slots: windows are read again into the same memory


@slow
@pytest.mark.parametrize(("positions", "encoder"), pairwise(kind=list(POSITIONS), encoder=[False, True]))
def test_beam_search_finds_the_same(positions: str, encoder: bool) -> None:
    """Its quick twin is `test_recorded_steps_write_the_same`."""
    model = make(positions, encoder=encoder, seed=1)
    expected = search([model])
    attach(model)
    found = search([model])
    graphs = num_graphs()
    assert found == expected and graphs <= 3
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert search([model]) == expected
    assert num_graphs() == graphs


@slow
def test_a_beam_of_one() -> None:
    model = make(encoder=True)
    expected = search([model], beam=1)
    attach(model)
    assert search([model], beam=1) == expected


@slow
def test_an_ensemble_of_compiled_models() -> None:
    models = [make(encoder=True, seed=seed) for seed in (1, 2)]
    expected = search(models)
    for model in models:
        attach(model)
    assert search(models) == expected


def test_two_searches_of_one_model_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    record_without_gpu(model, monkeypatch)
    one, other = (ModelStepper(model, prompts, capacity=9) for prompts in (PROMPTS[:2], PROMPTS[2:]))
    one.start(2)
    other.start(2)
    ids = torch.tensor([3, 4, 5, 6])
    found = [one.step(ids), other.step(ids), one.step(ids), other.step(ids)]
    model.compiled_decoder = None
    for stepper, index in ((ModelStepper(model, PROMPTS[:2], capacity=9), 0),
                           (ModelStepper(model, PROMPTS[2:], capacity=9), 1)):  # fmt: skip
        stepper.start(2)
        torch.testing.assert_close(found[index], stepper.step(ids), atol=1e-5, rtol=0)
        torch.testing.assert_close(found[index + 2], stepper.step(ids), atol=1e-5, rtol=0)


def test_memory_of_batches_long_past_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MAX_FREE_CACHES", 1)
    model = make(num_layers=1)
    record_without_gpu(model, monkeypatch)
    decoder = model.compiled_decoder
    assert decoder is not None
    for count in range(1, 5):
        generate(model, [[1]] * 2**count, GenerationSettings(max_new_tokens=2, temperature=0.0))
    assert len(decoder._caches) <= 2


def test_graphs_are_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MOST_GRAPHS", 2)
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: (asked.append(function), function)[1])
    model = make(num_layers=1)
    attach(model)
    for count in (1, 3, 7, 15):
        generate(model, [[1]] * count, GenerationSettings(max_new_tokens=2, temperature=0.0))
    assert len(asked) == 2 and len({id(function.__code__) for function in asked}) == 2


@slow
@pytest.mark.parametrize("most", [2, 64])
def test_more_shapes_than_the_compiler_takes_by_itself(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its quick twin is `test_graphs_are_forgotten_where_there_are_too_many`."""
    monkeypatch.setattr(buckets, "MOST_GRAPHS", most)
    model = make(num_layers=1)
    attach(model)
    with torch._dynamo.config.patch(recompile_limit=1):
        for count in (1, 3, 7, 15):
            generate(model, [[1]] * count, GenerationSettings(max_new_tokens=2, temperature=0.0))
    assert num_graphs() == 4


@pytest.mark.parametrize("attention", [{"kind": "performer", "features": 16}, {"kind": "sliding_window", "window": 8}])
def test_kinds_that_see_no_whole_rows_of_keys_are_refused(attention: dict[str, Any]) -> None:
    model = make("learned", attention=attention)
    assert "layer 0 of the decoder" in str(no_compiled_steps(model))
    with pytest.raises(InputError, match="decoding cannot be compiled: layer 0"):
        compile_decoding(model, torch.float32)
    assert model.compiled_decoder is None


@slow
def test_additive_attention_is_compiled_too() -> None:
    model = make("learned", attention={"kind": "additive"})
    expected = write(model)
    attach(model)
    assert_same(write(model), expected)


def test_without_a_compiler_it_is_said_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match=r"found no C\+\+ compiler"):
        compile_decoding(make(), torch.float32)


@pytest.mark.parametrize("chosen", ["none-such", ""])
def test_a_compiler_that_is_not_there_is_none(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", chosen)
    assert missing_compiler(CPU) == "C++ compiler"


def test_a_compiler_that_fails_is_no_error_of_ours() -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("cannot make code\nof this")

    model = make(num_layers=1)
    attach(model, backend=failing)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(InputError, match=r"^decoding cannot be compiled: cannot make code$"):
            generate(model, [[1]], GenerationSettings(max_new_tokens=2, temperature=0.0))


@slow
def test_bf16_matrices_give_the_same_tokens() -> None:
    model = make(encoder=True)
    compile_decoding(model, torch.bfloat16, backend="eager")
    decoder, model.compiled_decoder = model.compiled_decoder, None
    expected = write(model, sources=SOURCES, max_new_tokens=6)
    model.compiled_decoder = decoder
    found = write(model, sources=SOURCES, max_new_tokens=6)
    for row, expected_row in zip(found, expected, strict=True):
        assert row[0].logprobs[:2] == pytest.approx(expected_row[0].logprobs[:2], abs=0.05)


@slow
@pytest.mark.skipif(missing_compiler(CPU) is not None, reason="needs a C++ compiler")
def test_generated_code_writes_the_same() -> None:
    """Its quick twin is `test_nothing_is_compiled_again_within_a_bucket_nor_for_the_next_batch`."""
    model = make(num_layers=1)
    expected = write(model)
    attach(model, backend="inductor", smallest=32)
    assert_same(write(model), expected)
    assert num_graphs() == 1


@slow
def test_marked_addresses_change_neither_graphs_nor_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where each step begins a replay and the memory of a cache is named to the compiler."""
    monkeypatch.setattr(buckets, "replays_graphs", lambda device: True)
    begun: list[None] = []
    monkeypatch.setattr("torch.compiler.cudagraph_mark_step_begin", lambda: begun.append(None))
    model = make(encoder=True)
    expected = write(model, sources=SOURCES)
    attach(model, backend="aot_eager", smallest=32)
    assert_same(write(model, sources=SOURCES), expected)
    assert num_graphs() == 1 and len(begun) == 19
    generate(model, PREFIXES[:1], GenerationSettings(max_new_tokens=3), sources=SOURCES[:1])  # another memory
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(write(model, sources=SOURCES), expected)


CUDA, META = torch.device("cuda"), torch.device("meta")
CUDA_POSITIONS = ["rope", "learned", "alibi", "sinusoidal", "t5_bias", "shaw", "none"]


def indexes_fake_cuda() -> bool:
    try:
        with FakeTensorMode():
            return torch.empty(2, 2, device=CUDA)[:, -1].is_cuda
    except RuntimeError:
        return False


devices = pytest.mark.parametrize(
    "device",
    [
        META,
        pytest.param(CUDA, marks=pytest.mark.skipif(not indexes_fake_cuda(), reason="needs a PyTorch with CUDA")),
    ],
    ids=str,
)


def skeleton(positions: str, *, encoder: bool, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """A tiny model without memory."""
    side = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "positions": {"kind": positions}}
    sides = {"encoder": side, "decoder": side} if encoder else {"decoder": side}
    section = Model.model_validate({"d_model": 24, "max_seq_len": 32, "vocab_size": 29} | sides)
    model = build_model(section, device="meta").eval()
    cast_matrices(model, dtype)
    return model


def put(model: Transformer, device: torch.device) -> None:
    """On a device that need not be there, inside of a fake mode; `to` would ask for a driver."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))
        for name, table in module._buffers.items():
            if table is not None:
                module._buffers[name] = torch.empty_like(table, device=device)


def prefilled(model: Transformer, device: torch.device) -> ModelCache:
    cache = model.new_cache(3, 4, device=device, dtype=model.compute_dtype)
    ids = torch.ones(3, 4, dtype=torch.long, device=device)
    mask = torch.ones(3, 4, dtype=torch.bool, device=device)
    if model.encoder is None:
        model(ids, attention_mask=mask, cache=cache)
    else:
        model(ids, attention_mask=mask, decoder_input_ids=ids, decoder_attention_mask=mask, cache=cache)
    return cache


@devices
@pytest.mark.parametrize(
    ("positions", "dtype", "encoder"),
    pairwise(positions=CUDA_POSITIONS, dtype=[torch.bfloat16, torch.float32], encoder=[False, True]),
)
def test_the_step_stays_on_the_device_and_asks_it_nothing(
    positions: str, dtype: torch.dtype, encoder: bool, device: torch.device
) -> None:
    model = skeleton(positions, encoder=encoder, dtype=dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        put(model, device)
        read = prefilled(model, device)
        cache = FixedCache(read, sentences=4, beams=2, slots=16, source_slots=16 if encoder else 0)
        cache.fill(read)
        run = make_step(model)
        logits = run(cache)
        assert (logits.shape, logits.dtype, logits.device.type) == ((8, 29), torch.float32, device.type)
        assert all(tensor.device.type == device.type for tensor in cache.tensors())


@devices
def test_the_traced_step_copies_nothing_to_or_from_the_host(device: torch.device) -> None:
    model = skeleton("rope", encoder=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.inference_mode():
        put(model, device)
        cache = FixedCache(prefilled(model, device), sentences=3, beams=1, slots=16, source_slots=16)
        run = make_step(model)

        def step(ids: Tensor) -> Tensor:
            cache.ids.copy_(ids)
            return run(cache)

        with mode:
            graph = make_fx(step)(torch.ones(3, 1, dtype=torch.long, device=device)).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert any("index_copy" in name for name in names)
    assert not any("_local_scalar_dense" in name or "nonzero" in name for name in names)
    devices = {
        node.kwargs["device"].type for node in graph.nodes if isinstance(node.kwargs.get("device"), torch.device)
    }
    assert devices <= {device.type}


@devices
@pytest.mark.parametrize("beams", [1, 3])
def test_between_steps_too_rows_move_within_their_memory(
    beams: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "replays_graphs", lambda device: True)
    marked: list[Any] = []
    monkeypatch.setattr("torch._dynamo.mark_static_address", lambda tensor, guard: marked.append((tensor, guard)))
    steps: list[str] = []
    monkeypatch.setattr("torch.compiler.cudagraph_mark_step_begin", lambda: steps.append("begin"))
    asked: dict[str, Any] = {}

    def compile_(function: Any, **options: Any) -> Any:
        asked.update(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    model = skeleton("rope", encoder=True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        put(model, device)
        decoder = CompiledDecoder(model, smallest=8, ahead=2)
        assert asked == {"fullgraph": True, "dynamic": False, "backend": "inductor", "mode": "reduce-overhead"}
        cache: BucketedCache = decoder.begin(prefilled(model, device), capacity=12, beams=beams)
        assert cache.fixed is not None
        assert [id(tensor) for tensor, _ in marked] == [id(tensor) for tensor in cache.fixed.tensors()]
        assert not any(guard for _, guard in marked)
        for step in range(8):
            ids = torch.ones(cache.batch_size, 1, dtype=torch.long, device=device)
            logits = cache.step(ids, ids + step)
            assert (len(logits), logits.device.type) == (cache.batch_size, device.type)
            cache.reorder_beams(torch.arange(cache.batch_size, device=device))
            if step == 5:
                cache.keep_sentences(torch.arange(2, device=device))
        assert steps == ["begin"] * 8
        assert (cache.length, cache.fixed.slots, cache.batch_size) == (12, 16, 2 * beams)
        with pytest.raises(ValueError, match="holds 12 positions, 13 are needed"):
            cache.step(ids[: cache.batch_size], ids[: cache.batch_size])


def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing_compiler(CUDA) == "Triton"


def test_triton_needs_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert missing_compiler(CUDA) == "C compiler"
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    assert missing_compiler(CUDA) is None
