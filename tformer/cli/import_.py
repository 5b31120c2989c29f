"""`tformer import`: a Hugging Face folder, or a repository of its hub, as an ordinary checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit_json, emit_lines, progress_reporter, report_result
from tformer.support.errors import InputError
from tformer.support.formatting import binary_bytes, listed
from tformer.support.options import Json, NewFolder, Panel, argument
from tformer.support.rules import Checked, required

if TYPE_CHECKING:
    from tformer.interop.importing import ImportReport

REPLACED, RESULT = Panel("Instead of the folder's own"), Panel("Result")
MAX_NAMED = 12  # names listed in a message

EPILOG = examples(
    "`tformer import gpt2 --out runs/gpt2`",
    "`tformer import hf:google-bert/bert-base-uncased --out runs/bert`",
    "`tformer import opus-mt-en-de --out runs/en-de --dtype bf16`",
    "`tformer import adapter --base gpt2 --out runs/adapted`",
)


@dataclass(frozen=True)
class ImportOptions(Checked):
    """The options of `tformer import`."""

    RULES = (required("--out", unless="--dry-run", hint="--out runs/NAME"),)

    folder: Annotated[
        str,
        argument(
            "HF_DIR",
            help="A folder with config.json, safetensors and tokenizer files; an adapter of peft; a file NAME.gguf; "
            "or hf:owner/name[@revision], which is downloaded (needs the `hub` extra).",
        ),
    ]
    out: Annotated[NewFolder, RESULT] = None
    tokenizer: Annotated[Path | None, REPLACED("--tokenizer", metavar="FILE", help="A tokenizer.json.")] = None
    target_tokenizer: Annotated[
        Path | None,
        REPLACED(
            "--target-tokenizer",
            metavar="FILE",
            help="The target's tokenizer.json, for a translation model with one tokenizer per side.",
        ),
    ] = None
    base: Annotated[
        str | None,
        REPLACED("--base", metavar="MODEL", help="An adapter's model: run, checkpoint or folder. Default: as it says."),
    ] = None
    ignore: Annotated[
        tuple[str, ...],
        REPLACED(
            "--ignore",
            metavar="KEY",
            help="Ignore this unknown key of config.json, which must not change the computation; may be repeated.",
        ),
    ] = ()
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], RESULT("--dtype", help="Number format of the weights.")] = "fp32"
    dry_run: Annotated[bool, RESULT("--dry-run", help="Say what would be imported; write nothing.")] = False
    as_json: Annotated[Json, RESULT] = False


@takes_options
def import_(options: ImportOptions) -> None:
    """Convert a Hugging Face folder or repository to a checkpoint.

    Every tensor of the files must have its place, with the shape that config.json says; an unknown key of the
    configuration is refused. Pickled weights are never read, and no code of a repository runs. The other commands also
    take such a folder directly; a checkpoint needs neither the folder nor the network. --dry-run downloads a repository
    into the hub's cache, where the import finds it.
    """
    with StopFlag() as flag:
        from tformer.checkpoint.average import require_new
        from tformer.interop.from_gguf import unpacked
        from tformer.interop.importing import import_folder
        from tformer.support.device import DTYPES
        from tformer.workers.work import Work

        if options.out is not None:
            require_new(options.out)
        folder = _folder(options.folder)
        if (folder / "adapter_config.json").is_file():
            _import_adapters(folder, options)
            return
        if options.base is not None:
            raise InputError(f"--base goes with an adapter of peft, and {folder} is none", hint="leave it out")
        with (
            unpacked(folder, beside=options.out, vocabulary=options.tokenizer is None) as folder,
            Work(progress_reporter, flag.should_stop).part("reading the weights", unit="files") as part,
        ):
            report = import_folder(
                folder,
                options.out,
                tokenizer=options.tokenizer,
                target_tokenizer=options.target_tokenizer,
                ignore=options.ignore,
                dtype=DTYPES[options.dtype],
                dry_run=options.dry_run,
                work=part,
            )
    lines, document = _lines(report, dry_run=options.dry_run), report.document() if options.as_json else None
    if not options.dry_run and report.path is not None:
        report_result(lines, report.path, document)
    elif document is None:
        emit_lines(lines)
    else:
        emit_json(document)


def _import_adapters(folder: Path, options: ImportOptions) -> None:
    from tformer.interop.peft import import_adapters

    given = {"--dry-run": options.dry_run, "--tokenizer": options.tokenizer, "--ignore": options.ignore}
    given |= {"--target-tokenizer": options.target_tokenizer, "--dtype": options.dtype != "fp32"}
    if unread := [flag for flag, value in given.items() if value]:
        raise InputError(f"{unread[0]} has no meaning with an adapter, and {folder} is one", hint="leave it out")
    assert options.out is not None  # without --dry-run
    report = import_adapters(folder, options.out, base=options.base)
    report_result([report.line], report.path, report.document() if options.as_json else None)


def _folder(name: str) -> Path:
    """The folder itself, or where the hub's repository of this name was downloaded to."""
    from tformer.interop.hub import download, is_hub_name

    folder = Path(name)
    if folder.exists():
        return folder
    if is_hub_name(name):
        console.print(f"downloading {name}", markup=False)
        return download(name)
    like_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    raise InputError(f"{name} does not exist", hint=f"for the hub's repository: hf:{name}" if like_hub_name else None)


def _lines(report: ImportReport, *, dry_run: bool) -> list[str]:
    """The report as text lines."""
    sides = [
        f"{'' if len(report.layers) == 1 else side + ' '}{count} layers of {report.heads[side]} heads"
        for side, count in report.layers.items()
    ]
    lines = [
        f"{report.class_name} ({report.model_type}) as arch {report.arch}: {', '.join(sides)}, width {report.d_model}",
        f"{report.parameters:,} parameters from {report.tensors:,} tensors ({report.stored_as}), "
        f"{'would be ' if dry_run else ''}written as {report.dtype}",
    ]
    if dry_run:
        disk, memory = binary_bytes(report.bytes), binary_bytes(report.memory)
        lines.append(f"the import needs {memory} of memory for tensors; the checkpoint {disk} on the disk")
    if report.left_out:
        lines.append(f"left out, not part of this class: {listed(report.left_out, MAX_NAMED)}")
    if report.tokenizer_size is not None:
        lines.append(f"tokenizer: {report.tokenizer_size:,} ids; embedding: {report.vocab_size:,} rows")
    if report.special_tokens:
        lines.append("special tokens: " + ", ".join(f"{role} {token}" for role, token in report.special_tokens.items()))
    if report.labels:
        lines.append(f"labels: {listed(report.labels, MAX_NAMED)}")
    lines += [f"note: {note}" for note in report.notes]
    checked = "checked: every tensor has its place; none is missing or left over"
    return [*lines, f"{checked}; nothing was written" if dry_run else checked]
