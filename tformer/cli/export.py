"""`tformer export`: a checkpoint as a folder for `from_pretrained` or onnxruntime, or as a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import emit_json, emit_lines, progress_reporter, report_result
from tformer.support.errors import InputError
from tformer.support.options import Checkpoint, Json, NewFolder, Panel, Run, parse_bytes
from tformer.support.rules import Checked, exclude, needs, required

FORMAT, RESULT = Panel("Format"), Panel("Result")
NAMES = {"huggingface": "Hugging Face", "gguf": "GGUF", "onnx": "ONNX", "peft": "peft"}

EPILOG = examples(
    "`tformer export runs/gpt-small-1 --out gpt-hf`",
    "`tformer export runs/bert-base-1 --out bert-hf --dtype bf16 --shard-size 2GB`",
    "`tformer export --out gpt.gguf --to gguf --dtype q8_0`",
    "`tformer export runs/gpt-small-1 --list`",
)


@dataclass(frozen=True)
class ExportOptions(Checked):
    """The options of `tformer export`."""

    RULES = (
        exclude("--list", ("--out", "--to", "--dtype", "--shard-size", "--as", "--no-cache"), hint="it writes nothing"),
        exclude("--as", "--to peft", hint="adapters belong to the class of their base"),
        exclude("--dtype", "--to peft", hint="adapters are written as they are stored"),
        exclude("--shard-size", "--to gguf|onnx|peft", hint="it is for folders of Hugging Face"),
        needs("--no-cache", "--to onnx"),
        required("--out", unless="--list", hint="--out NAME-hf"),
    )

    run: Run = None
    out: Annotated[NewFolder, RESULT] = None
    checkpoint: Annotated[Checkpoint, RESULT] = "best"
    to: Annotated[
        Literal["huggingface", "gguf", "onnx", "peft"],
        FORMAT("--to", help="Format of the folder or file."),
    ] = "huggingface"
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "int8", "q8_0", "q4_0"] | None,
        FORMAT(
            "--dtype",
            metavar="fp32|bf16|fp16",
            help="Number format of the weights; also q8_0, q4_0 (gguf); onnx: fp32, int8.",
            default="as stored",
        ),
    ] = None
    shard_size: Annotated[str, FORMAT("--shard-size", metavar="SIZE", help="Maximum size of a weight file.")] = "5GB"
    model_type: Annotated[
        str | None,
        FORMAT(
            "--as",
            metavar="MODEL_TYPE",
            help="Architecture to export as (gpt2, marian, ...), where several compute the same function; tformer: "
            "with its own code.",
            default="chosen by the recipe's arch",
        ),
    ] = None
    no_cache: Annotated[
        bool, FORMAT("--no-cache", help="For onnx: decoders without inputs for keys and values.", rare=True)
    ] = False
    lists: Annotated[
        bool,
        FORMAT("--list", help="Write nothing: show in which formats the model can leave, and what bars the others."),
    ] = False
    as_json: Annotated[Json, RESULT] = False

    def check(self) -> None:
        """Raise InputError for options that can be refused before anything is read."""
        super().check()
        only: dict[str, tuple[str, ...]] = {"int8": ("onnx",)}
        only |= dict.fromkeys(("q8_0", "q4_0"), ("gguf",))
        only |= dict.fromkeys(("bf16", "fp16"), ("huggingface", "gguf"))
        if self.to not in (takes := only.get(self.dtype or "", (self.to,))):
            named = " and ".join(NAMES[to] for to in takes)
            hint = f"add --to {' or '.join(takes)}"
            raise InputError(f"--dtype {self.dtype} is a number format of {named} only", hint=hint)


@takes_options
def export(options: ExportOptions) -> None:
    """Write a run for `transformers`, ONNX or llama.cpp.

    `from_pretrained` loads weights, config, tokenizer and labels. The class of transformers that computes exactly the
    recipe's model is found automatically. For a model that no class computes, the folder gets the code that does, for
    `trust_remote_code=True`; what that code lacks is refused by its recipe field. Averaged weights are exported if the
    run keeps them. A GGUF file (extra `gguf`) has decoders of GPT-2's, Llama's, Mistral's, Qwen's, Gemma's and Phi's
    shapes, with their vocabulary. ONNX files (extra `onnx`) are compared with the model in onnxruntime; the folder
    loads with the classes of optimum. --to peft writes the adapters of a run alone.
    """
    shard_bytes = parse_bytes(options.shard_size)
    out, which = options.out, options.checkpoint
    from tformer.checkpoint.resolve import newest_checkpoint

    if options.lists:
        from tformer.interop.doors import doors
        from tformer.interop.opening import open_checkpoint

        found = doors(open_checkpoint(options.run or newest_checkpoint(which=which), which))
        if options.as_json:
            emit_json(found)
        else:
            emit_lines([f"{one['to']:<12} {one['as'] or 'no: ' + str(one['barred'])}" for one in found])
        return
    assert out is not None  # `check` requires it
    with StopFlag() as flag:
        from tformer.checkpoint.average import require_new
        from tformer.interop.adapters import has_adapters
        from tformer.interop.exporting import export_checkpoint
        from tformer.interop.opening import open_checkpoint
        from tformer.interop.to_gguf import export_gguf
        from tformer.interop.to_onnx import export_onnx
        from tformer.support.device import DTYPES
        from tformer.workers.work import Work

        require_new(out)
        run: Any = options.run
        if run is None:
            run = newest_checkpoint(which=which, usable=has_adapters if options.to == "peft" else lambda folder: True)
        checkpoint = open_checkpoint(run, which)
        if options.to == "peft":
            from tformer.interop.peft import export_adapters

            adapters = export_adapters(checkpoint, out)
            report_result([adapters.line], adapters.path, adapters.document() if options.as_json else None)
            return
        with Work(progress_reporter, flag.should_stop).part("writing", unit="B") as part:
            given: dict[str, Any] = {"model_type": options.model_type, "work": part}
            if options.to == "gguf":
                report = export_gguf(checkpoint, out, dtype=options.dtype, **given)
            elif options.to == "onnx":
                dtype, cache = options.dtype or "fp32", not options.no_cache
                report = export_onnx(checkpoint, out, dtype=dtype, cache=cache, **given)
            else:
                kept = None if options.dtype is None else DTYPES[options.dtype]
                report = export_checkpoint(checkpoint, out, dtype=kept, shard_bytes=shard_bytes, **given)
    lines = [
        f"{report.class_name} (model_type {report.model_type}) of step {report.step}",
        f"{report.num_tensors} tensors, {report.num_parameters:,} numbers in {report.dtype}, "
        f"{report.num_bytes:,} bytes",
        f"files: {', '.join(report.files)}",
        *(f"note: {note}" for note in report.notes),
        f"load it: {report.how_to_load()}",
    ]
    report_result(lines, report.path, report.document() if options.as_json else None)
