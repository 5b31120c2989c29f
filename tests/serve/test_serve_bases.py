"""Adapters of one base share it: memory, answers, limits; and adapters that cannot."""

from __future__ import annotations

import gc
import re
import shutil
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import tformer
from tests.quick import first_is_quick
from tests.random_runs import random_run
from tests.serve.conftest import GPT, LABELS, LETTERS, MASKED, PAIRS, served, silence
from tformer.build import add_adapters, build_model
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.resolve import resolve_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.save import CheckpointContents, save_checkpoint
from tformer.decoding.prompts import suppressed_tokens
from tformer.decoding.settings import GenerationSettings
from tformer.interop.opening import open_checkpoint
from tformer.kernels.functions import find
from tformer.loading import Loaded
from tformer.recipe.load import recipe_from_yaml
from tformer.serve.bases import Bases
from tformer.serve.models import ModelRegistry, Served
from tformer.serve.options import ServeOptions
from tformer.serve.requests import RequestError
from tformer.serve.service import encoded

LARGE = GPT.replace("d_model: 8", "d_model: 512").replace("num_layers: 2", "num_layers: 1").replace("16}", "2048}")


def adapters_of(
    base: Path,
    *,
    seed: int = 1,
    size: float = 0.1,
    average: float | None = None,
    changes: dict[str, Any] | None = None,
    **lora: Any,
) -> Path:
    """A run of random adapters on a run.

    size: of the numbers; average: averaged tensors are the others times this; changes: sections of the recipe; lora: of
    its section `lora`.
    """
    checkpoint = read_checkpoint(resolve_checkpoint(base, "best"))
    stored, named = checkpoint.specs("weights"), {"path": str(checkpoint.path), "sha256": checkpoint.sha256}
    document = yaml.safe_load(checkpoint.recipe_text) | (changes or {}) | {"lora": {"rank": 2, **lora, "base": named}}
    document["model"]["vocab_size"] = stored["embedding.weight"].shape[0]
    recipe = recipe_from_yaml(text := yaml.safe_dump(document), name="test")
    assert recipe.lora is not None and checkpoint.tokenizer_json is not None
    torch.manual_seed(seed)
    model = build_model(recipe.model, num_labels=len(recipe.data.labels) or None)
    add_adapters(model, recipe.model, recipe.lora)
    frozen = model.base_names & (stored.keys() | checkpoint.tied.keys())
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}
    for name, tensor in own.items():
        if name.endswith(("adapter.b", "adapter.magnitude")):
            torch.nn.init.uniform_(tensor, size / 3, size)
    averages = None if average is None else {name: average * tensor for name, tensor in own.items()}
    contents = CheckpointContents.derived(checkpoint, own, {"step": 3}, recipe_yaml=text, tied=None, ema=averages)
    run = RunDirectory.create(arch=f"adapters-{seed}", preset="tiny", runs_dir=base.parent)
    run.write_tokenizer(checkpoint.tokenizer_json)
    save_checkpoint(run, 3, contents)
    return Path(run.path)


def base_run(folder: Path, recipe: str = GPT, *, template: str | None = "gpt", **options: Any) -> Path:
    return random_run(folder / "runs", recipe, arch="base", letters=LETTERS, template=template, **options)


def models_of(*runs: Path, **options: Any) -> ModelRegistry:
    return ModelRegistry(ServeOptions(runs=tuple(map(str, runs)), device="cpu", **options))


def loaded(models: ModelRegistry) -> list[Served]:
    return [models.get(entry) for entry in models.entries.values()]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a model, or of a prepared product."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from (*value.parameters(), *value.buffers())
        yield from (each for module in value.modules() for each in tensors_of(getattr(module, "product", None)))
    elif type(value).__module__.startswith("tformer."):
        yield from (each for part in getattr(value, "__dict__", {}).values() for each in tensors_of(part))


