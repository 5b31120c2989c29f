"""Export of a checkpoint in the layout of Hugging Face: config.json, weight files, tokenizer, generation settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tformer.build import build_model
from tformer.checkpoint.average import require_new
from tformer.checkpoint.read import Checkpoint, differences
from tformer.checkpoint.tensor_files import file_bytes, tensor_chunks
from tformer.interop.architecture import Architecture, auto_class
from tformer.interop.choose import ExportTarget, choose_class_or_code, label_keys, without_learned_rates
from tformer.interop.generation_config import left_unsaid, write_generation
from tformer.interop.preprocessor import write_preprocessor
from tformer.interop.sentence_transformers import split_off
from tformer.interop.sentencepiece_files import piece_files
from tformer.interop.tokenizer_config import CHAT_TEMPLATE, special_keys
from tformer.interop.tokenizer_files import TARGET_FOLDER, own_rules_note, text_ends_note, tokenizer_documents
from tformer.interop.weight_files import Outgoing, index_document, main_dtype, outgoing, plan_shards
from tformer.nn.structured_dropout import LEARNED
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe, SpecialTokens
from tformer.support import files
from tformer.support.device import DTYPES
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.chat import TEMPLATES
from tformer.workers.work import QUIET, Work


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of a checkpoint. source: None for images; target: None unless the target side has its own."""

    source: Tokenizer | None
    target: Tokenizer | None


def tokenizers_of(checkpoint: Checkpoint) -> Tokenizers:
    texts = (checkpoint.tokenizer_json, checkpoint.target_tokenizer_json)
    source, target = (None if text is None else Tokenizer.from_json(text) for text in texts)
    return Tokenizers(source, target)


def resolved(recipe: Recipe, tokenizers: Tokenizers) -> Model:
    """The `model` section with the sizes filled in that tokenizers and labels decide."""
    model = recipe.model
    sizes: dict[str, Any] = {}
    for key, tokenizer in (("vocab_size", tokenizers.source), ("target_vocab_size", tokenizers.target)):
        if getattr(model, key) is None and tokenizer is not None:
            sizes[key] = tokenizer.vocab_size
    heads = model.model_dump(mode="json")["heads"]
    for head in heads:
        if head.get("num_labels", 0) is None:
            head["num_labels"] = len(recipe.data.labels) or None
    return Model.model_validate({**model.model_dump(mode="json"), **sizes, "heads": heads})


SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportReport:
    """Result of an export. num_bytes: of the weight files; dtype: of their floating-point tensors."""

    path: Path
    model_type: str
    class_name: str
    auto_class: str
    dtype: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    files: tuple[str, ...]
    step: int
    notes: tuple[str, ...] = ()
    carries_code: bool = False  # transformers runs it only with trust_remote_code

    def how_to_load(self) -> str:
        """The Python call that opens the folder."""
        if self.auto_class.startswith(("llama_cpp.", "sentence_transformers.")):
            return f'{self.auto_class}("{self.path}")'
        trust = ", trust_remote_code=True" if self.carries_code else ""
        module = "" if "." in self.auto_class else "transformers."
        return f'{module}{self.auto_class}.from_pretrained("{self.path}"{trust})'

    def document(self) -> dict[str, Any]:
        """The JSON document of `tformer export --json`."""
        return {
            "path": str(self.path),
            "model_type": self.model_type,
            "class": self.class_name,
            "load": self.how_to_load(),
            "step": self.step,
            "dtype": self.dtype,
            "tensors": self.num_tensors,
            "parameters": self.num_parameters,
            "bytes": self.num_bytes,
            "files": list(self.files),
            "notes": list(self.notes),
        }


