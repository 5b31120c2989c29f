"""A model as ONNX graphs for onnxruntime, in a folder that the classes of optimum load (optional).

    encoder; decoder without cache   model.onnx                     input_ids, attention_mask -> logits
    decoder                          model.onnx                     also position_ids, past_key_values.* -> present.*
    encoder-decoder                  encoder_model.onnx             input_ids, attention_mask -> last_hidden_state
                                     decoder_model.onnx             first step: reads the encoder's output
                                     decoder_with_past_model.onnx   later steps: read its keys and values

PyTorch exports the model itself; a `Graph` only gives its tensors names and an order. One file serves every batch and
length; the past of a decoder may be empty, then it reads a prompt. Before the folder appears, onnxruntime computes
every file, and its outputs are compared with the model's.

Shape legend: B batch, T new tokens, S slots (those of the past, then T), K kv heads, h head_dim, v value_dim.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tformer.build import build_model
from tformer.checkpoint.average import require_new
from tformer.checkpoint.read import Checkpoint
from tformer.interop.choose import ExportTarget
from tformer.interop.exporting import ExportReport, export_checkpoint, planned, resolved, tokenizers_of
from tformer.interop.read_model import read_model
from tformer.model import Transformer
from tformer.nn.attention.mechanism import Mechanism
from tformer.nn.cache import CrossCache
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.fixed_cache import FixedCache, FixedLayer
from tformer.recipe.model import Model, layer_sections
from tformer.support import files
from tformer.support.errors import InputError, require_package
from tformer.workers.work import QUIET, Work

TOLERANCE = 1e-4  # largest difference of an output, times its largest number where that exceeds 1
EXAMPLE = {"batch": 2, "num_choices": 5, "sequence": 3, "past": 4, "total": 7, "source": 6}
CHECKED = (
    {"batch": 1, "num_choices": 2, "sequence": 6, "past": 0, "total": 6, "source": 4},
    {"batch": 3, "num_choices": 4, "sequence": 1, "past": 6, "total": 7, "source": 3},
)
"""Sizes of inputs that a graph is traced with (EXAMPLE), and that its file is compared for."""
TASKS = {"AutoModelForPreTraining": "CustomTasks"}
TASKS |= dict.fromkeys(("AutoModel", "AutoModelForTextEncoding"), "FeatureExtraction")
"""Class of transformers -> the end of the name of optimum's ORTModelFor..., where it differs."""


def export_onnx(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    dtype: str = "fp32",
    cache: bool = True,
    model_type: str | None = None,
    work: Work = QUIET,
) -> ExportReport:
    """Write a folder with ONNX files beside what `export_checkpoint` writes, without its weights.

    Args:
        checkpoint, out, model_type, work: see `export_checkpoint`.
        dtype: fp32, or int8: weights of products in 8 bits, their inputs rounded by their range (dynamic quantization).
        cache: decoders read and return keys and values; False: they read all tokens in every step.

    Raises:
        InputError: as `export_checkpoint`; also where a package is not installed, the model has a part that is not
            written, or onnxruntime computes other numbers.
    """
    target = Path(out)
    require_new(target)
    plan(checkpoint, model_type)
    reports: list[ExportReport] = []

    def fill(folder: Path) -> None:
        between = folder / "huggingface"
        report = export_checkpoint(checkpoint, between, dtype=torch.float32, model_type=model_type)
        foreign = read_model(between)  # the model in the form of its class, as config.json says
        model = build_model(foreign.model).eval().requires_grad_(False)
        model.load_state_dict(foreign.weights(), strict=False)  # the further names of tied tensors are missing
        write_graphs(folder, graphs_of(model, cache=cache), exact=between if dtype == "int8" else folder, work=work)
        made = [path for path in folder.iterdir() if path.is_file()]
        for name in {Path(name).parts[0] for name in report.files if ".safetensors" not in name}:
            files.rename(between / name, folder / name)
        files.remove_tree(between)
        for path in made:
            files.sync_file(path)
        task = TASKS.get(report.auto_class, report.auto_class.removeprefix("AutoModelFor"))
        own: dict[str, Any] = {"path": target, "dtype": dtype, "auto_class": f"optimum.onnxruntime.ORTModelFor{task}"}
        own["files"] = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
        own["num_bytes"] = sum(path.stat().st_size for path in made)
        if model.decoder is not None and not cache:
            own["notes"] = (*report.notes, "optimum loads it with use_cache=False")
        reports.append(replace(report, **own))

    files.require_writable_folder(target)
    with files.storage_errors(target):
        files.publish_directory(target, fill)
    return reports[0]


