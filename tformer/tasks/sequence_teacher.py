"""Sequence-level distillation: a student trains on its teacher's translations (arXiv 1606.07947, section 3.2).

The teacher translates every training source with the beam search of its recipe; the student then trains on the
(source, translation) pairs. Translations are cached as a file of JSON lines that grows batch by batch: an interruption
loses the current batch, and the same command continues after the last complete line.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from tformer.data.shards.pair_tokens import PairTokens
from tformer.data.sources.tables import PairRow
from tformer.decoding.inference import cast_matrices, inference_dtype
from tformer.decoding.loaded import translator_of
from tformer.loading import Loaded
from tformer.metrics.text import bleu
from tformer.model import Transformer
from tformer.support.device import default_cache_dir
from tformer.support.errors import InputError, Interrupted, cannot_write
from tformer.workers.work import Work

SENTENCES = 512
"""Sentences translated between two writes, sorted by length; the most that an interruption loses."""


@dataclass(frozen=True)
class Translated:
    """Sources with the teacher's translations, in the order of the originals, as a source of pairs."""

    name: str
    pairs: Sequence[tuple[str, str]]
    task: str = ""
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[PairRow]:
        for number, (source, target) in enumerate(self.pairs, 1):
            yield PairRow(source, target, f"{self.name}:{number}", self.task)

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([self.pairs, self.task]).encode()).hexdigest()

    def size_bytes(self) -> int:
        return sum(len(source.encode()) + len(target.encode()) + 2 for source, target in self.pairs)


def translate_sources(
    originals: PairTokens,
    teacher: Loaded,
    *,
    weights: str,
    device: torch.device,
    work: Work,
) -> Translated:
    """The sources of `originals` with the teacher's translations, from the cache or translated now.

    The teacher moves to the device and is cast to the number format of its inference; `weights` is its
    `weights_digest` before any cast. Notes give the number of sentences and their BLEU against the references.

    Raises InputError for a model that does not translate, and for a cache file that another process is writing;
    StorageError where it cannot be written; Interrupted after an interruption, with all translations so far saved.
    """
    model, recipe = teacher.model, teacher.recipe
    dtype = inference_dtype("auto", trained_in=recipe.training.precision, device=device)
    texts = [originals.texts(index) for index in range(len(originals))]
    parts = (weights, dtype, repr(recipe.generation), teacher.decoder_tokens, [source for source, _ in texts])
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    path = (work.cache_dir or default_cache_dir()) / f"translations-{key}.jsonl"
    with _opened(path) as file:
        outputs = _whole_lines(file, [source for source, _ in texts])
        if len(outputs) < len(texts):
            cast_matrices(model, dtype)
            model.to(device)
            _translate_rest(file, texts, outputs, teacher, name=originals.name, work=work)
            model.to("cpu")  # its memory is the student's now
    score = bleu(outputs, [target for _, target in texts]).score
    task = originals.tasks[int(originals.examples(0, [0])[0].task)]
    return Translated(
        name=f"{originals.name} as {teacher.path} translates it",
        pairs=[(source, output) for (source, _), output in zip(texts, outputs, strict=True)],
        task=task,
        notes=(
            f"{originals.name}: {len(texts):,} sentences translated by the teacher with beam "
            f"{recipe.generation.beam_size}, BLEU {score:.2f} against their references ({path})",
        ),
    )


def _translate_rest(
    file: IO[bytes],
    texts: Sequence[tuple[str, str]],
    outputs: list[str],
    teacher: Loaded,
    *,
    name: str,
    work: Work,
) -> None:
    """Translate the remaining sources; append to `outputs` and to the file."""
    translator = translator_of(teacher, too_long="cut")
    with work.part(f"translating {name}", total=len(texts), unit="texts") as part:
        while len(outputs) < len(texts):
            done = len(outputs)
            sources = [source for source, _ in texts[done : done + SENTENCES]]
            seen = iter(range(done + 1, done + len(sources) + 1))
            found = translator.translate(
                sources,
                should_stop=part.should_stop,
                first_row=done,
                on_text=lambda *_, seen=seen: part.report(next(seen), len(texts)),
            )
            if work.should_stop():
                raise Interrupted(
                    f"interrupted while the teacher translates: {done:,} of {len(texts):,} sentences are kept",
                    signal_number=signal.SIGINT,
                    hint="the same command continues there",
                )
            targets = [best[0].text for best in found]
            lines = (
                json.dumps({"source": source, "target": target}, ensure_ascii=False)
                for source, target in zip(sources, targets, strict=True)
            )
            try:
                file.write("".join(f"{line}\n" for line in lines).encode())
                file.flush()
            except OSError as error:
                raise cannot_write(file.name, error) from error
            outputs += targets


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The cache file, created if missing, locked until it is closed."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path, "a+b"))
        except OSError as error:
            raise cannot_write(path, error, hint="another folder for the cache: TFORMER_CACHE=DIR") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{path} is written by another process", hint="start again when it is done") from error
        except OSError as error:
            raise cannot_write(path, error, hint="another folder for the cache: TFORMER_CACHE=DIR") from error
        yield file


def _whole_lines(file: IO[bytes], sources: Sequence[str]) -> list[str]:
    """The translations in the file up to the first incomplete line or other source; the file is cut there."""
    file.seek(0)
    outputs: list[str] = []
    end = 0
    for line, source in zip(file, sources, strict=False):
        try:
            record = json.loads(line) if line.endswith(b"\n") else {}
        except ValueError:
            break
        if record.get("source") != source or not isinstance(record.get("target"), str):
            break
        outputs.append(record["target"])
        end += len(line)
    file.truncate(end)
    return outputs


def weights_digest(model: Transformer) -> str:
    """sha256 of all weights, which identifies the teacher in the cache."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