def export_checkpoint(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    model_type: str | None = None,
    weights: Mapping[str, Tensor] | None = None,
    work: Work = QUIET,
) -> ExportReport:
    """Write a checkpoint in the layout of Hugging Face. Averaged weights are exported when there are any.

    Args:
        checkpoint: a run's, or a Hugging Face folder's (`open_checkpoint`).
        out: a folder that does not exist yet.
        dtype: of the floating tensors; None: as they are stored.
        shard_bytes: the most tensor bytes of one file.
        model_type: the architecture to export as, where several compute the same; None: the family's first.
        weights: of the loaded model, in place of those that the checkpoint stores.
        work: reports the bytes written, and is polled after each tensor.

    Raises:
        InputError: `out` exists, no class computes this model (names the fields), weights that are not the recipe's, a
            number too large for `dtype`; nothing is written.
        StorageError: the disk refuses; no part of the result is left.
        Interrupted: `work` was stopped; nothing is left.
    """
    target = Path(out)
    require_new(target)
    recipe = checkpoint.recipe
    tokenizers = tokenizers_of(checkpoint)
    choice, model, keys, sentence_files = planned(recipe, tokenizers, model_type)
    files.require_writable_folder(target)
    weights = weights_of(checkpoint, model, weights)
    for step in choice.steps:
        model, weights = step.apply(model, weights)
    links, fixed = choice.architecture.written(model, choice.class_name)
    tensors = outgoing(links, fixed, weights, dtype=dtype)
    shards = plan_shards(tensors, shard_bytes)
    stored = main_dtype(tensors)
    config = {
        **label_keys(choice.model, recipe.data.labels),
        **choice.config,
        **keys,
        "architectures": [choice.class_name],
        "dtype": str(stored).removeprefix("torch."),
        "model_type": choice.architecture.model_type,
    }
    texts: dict[str, str | bytes] = {
        "config.json": _json(config),
        **_texts(recipe, model, tokenizers),
        **index_document(tensors, shards),
        **sentence_files,
    }
    code = choice.architecture.code
    if code is not None:
        texts[code.file] = (Path(__file__).parent / code.file).read_text(encoding="utf-8")
    size = sum(map(file_bytes, shards.values()))
    needed = size + sum(map(len, map(_bytes, texts.values())))
    files.require_room(target, needed)
    with files.storage_errors(target, bytes_needed=needed):
        require_new(target)  # again: reading may have taken minutes
        files.publish_directory(target, lambda folder: _fill(folder, tensors, shards, texts, work=work))
    return ExportReport(
        path=target,
        model_type=choice.architecture.model_type,
        class_name=choice.class_name,
        auto_class="sentence_transformers.SentenceTransformer" if sentence_files else auto_class(choice.class_name),
        dtype=next((name for name, kind in DTYPES.items() if kind == stored), str(stored)),
        num_tensors=len(tensors.shapes),
        num_parameters=sum(tensor.numel() for tensor in tensors.shapes.values()),
        num_bytes=size,
        files=tuple(sorted([*texts, *shards])),
        step=checkpoint.step,
        notes=(
            *checkpoint.notes,
            *(step.note for step in choice.steps),
            *(["averaged weights are exported"] if checkpoint.has("ema") else []),
            *(["the generator that the model was trained beside is left out"] if checkpoint.has("generator") else []),
            *(note for note in choice.architecture.differs(recipe.model) if note not in checkpoint.notes),
            *left_unsaid(recipe),
            *ignored_by_ctranslate2(choice.architecture, config),
            *own_rules_note(choice.architecture, tokenizers.source),
            *(text_ends_note(tokenizers.source, recipe.tokenizer.special_ids) if _is_language_model(recipe) else ()),
            *([f"{code.file} in the folder computes this model: transformers asks before it runs it"] if code else []),
        ),
        carries_code=code is not None,
    )