def plan(checkpoint: Checkpoint, model_type: str | None = None) -> ExportTarget:
    """The class of a checkpoint's model; raises the errors of `export_onnx` that the recipe shows."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require_package(package, extra="onnx", user="--to onnx")
    tokenizers = tokenizers_of(checkpoint)
    refuse_unwritten(resolved(checkpoint.recipe, tokenizers))
    return planned(checkpoint.recipe, tokenizers, model_type)[0]


def refusal(model: Model) -> str | None:
    """The keys of a recipe's model that cannot become a graph; None if all can."""
    found, kinds = [], [head.kind for head in model.heads]
    if model.is_encoder_decoder and "lm" not in kinds:
        found.append(f"model.heads: {', '.join(kinds) or 'none'} of an encoder-decoder, expected lm")
    for side, stack in model.stacks.items():
        for layer in layer_sections(stack, path=f"model.{side}"):
            if not layer.attention.mechanism.traces_lengths:
                found.append(f"model.{side}.attention.kind: {layer.attention.kind}")
    return "; ".join(dict.fromkeys(found)) or None


def refuse_unwritten(model: Model) -> None:
    """Raise InputError for a model with a part that no graph is written of."""
    if lacking := refusal(model):
        raise InputError(f"--to onnx does not write {lacking}", hint="--to huggingface writes it")


# --- what a graph computes -------------------------------------------------------------------------------------------

Tensors = dict[str, Tensor]
Compute = Callable[[Transformer, Tensors], Tensors]
"""(model, {input: tensor}) -> {output: tensor}."""


def slot_names(stem: str, layer: int, part: str) -> tuple[str, str]:
    """Names of a layer's keys and values; part: .decoder or .encoder beside an encoder, else empty."""
    return f"{stem}.{layer}{part}.key", f"{stem}.{layer}{part}.value"


def answer_names(heads: Sequence[str]) -> dict[str, str | None]:
    """Output -> kind of the head that gives it; None: the last hidden states."""
    kinds = [kind for kind in heads if kind != "pooler"]
    if "span" in kinds:
        return {"start_logits": "span", "end_logits": "span"}
    if kinds:
        return {"logits": kinds[0], **{f"{kind}_logits": kind for kind in kinds[1:]}}
    return {"last_hidden_state": None, **({"pooler_output": "pooler"} if heads else {})}


