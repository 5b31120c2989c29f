"""The compiled step as a GPU would see it: on fake tensors, which have a device and a shape but no numbers.

Reading a number on the host (`.item()`), or mixing devices, raises there. A PyTorch made for CPUs alone cannot index
fake CUDA tensors; there the `meta` device stands in, which the model treats alike: as no CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tformer.build import build_model
from tformer.decoding import compiled
from tformer.decoding.compiled import BucketedCache, CompiledDecoder, make_step, missing_compiler
from tformer.decoding.precision import cast_matrices
from tformer.model import Transformer
from tformer.nn.cache import ModelCache
from tformer.nn.fixed_cache import FixedCache
from tformer.recipe.model import Model

CUDA, META = torch.device("cuda"), torch.device("meta")
POSITIONS = ["rope", "learned", "alibi", "sinusoidal", "t5_bias", "shaw", "none"]


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
@pytest.mark.parametrize("encoder", [False, True], ids=["decoder", "encoder-decoder"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("positions", POSITIONS)
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
    monkeypatch.setattr(compiled, "replays_graphs", lambda device: True)
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