def ignored_by_ctranslate2(architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Notes on the keys of config.json that CTranslate2's converter ignores, if that changes the model."""
    computed = {} if architecture.ctranslate2 is None else architecture.ctranslate2(config)
    return [
        f"CTranslate2's converter (4.8.5) ignores {key} {config[key]}, and computes with {value}"
        for key, value in computed.items()
        if config.get(key, value) != value
    ]


def planned(
    recipe: Recipe, tokenizers: Tokenizers, model_type: str | None = None
) -> tuple[ExportTarget, Model, dict[str, Any], dict[str, str]]:
    """(class, model section, keys about special tokens, files of sentence-transformers). Errors: no class or code."""
    model, sentence_files = split_off(without_learned_rates(resolved(recipe, tokenizers)), seq_len=recipe.seq_len)
    keys = special_keys(recipe, tokenizers.source, tokenizers.target)
    ours: dict[str, Any] = {"family": recipe.arch, "source": recipe.model_type}
    return choose_class_or_code(model, model_type=model_type, common=keys, **ours), model, keys, sentence_files


def weights_of(checkpoint: Checkpoint, model: Model, loaded: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The model's tensors (owners only), after a check of names and shapes. loaded: in place of the stored ones."""
    weights = dict(loaded or checkpoint.ema() or {})
    built = build_model(model, device="meta")
    tied = built.tied_names()
    wanted = {name: tensor for name, tensor in built.state_dict().items() if name not in tied}
    if not wanted.keys() <= weights.keys():
        weights = checkpoint.weights() | weights
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(LEARNED)}
    if problems := differences(wanted, weights, aliases=tied):
        raise InputError(
            f"{checkpoint.path}: recipe and weights disagree: {'; '.join(problems)}",
            hint="recipe.yaml and model.safetensors must come from the same checkpoint, unedited",
        )
    return {name: weights[name] for name in wanted}


def _texts(recipe: Recipe, model: Model, tokenizers: Tokenizers) -> dict[str, str | bytes]:
    """{name: content} of the files beside config.json and weights."""
    texts = {} if tokenizers.source is None else piece_files(tokenizers.source, tokenizers.target)
    of_pieces = bool(texts)
    if tokenizers.source is not None and not of_pieces:
        alone, ids = tokenizers.target is None, recipe.tokenizer.special_ids
        reads_whole_texts = any(head.pools for head in recipe.model.heads)  # left padding moves learned positions
        texts |= tokenizer_documents(
            tokenizers.source,
            ids if alone else SpecialTokens(),  # special ids are those of the target side
            model_max_length=model.max_seq_len,
            token_types=model.embedding.token_types > 1,
            padding_side="left" if model.encoder is None and not reads_whole_texts else "right",
            writes=_is_language_model(recipe),
        )
    if (template := recipe.tokenizer.chat_template) is not None and _is_language_model(recipe):
        texts[CHAT_TEMPLATE] = TEMPLATES.get(template, template)
    if tokenizers.target is not None and not of_pieces:
        documents = tokenizer_documents(
            tokenizers.target, recipe.tokenizer.special_ids, model_max_length=model.longest_target
        )
        texts |= {f"{TARGET_FOLDER}/{name}": text for name, text in documents.items()}
    generation = write_generation(recipe, tokenizers.target or tokenizers.source)
    found = {"generation_config.json": generation, "preprocessor_config.json": write_preprocessor(recipe)}
    return texts | {name: _json(document) for name, document in found.items() if document}


def _is_language_model(recipe: Recipe) -> bool:
    return recipe.model.encoder is None and any(head.kind == "lm" for head in recipe.model.heads)


def _fill(
    folder: Path,
    tensors: Outgoing,
    shards: Mapping[str, Mapping[str, Tensor]],
    texts: Mapping[str, str | bytes],
    *,
    work: Work = QUIET,
) -> None:
    """Write every file durably into a folder that is renamed afterwards."""
    total, done = len(tensors.shapes), 0

    def chunks(shard: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
        nonlocal done
        for chunk in tensor_chunks(shard, make=tensors.make):
            yield chunk
            work.raise_if_stopped("while exporting, nothing written")
            work.report(min(done, total), total)
            done += 1

    for name, shard in shards.items():
        files.write_durably(folder / name, chunks(shard))
    for name, text in texts.items():
        if "/" in name and not (folder / name).parent.is_dir():
            files.mkdir((folder / name).parent)
        files.write_durably(folder / name, [_bytes(text)])


def _bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