class JoinedLayer(FixedLayer):
    """Cache of a self-attention layer: new keys and values behind the graph's inputs."""

    def __init__(self, past: tuple[Tensor | None, Tensor | None]) -> None:
        self.past = past

    def append(self, k_BKTh: Tensor, v_BKTv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.past
        self.keys = k_BKTh if keys is None else torch.cat((keys, k_BKTh), dim=2)
        self.values = v_BKTv if values is None else torch.cat((values, v_BKTv), dim=2)
        return self.keys, self.values


class JoinedCache(FixedCache):
    """A decoder's cache made of inputs of a graph, `past_key_values.N`; its outputs are `present.N`."""

    def __init__(self, model: Transformer, given: Tensors, *, positions_BS: Tensor, valid_BS: Tensor) -> None:
        def past(layer: int, part: str) -> tuple[Tensor | None, Tensor | None]:
            key, value = slot_names("past_key_values", layer, part)
            return given.get(key), given.get(value)

        assert model.decoder is not None
        numbers = range(len(model.decoder.blocks))
        self.part = "" if model.encoder is None else ".decoder"
        self.layers = [JoinedLayer(past(layer, self.part)) for layer in numbers]
        self.cross = [CrossCache(*past(layer, ".encoder")) for layer in numbers if model.encoder is not None]
        self.key_positions, self.key_valid = positions_BS, valid_BS
        self.key_ids, self.encoder_mask = None, None

    def advance(self, positions_R1: Tensor) -> tuple[Tensor, Tensor]:
        return self.key_positions, self.key_valid

    def present(self) -> Tensors:
        found: Tensors = {}
        parts: dict[str, Sequence[FixedLayer | CrossCache]] = {self.part: self.layers, ".encoder": self.cross}
        for part, caches in parts.items():
            for number, each in enumerate(caches):
                key, value = slot_names("present", number, part)
                assert each.keys is not None and each.values is not None
                found[key], found[value] = each.keys, each.values
        return found


def in_one_pass(model: Transformer, given: Tensors) -> Tensors:
    """Outputs of the heads, or of the body, for all tokens or an image."""
    rows = {name: each.flatten(0, 1) if each.dim() == 3 else each for name, each in given.items()}  # choices
    if "attention_mask" in rows:
        rows["attention_mask"] = rows["attention_mask"].bool()
    out = model(**rows)
    scores = {kind: model.heads[kind](out.hidden, out.mask) for kind in model.heads}
    made = {name: scores.get(kind or "", out.hidden) for name, kind in answer_names(list(model.heads.keys())).items()}
    if "span" in scores:
        made["start_logits"], made["end_logits"] = scores["span"].unbind(-1)
    if "multiple_choice" in scores:
        made["logits"] = made["logits"].view(given["input_ids"].shape[:2])
    return made


def decoder_step(model: Transformer, given: Tensors) -> Tensors:
    """Logits of new tokens after a past, which may be empty. An encoder-decoder's target is never padded."""
    ids_BT, source_mask = given["input_ids"], given.get("encoder_attention_mask")
    if source_mask is None:
        valid_BS = given["attention_mask"].bool()
    else:
        keys = given.get("past_key_values.0.decoder.key")
        past = 0 if keys is None else keys.shape[2]
        valid_BS = torch.ones(1, past + ids_BT.shape[1], dtype=torch.bool)
    pos_BS = (valid_BS.long().cumsum(dim=1) - 1).clamp(min=0)
    cache = JoinedCache(model, given, positions_BS=pos_BS, valid_BS=valid_BS)
    if source_mask is None:
        out = model(ids_BT, position_ids=given["position_ids"], cache=cache)
    else:
        memory, target = given.get("encoder_hidden_states"), {"decoder_input_ids": ids_BT}
        target["decoder_position_ids"] = pos_BS[:, valid_BS.shape[1] - ids_BT.shape[1] :]
        out = model(**target, encoder_hidden=memory, encoder_mask=source_mask.bool(), cache=cache)
    return {"logits": model.heads["lm"](out.hidden), **cache.present()}


# --- graphs and files ------------------------------------------------------------------------------------------------


class Input(NamedTuple):
    """An input of a graph. axes: names of sizes that vary, and numbers; below: bound of its integers, None: floats."""

    axes: tuple[str | int, ...]
    below: int | None = None


class Graph(nn.Module):
    """A function of tensors in a fixed order that becomes one file; outputs: names of the file's outputs."""

    def __init__(
        self, model: Transformer, compute: Compute, inputs: Mapping[str, Input], outputs: Sequence[str]
    ) -> None:
        super().__init__()
        self.model, self.compute, self.outputs = model, compute, list(outputs)
        self.names, self.inputs = list(inputs), list(inputs.values())
        self.eval()

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        sizes: dict[str | int, Any] = {}
        for tensor, wanted in zip(tensors, self.inputs, strict=True):
            for axis, size in zip(wanted.axes, tensor.shape, strict=True):
                torch._check(size == sizes.setdefault(axis, size))  # sizes of one name are equal
        if "total" in sizes:
            torch._check(sizes["total"] == sizes["past"] + sizes["sequence"])
        made = self.compute(self.model, dict(zip(self.names, tensors, strict=True)))
        return tuple(made[name] for name in self.outputs)

    def example(self, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        """Random inputs; masks have holes anywhere."""
        generator, made = torch.Generator().manual_seed(0), []
        for axes, below in self.inputs:
            shape = [sizes[axis] if isinstance(axis, str) else axis for axis in axes]
            if below is None:
                made.append(torch.randn(shape, generator=generator))
            else:
                made.append(torch.randint(below, shape, generator=generator))
        return tuple(made)


def graphs_of(model: Transformer, *, cache: bool = True) -> dict[str, Graph]:
    """The graphs of a model by the names of their files; cache: see `export_onnx`."""
    embedding, encoder, decoder = model.embedding, model.encoder, model.decoder
    tokens = ("batch", "num_choices", "sequence") if "multiple_choice" in model.heads else ("batch", "sequence")
    for stack in (encoder, decoder):
        if stack is not None:
            stack.layerdrop = None  # of training; PyTorch's compiler does not enter its loop
    if isinstance(embedding, TokenEmbedding):
        inputs = {"input_ids": Input(tokens, len(embedding.weight)), "attention_mask": Input(tokens, 2)}
        if embedding.token_types is not None and len(embedding.token_types) > 1:
            inputs["token_type_ids"] = Input(tokens, len(embedding.token_types))
    else:
        size = embedding.image_size
        inputs = {"pixel_values": Input(("batch", embedding.channels, size, size))}
    if decoder is not None and encoder is None and "lm" in model.heads:
        inputs["position_ids"] = Input(tokens, model.max_seq_len)
    if decoder is None or "lm" not in model.heads or (encoder is None and not cache):
        return {"model.onnx": Graph(model, in_one_pass, inputs, list(answer_names(list(model.heads))))}
    past: dict[str, Input] = {}
    for number, block in enumerate(decoder.layers):
        own, cross = block.self_attention, block.cross_attention
        parts = {"": own} if cross is None else {".decoder": own, ".encoder": cross}
        for part, attention in parts.items():
            key, value = slot_names("past_key_values", number, part)
            rows: tuple[str | int, ...] = ("batch", attention.num_kv_heads, "source" if attention is cross else "past")
            past |= {key: Input((*rows, attention.head_dim)), value: Input((*rows, attention.value_dim))}
    present = [name.replace("past_key_values", "present") for name in past]
    if encoder is None:
        inputs = {**inputs, "attention_mask": Input(("batch", "total"), 2), **past}
        return {"model.onnx": Graph(model, decoder_step, inputs, ["logits", *present])}
    table = model.decoder_embedding or embedding
    assert isinstance(table, TokenEmbedding)
    alone = Transformer(embedding=embedding, encoder=encoder, max_seq_len=model.max_seq_len)
    target = {"encoder_attention_mask": Input(("batch", "source"), 2), "input_ids": Input(tokens, len(table.weight))}
    first = {**target, "encoder_hidden_states": Input(("batch", "source", encoder.d_model))}
    graphs = {
        "encoder_model.onnx": Graph(alone, in_one_pass, inputs, ["last_hidden_state"]),
        "decoder_model.onnx": Graph(model, decoder_step, first, ["logits", *(present if cache else [])]),
    }
    if cache:
        grown = [name for name in present if ".decoder." in name]
        later = Graph(model, decoder_step, {**target, **past}, ["logits", *grown])
        graphs["decoder_with_past_model.onnx"] = later
    return graphs


def write_graphs(folder: Path, graphs: Mapping[str, Graph], *, exact: Path, work: Work = QUIET) -> None:
    """Write graphs under their names; the weights of a large one go into a file beside it.

    exact: folder of the graphs in fp32; where it is another one, `folder` gets them in int8.
    InputError: PyTorch cannot translate a graph, or onnxruntime does not compute it equally.
    """
    for done, (name, graph) in enumerate(graphs.items(), start=1):
        _exported(graph, name).save(exact / name)
        _compare(exact / name, graph, tolerance=TOLERANCE)
        if exact != folder:
            _quantize(exact / name, folder / name)
            _compare(folder / name, graph, tolerance=math.inf)
        work.report(done, len(graphs))
        work.raise_if_stopped("while exporting, nothing written")


def _exported(graph: Graph, name: str) -> Any:
    """PyTorch's `ONNXProgram` of a graph."""
    from torch._dynamo.exc import TorchDynamoException

    sizes = tuple({at: axis for at, axis in enumerate(axes) if isinstance(axis, str)} for axes, _ in graph.inputs)
    dynamic = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in sizes)
    names: dict[str, Any] = {"input_names": graph.names, "output_names": graph.outputs, "dynamic_shapes": (sizes,)}
    mechanisms = [module for module in graph.modules() if isinstance(module, Mechanism)]
    disabled = logging.root.manager.disable
    try:
        for each in mechanisms:
            each.for_all_sizes = True
        logging.disable(logging.ERROR)  # packages that are not installed, and errors that are raised as well
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            # Strict: PyTorch's compiler follows the code, as it does for training.
            program = torch.export.export(graph, (graph.example(EXAMPLE),), dynamic_shapes=(dynamic,), strict=True)
            own: Any = {torch.ops.aten.searchsorted.Tensor: _searchsorted}
            made: Any = torch.onnx.export(program, **names, custom_translation_table=own, verbose=False)
        for node in made.model.graph:  # where each operator comes from in this installation
            node.metadata_props.clear()
        return made
    except (torch.onnx.OnnxExporterError, TorchDynamoException) as error:
        raise InputError(f"--to onnx: PyTorch cannot translate {name}: {str(error).splitlines()[0]}") from error
    finally:
        logging.disable(disabled)
        for each in mechanisms:
            each.for_all_sizes = False


def _searchsorted(sorted_BS: Any, wanted_BR: Any) -> Any:
    """`torch.searchsorted`, which PyTorch does not translate."""
    from onnxscript import opset18

    op: Any = opset18  # its types know tensors only
    is_before = op.Less(op.Unsqueeze(sorted_BS, [1]), op.Unsqueeze(wanted_BR, [2]))
    return op.ReduceSum(op.Cast(is_before, to=7), [2], keepdims=0)  # 7: int64


def _compare(path: Path, graph: Graph, *, tolerance: float) -> None:
    """Raise InputError unless onnxruntime computes the file, and its outputs are the graph's."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    checked = list(map(graph.example, CHECKED))
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        given = (dict(zip(graph.names, (each.numpy() for each in inputs), strict=True)) for inputs in checked)
        answers = [session.run(graph.outputs, each) for each in given]
    except Exception as error:  # onnxruntime's errors have no class in common
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"--to onnx: onnxruntime does not compute {path.name}: {reason}") from error
    for inputs, found in zip(checked, answers, strict=True):
        with torch.no_grad():
            expected = graph(inputs)
        for name, theirs, ours in zip(graph.outputs, found, expected, strict=True):
            off = float((torch.from_numpy(theirs) - ours).abs().max()) / max(1.0, float(ours.abs().max()))
            if not off <= tolerance:
                problem = f"{name} of {path.name} differs by {off:.1e} in onnxruntime"
                raise InputError(f"--to onnx: {problem}, {tolerance:.0e} is allowed")


def _quantize(path: Path, out: Path) -> None:
    """Write a file with the weights of products in 8 bits; 7 are used, so that no processor's sums overflow."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared, large = path.with_name(f"prepared-{path.name}"), path.with_name(f"{path.name}.data").exists()
    # Folds transposed weights into constants: only those are quantized.
    quant_pre_process(path, prepared, skip_symbolic_shape=True, save_as_external_data=large)
    options = {"per_channel": True, "reduce_range": True, "weight_type": QuantType.QInt8}
    quantize_dynamic(prepared, out, use_external_data_format=large, **options)