def bytes_of(*values: Any) -> int:
    """The bytes of their tensors, each storage once; oneDNN's own layouts have no address."""
    found = {}
    for tensor in (each for value in values for each in tensors_of(value)):
        if tensor.is_mkldnn:
            found[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def size_of(run: Path) -> int:
    """The bytes of its weights in fp32."""
    return 4 * tformer.load(run).model.num_parameters()


def logits_of(run: Loaded) -> Tensor:
    with torch.inference_mode():
        return run.model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits


def assert_equal_logits(run: Loaded, direct: Loaded) -> None:
    """Equal but for rounding, which grows with the numbers: to 1e-5, or 1e-6 of the largest logit."""
    found, expected = logits_of(run), logits_of(direct)
    assert (found - expected).abs().max() < max(1e-5, 1e-6 * float(expected.abs().max()))


# --- memory -----------------------------------------------------------------------------------------------------------


FORMATS = [("fp32", "none", 1e-5), ("bf16", "none", 0.05), ("fp32", "int8", 0.1), ("fp32", "int4", 0.5)]


@first_is_quick(
    ("precision", "quantize", "off", "serves_base"),
    [*((*each, True) for each in FORMATS), *((*each, False) for each in FORMATS)],
    quick=len(FORMATS),
)
def test_adapters_and_their_base_take_the_memory_of_one(
    tmp_path: Path, precision: str, quantize: str, off: float, serves_base: bool
) -> None:
    if quantize == "int4" and find() is None:
        pytest.skip("no C kernels")
    how = {"precision": precision, "quantize": quantize}
    base = base_run(tmp_path, LARGE)
    adapters = [adapters_of(base, seed=seed, size=0.3) for seed in (1, 2)]
    [alone] = loaded(models_of(base, **how))
    runs = loaded(models_of(*([base] if serves_base else []), *adapters, **how))
    assert bytes_of(*(run.model for run in runs)) - bytes_of(alone.model) <= 200_000  # of the factors
    if serves_base:
        assert torch.equal(logits_of(runs[0]), logits_of(alone))
    for run, folder in zip(runs[-2:], adapters, strict=True):
        [merged] = loaded(models_of(folder, **how))  # one alone is merged
        assert merged.base is None and bytes_of(run.model, merged.model) > 1.9 * bytes_of(alone.model)
        exact = logits_of(tformer.load(folder))
        assert (logits_of(run) - exact).std() < off * (exact - logits_of(tformer.load(base))).std()


def test_a_base_is_counted_once_and_freed_with_its_last_user(tmp_path: Path) -> None:
    base = base_run(tmp_path)
    models = models_of(adapters_of(base, seed=1), base, adapters_of(base, seed=2), memory="12KB")
    first, whole, second = models.entries.values()
    [shared] = first.sizes.keys() & whole.sizes.keys() & second.sizes.keys()
    assert re.fullmatch("base:[0-9a-f]{16}:fp32:float32", shared)
    assert first.sizes[shared] == size_of(base) and whole.sizes[whole.name] == 0
    assert 0 < first.sizes[first.name] == second.sizes[second.name] < size_of(base) / 4
    assert models.limit < 2 * size_of(base)
    held = weakref.ref(models.get(first).base)
    for entry in models.entries.values():
        assert models.get(entry).base is held()
    assert all(entry.served for entry in models.entries.values())
    for entry in (second, whole, first):
        gc.collect()
        assert held() is not None
        entry.served = None
    gc.collect()
    assert held() is None


def test_models_that_share_make_room_for_another_one(tmp_path: Path) -> None:
    base, other = base_run(tmp_path), base_run(tmp_path, seed=5)
    models = models_of(adapters_of(base, seed=1), adapters_of(base, seed=2), other, memory="12KB")
    first, second, third = models.entries.values()
    for asked, kept in ((first, {0}), (second, {0, 1}), (third, {2}), (second, {1}), (first, {0, 1})):
        models.get(asked)
        assert {number for number, entry in enumerate((first, second, third)) if entry.served} == kept


# --- answers ----------------------------------------------------------------------------------------------------------

LORA: list[dict[str, Any]] = [
    {}, {"train": ["embedding.*"]}, {"average": 2.0}, {"weights": "int8"}, {"targets": ["q", "v"], "alpha": 3.0},
    {"rslora": True}, {"train": ["final_norm.*"]}, {"train": ["heads.lm.*"]}, {"train": ["feedforward.up.*"]},
    {"weights": "bf16"}, {"weights": "int4"},
]  # fmt: skip


@first_is_quick("options", LORA, quick=4)
def test_texts_and_logits_are_those_of_generate(tmp_path: Path, options: dict[str, Any]) -> None:
    if options.get("weights") == "int4" and find() is None:
        pytest.skip("no C kernels")
    base = base_run(tmp_path, change=silence)
    folders = [adapters_of(base, seed=seed, **options) for seed in (1, 2)]
    runs = loaded(models_of(*folders))
    assert runs[0].base is runs[1].base is not None
    for run, folder in zip(runs, folders, strict=True):
        direct = tformer.load(folder)
        assert_equal_logits(run, direct)
        found, expected = (each.generate(["a", "ghab"], greedy=True) for each in (run, direct))
        assert [str(each) for each in found] == [str(each) for each in expected]


@pytest.mark.parametrize("name", ["decoder.blocks.0.self_attention.q", "decoder.blocks.1.feedforward.down"])
def test_steps_of_decoding_by_the_kernels_have_the_adapters(tmp_path: Path, name: str) -> None:
    """A tape of kernel calls, which repeats a step, must not leave them out."""
    if find() is None:
        pytest.skip("no C kernels")
    base, ids = base_run(tmp_path), torch.tensor([[5, 6, 7, 8, 9, 10]])
    folders = [base, adapters_of(base, size=0.3, targets=[name])]
    alone, run = (each.model for each in loaded(models_of(*folders, quantize="int8", rows=1)))
    with torch.inference_mode():
        steps, cache = [], run.new_cache(1, 8)
        for column in ids.split(1, dim=1):
            steps.append(run(input_ids=column, cache=cache).logits)
        whole, without = (model(input_ids=ids).logits for model in (run, alone))
    assert (torch.cat(steps, dim=1) - whole).abs().max() < 0.2 * (whole - without).abs().max()


def test_texts_that_are_written_in_turns_are_those_of_generate(tmp_path: Path) -> None:
    base = base_run(tmp_path, change=silence)
    runs, prompts = loaded(models_of(base, *(adapters_of(base, seed=seed) for seed in (1, 2)))), ["ab", "c", "defg"]
    expected = [[str(each) for each in tformer.load(run.path).generate(prompts, greedy=True)] for run in runs]
    writers = []
    for run in runs:
        settings = GenerationSettings(temperature=0.0, max_new_tokens=12, eos_id=run.text_tokenizer.special.eos)
        assert run.scheduler is not None
        suppressed = suppressed_tokens(run.text_tokenizer.special, eos=settings.eos_id, suppressed=())
        writers.append(run.scheduler.answers(encoded(run, prompts), settings, suppressed=suppressed))
    for texts in zip(*writers, strict=True):
        for [completion], left in zip(texts, expected, strict=True):
            assert completion.text == left.pop(0)


def test_other_families_and_new_heads_answer_as_their_commands(tmp_path: Path) -> None:
    pairs, masked = base_run(tmp_path / "a", PAIRS, template=None), base_run(tmp_path / "b", MASKED, template="bert")
    folders = [adapters_of(pairs, seed=1), adapters_of(masked, seed=1)]
    folders += [adapters_of(masked, seed=seed, changes=yaml.safe_load(LABELS)) for seed in (2, 3)]
    runs = loaded(models_of(pairs, masked, *folders))
    assert len({id(run.base) for run in runs} - {id(None)}) == 2
    for run in runs:
        direct = tformer.load(run.path)
        if run.model.is_encoder_decoder:
            found, expected = (each.translate(["ab", "cde"]) for each in (run, direct))
            assert [str(each) for each in found] == [str(each) for each in expected]
        elif "masked_lm" in run.model.heads:
            assert_equal_logits(run, direct)
        else:
            assert run.classify("abc").probabilities == pytest.approx(direct.classify("abc").probabilities, abs=1e-5)


@pytest.mark.parametrize("options", [{"dora": True}, {"train": ["*.bias"]}])
def test_adapters_that_cannot_share_are_merged(tmp_path: Path, options: dict[str, Any]) -> None:
    base = base_run(tmp_path)
    models = models_of(base, *(adapters_of(base, seed=seed, **options) for seed in (1, 2)))
    for entry in models.entries.values():
        run = models.get(entry)
        assert run.base is None and list(entry.sizes) == [entry.name]
        assert_equal_logits(run, tformer.load(entry.path))


def test_models_in_other_formats_do_not_share(tmp_path: Path) -> None:
    """The base and adapters beside it in bf16 hold other numbers; so does what is answered in bf16."""
    base = base_run(tmp_path)
    exact, rounded = adapters_of(base, seed=1), adapters_of(base, seed=2, weights="bf16")
    bases = [run.base for run in loaded(models_of(base, exact, rounded))]
    assert bases[0] is bases[1] is not None and bases[2] is None
    checkpoints = [open_checkpoint(exact), open_checkpoint(base)]
    names = set()
    for precision in ("fp32", "bf16"):
        bases_of = Bases(checkpoints, precision, torch.device("cpu"))
        names |= {str(bases_of.of(each)) for each in checkpoints}
    assert len(names) == 2


def test_a_base_that_is_gone_is_an_error_of_the_server(tmp_path: Path) -> None:
    base = base_run(tmp_path)
    models = models_of(adapters_of(base, seed=1), adapters_of(base, seed=2))
    shutil.rmtree(base)
    with pytest.raises(RequestError, match="cannot be loaded") as raised:
        models.get(next(iter(models.entries.values())))
    assert "the base of these adapters, does not exist" in str(raised.value.__cause__)


@pytest.mark.slow
def test_requests_to_adapters_and_base_at_once_are_answered_and_counted(tmp_path: Path) -> None:
    base = base_run(tmp_path, change=silence)
    folders = [adapters_of(base, seed=1), base, adapters_of(base, seed=2)]
    direct = {folder.name: tformer.load(folder) for folder in folders}
    with served(*folders) as server, ThreadPoolExecutor(12) as pool:

        def ask(number: int) -> tuple[str, str, str]:
            name, prompt = folders[number % 3].name, "abcdef"[: 1 + number % 5]
            body = {"model": name, "prompt": prompt, "max_new_tokens": 12, "temperature": 0}
            return name, prompt, server.ask("/generate", **body)["results"][0]["text"]

        for name, prompt, text in pool.map(ask, range(36)):
            assert text == direct[name].generate(prompt, greedy=True, max_new_tokens=12).text
        metrics = server.send("/metrics").body.decode()
    found = re.findall(r'tformer_model_bytes{model="(.*)"} (\S+)', metrics)
    sizes = {name: int(size) for name, size in found}
    assert sizes.pop(base.name) == 0 and all(0 < sizes.pop(folders[number].name) < 2000 for number in (0, 2))
    assert list(sizes.values()) == [size_of(base)]
