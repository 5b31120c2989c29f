"""Export to CTranslate2, an engine for fast inference on CPUs and GPUs (optional).

The model is exported as a Hugging Face folder, which `transformers` opens and CTranslate2's own loaders read, in a
temporary folder; vocabulary and special tokens are tformer's. Marian goes through BART's loader, because Marian's own
loader assumes a model trained by Marian, whose decoder starts from an embedding of zeros and whose last token is
padding.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from tformer.checkpoint.average import require_new
from tformer.checkpoint.read import Checkpoint
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.choose import Choice, choose_class
from tformer.interop.exporting import ExportReport, Tokenizers, export_checkpoint, resolved, tokenizers_of
from tformer.interop.tokenizer_config import special_keys
from tformer.nn.heads import LmHeadOptions
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe, with_roles
from tformer.support import files
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import decoder_tokens
from tformer.workers.work import QUIET, Work

# --dtype -> CTranslate2's name of the number format
QUANTIZATION = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8", "int16": "int16"}


def export_ctranslate2(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    quantization: str = "fp32",
    model_type: str | None = None,
    work: Work = QUIET,
) -> ExportReport:
    """Write a folder that `ctranslate2.Translator` (encoder-decoders) or `ctranslate2.Generator` (decoders) opens.

    Args:
        checkpoint, model_type, work: see `export_checkpoint`.
        out: a folder that does not exist yet.
        quantization: how weights are stored, a key of `QUANTIZATION`.

    Raises:
        InputError: as `export_checkpoint`; also where ctranslate2 or transformers is not installed, or the architecture
            has no known equal in CTranslate2.
    """
    target = Path(out)
    require_new(target)
    recipe, tokenizers = checkpoint.recipe, tokenizers_of(checkpoint)
    choice = plan(checkpoint, model_type)
    reports: list[ExportReport] = []

    def fill(folder: Path) -> None:
        between, made = folder / "huggingface", folder / "made"
        report = export_checkpoint(checkpoint, between, model_type=choice.architecture.model_type, work=work)
        _convert(between, made, report, recipe, choice.model, tokenizers, QUANTIZATION[quantization])
        files.remove_tree(between)
        for path in sorted(made.iterdir()):
            files.rename(path, folder / path.name)
        files.rmdir(made)
        sides = {"tokenizer.json": tokenizers.source}  # CTranslate2 itself takes tokens, not text
        if tokenizers.target is not None:
            sides = {"tokenizer.source.json": tokenizers.source, "tokenizer.target.json": tokenizers.target}
        for name, tokenizer in sides.items():
            if tokenizer is not None:
                files.write_durably(folder / name, [tokenizer.to_json().encode("utf-8")])
        for path in folder.iterdir():  # CTranslate2's files are synced before the folder appears
            files.sync_file(path)
        reports.append(report)

    files.require_writable_folder(target)
    with files.storage_errors(target):
        files.publish_directory(target, fill)
    report = reports[0]
    return ExportReport(
        **{
            **vars(report),
            "path": target,
            "auto_class": "ctranslate2." + ("Generator" if choice.model.encoder is None else "Translator"),
            "dtype": quantization,
            "num_bytes": (target / "model.bin").stat().st_size,
            "files": tuple(sorted(path.name for path in target.iterdir())),
        }
    )


def plan(checkpoint: Checkpoint, model_type: str | None = None) -> Choice:
    """The class of a checkpoint's model; errors as of `export_ctranslate2`."""
    for package in ("ctranslate2", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"--to ctranslate2 needs {package}, which is not installed", hint="pip install 'tformer[ctranslate2]'"
            )
    recipe, tokenizers = checkpoint.recipe, tokenizers_of(checkpoint)
    keys = special_keys(recipe, tokenizers.source, tokenizers.target)
    choice = choose_class(resolved(recipe, tokenizers), family=recipe.arch, model_type=model_type, common=keys)
    if choice.architecture.ctranslate2 is None:
        known = [name for name, architecture in ARCHITECTURES.items() if architecture.ctranslate2 is not None]
        raise InputError(
            f"--to ctranslate2: {choice.class_name} is not among the models that CTranslate2 computes equally: "
            f"{', '.join(known)}",
            hint="--to huggingface writes it",
        )
    for side, stack in choice.model.stacks.items():
        scaling = getattr(stack.positions, "scaling", None)
        if scaling is not None and scaling.kind != "llama3":
            raise InputError(f"--to ctranslate2: model.{side}.positions.scaling.kind: {scaling.kind} is not written")
    heads = [stack.num_heads for stack in choice.model.stacks.values()]
    if len(set(heads)) > 1:
        raise InputError(
            f"--to ctranslate2: found {heads[0]} heads in model.encoder and {heads[1]} in model.decoder, its loaders "
            "know one number of heads"
        )
    return choice


def _convert(
    folder: Path, out: Path, report: ExportReport, recipe: Recipe, model: Model, tokenizers: Tokenizers, kind: str
) -> None:
    import transformers
    from ctranslate2.converters import transformers as loaders
    from ctranslate2.converters.converter import Converter

    loader = ARCHITECTURES[report.model_type].ctranslate2
    assert loader is not None
    name, traits = loader
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        theirs = getattr(transformers, report.class_name).from_pretrained(folder, dtype=torch.float32)
    finally:
        if shown:
            logging.enable_progress_bar()
    for trait, value in traits.items():
        setattr(theirs.config, trait, value)

    class FromTformer(Converter):
        def _load(self) -> Any:
            with torch.no_grad():
                spec = getattr(loaders, name)().get_model_spec(theirs)
            _describe(spec, recipe, model, tokenizers)
            return spec

    try:
        FromTformer().convert(str(out), quantization=kind)
    except (ValueError, NotImplementedError) as error:
        raise InputError(f"ctranslate2 does not take this model: {error}") from error


def _describe(spec: Any, recipe: Recipe, model: Model, tokenizers: Tokenizers) -> None:
    """Fill in the vocabulary, the special tokens and the settings that CTranslate2's loaders leave at defaults."""
    from ctranslate2.specs.model_spec import OPTIONAL

    assert tokenizers.source is not None and model.decoder is not None  # no model of images has a loader
    ids = recipe.tokenizer.special_ids
    source, own = with_roles(ids, tokenizers.source, tokenizers.target)
    target = own or source
    special = target.special
    ends = decoder_tokens(special, start=ids.decoder_start, eos=ids.eos, forced_bos=ids.forced_bos)

    def name(token: int | None) -> str:
        return target.token(ends.eos if token is None else token)

    spec.config.eos_token, spec.config.bos_token = name(ends.eos), name(special.bos)
    spec.config.unk_token = name(special.unk)
    spec.config.layer_norm_epsilon = model.decoder.norm.eps
    rows = model.target_vocab_size or model.vocab_size
    if model.encoder is None:
        spec.register_vocabulary(_tokens(target, rows))
        return
    spec.config.decoder_start_token = name(ends.start)
    spec.register_source_vocabulary(_tokens(source, model.vocab_size))
    spec.register_target_vocabulary(_tokens(target, rows))
    head = model.heads[0]
    assert isinstance(head, LmHeadOptions)
    spec.decoder.scale_outputs = OPTIONAL if head.scale == "none" else head.factor(model.d_model)


def _tokens(tokenizer: Tokenizer, rows: int | None) -> list[str]:
    """A name for every row of the embedding, also for rows without a token."""
    spellings = tokenizer.tokens + [""] * ((rows or 0) - tokenizer.vocab_size)
    return [spelling or f"<row {number}>" for number, spelling in enumerate(spellings)]
