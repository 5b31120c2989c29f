"""Token vectors from files as the start of a new model's embedding tables (`--embeddings`).

Text, as GloVe and word2vec write it, plain or compressed: a word and its numbers in each line, separated by single
spaces; word2vec puts a line with the numbers of words and columns in front. A word may contain spaces (GloVe 840B).
safetensors: a matrix with a row for each id of the `tokenizer.json` beside the file, as in a checkpoint, or else of the
model's own tokenizer.

A token takes the vector of the same word, or else of the first word that differs in case only. Tokens that mark the
beginning of a word ("▁the", "Ġthe") are also compared without the mark. All other rows keep their initial values.

Shapes: n rows of a block, E columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tformer.checkpoint.tensor_files import read_header
from tformer.data.sources.files import FoundFile, decode_text, read_bytes, split_lines, unchanged
from tformer.model import Transformer
from tformer.optim.shards import Shards, local
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.support.files import open_regular
from tformer.support.formatting import whole_number
from tformer.tasks.base import TrainingData
from tformer.tokenizer import Tokenizer
from tformer.workers.work import Work

WORD_MARKS = ("▁", "Ġ")
"""First characters of tokens that begin a word: SentencePiece's and byte-level BPE's."""
BLOCK_BYTES = 1 << 24
"""Bytes of a matrix that are in memory at once."""
LINES_BETWEEN_POLLS = 10_000
TABLE = "embedding.weight"
"""The matrix of a safetensors file with several."""

SAME_CASE, OTHER_CASE, NONE = 2, 1, 0
"""How well the vector of a token fits: the word is the same, differs in case, or none was found."""


class Vectors:
    """Vectors of some tokens of a tokenizer.

    Attributes:
        rows: fp32 [V, E], zeros where the token has none.
        found: uint8 [V], `SAME_CASE`, `OTHER_CASE` or `NONE`.
    """

    def __init__(self, tokenizer: Tokenizer, columns: int) -> None:
        self.rows = torch.zeros(tokenizer.vocab_size, columns)
        self.found = np.zeros(tokenizer.vocab_size, dtype=np.uint8)
        self._ids: dict[str, list[int]] = {}
        self._lower_case: dict[str, list[int]] = {}
        for number, token in enumerate(tokenizer.tokens):
            names = {token, tokenizer.decode([number]).strip()} if token.startswith(WORD_MARKS) else {token}
            for name in names - {""}:
                self._ids.setdefault(name, []).append(number)
                self._lower_case.setdefault(name.lower(), []).append(number)

    def wanted(self, word: str) -> tuple[list[int], list[int]]:
        """The tokens that still need the vector of this word: (same case, other case)."""
        same = [number for number in self._ids.get(word, ()) if self.found[number] < SAME_CASE]
        other = [number for number in self._lower_case.get(word.lower(), ()) if self.found[number] < OTHER_CASE]
        return same, other

    def put(self, ids: tuple[list[int], list[int]], row: Tensor) -> None:
        """Take a vector for the tokens that `wanted` returned."""
        same, other = ids
        for fit, numbers in ((OTHER_CASE, other), (SAME_CASE, same)):
            self.rows[numbers], self.found[numbers] = row, fit

    def coverage(self) -> str:
        """The tokens with a vector, for a message."""
        by_case = int((self.found == OTHER_CASE).sum())
        apart = f", {by_case:,} of them from a word of another case" if by_case else ""
        return f"{int((self.found != NONE).sum()):,} of {len(self.found):,} tokens{apart}"

    def digest(self) -> str:
        """A hash of all vectors."""
        return hashlib.sha256(self.rows.numpy().tobytes() + self.found.tobytes()).hexdigest()[:16]

    @torch.no_grad()
    def write_to(self, table: Tensor, *, first: int = 0) -> None:
        """Replace the rows of a table [V or more, E], or of its part from row `first`, whose tokens have a vector."""
        numbers = torch.from_numpy(np.flatnonzero(self.found[first : first + len(table)]))
        table[numbers.to(table.device)] = self.rows[first + numbers].to(table)


def read_embeddings(recipe: Recipe, data: TrainingData, work: Work) -> dict[str, Vectors]:
    """The vectors of the recipe's files by the name of their table, with a note of the coverage of each file.

    Raises InputError for a file that is damaged, has no token of the tokenizer, or has another width than the table.
    """
    section, model = recipe.embeddings, recipe.model
    has_target_table = model.is_encoder_decoder and (recipe.separate_vocabularies or not model.tie.source_target)
    target_table = "decoder_embedding.weight" if has_target_table else TABLE
    target_tokenizer = data.target_tokenizer or data.tokenizer
    tables: dict[str, Vectors] = {}
    for path, table, tokenizer in (
        (section.path, TABLE, data.tokenizer),
        (section.target_path, target_table, target_tokenizer),
    ):
        if path is None:
            continue
        assert tokenizer is not None  # see `recipe.checks`
        with work.progress(f"reading {path}"):
            vectors = read_vectors(Path(path), tokenizer, columns=model.embedding.size or model.d_model, work=work)
        work.note(f"{path}: vectors of {vectors.coverage()}")
        if table in tables:
            shared = tables[table]
            missing = (shared.found == NONE) & (vectors.found != NONE)
            shared.rows[missing], shared.found[missing] = vectors.rows[missing], vectors.found[missing]
        else:
            tables[table] = vectors
    return tables


def write_embeddings(tables: Mapping[str, Vectors], model: Transformer, *, shards: Shards | None = None) -> None:
    """Put vectors into the tables of a model; `shards`: of one that is divided over processes."""
    for name, vectors in tables.items():
        table = model.get_parameter(name)
        if shards is None:
            vectors.write_to(table)
        else:
            vectors.write_to(local(table), first=shards.rows(len(table)).start)


def read_vectors(path: Path, tokenizer: Tokenizer, *, columns: int, work: Work) -> Vectors:
    """The vectors that a file has for the tokens of a tokenizer.

    columns: the width of the table. Raises InputError as `read_embeddings`.
    """
    vectors = Vectors(tokenizer, columns)
    read = _read_matrix if path.suffix == ".safetensors" else _read_text
    with unchanged(FoundFile(path)):
        read(path, vectors, tokenizer, work)
    if not vectors.found.any():
        raise InputError(
            f"{path}: found no vector for any of the {tokenizer.vocab_size:,} tokens, expected words of the tokenizer",
            hint="vectors of words suit a tokenizer of words: --set tokenizer.train.model=word",
        )
    return vectors


def _require_width(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise InputError(
            f"{path}: its vectors have {found} numbers, expected {expected}, the width of the embedding table",
            hint=f"--set model.embedding.size={found} (a learned projection follows), or --set model.d_model={found}",
        )


# -- text --------------------------------------------------------------------------------------------------------------


def _read_text(path: Path, vectors: Vectors, tokenizer: Tokenizer, work: Work) -> None:
    text = decode_text(read_bytes(path), name=str(path), errors="replace")
    columns, words, number = vectors.rows.shape[1], 0, 0
    expected_words: int | None = None
    for number, line in enumerate(split_lines(text, name=str(path)), start=1):
        if number % LINES_BETWEEN_POLLS == 0:
            work.raise_if_stopped(f"while reading {path}")
        line = line.rstrip(" \n")
        if number == 1:
            counts = [whole_number(field) for field in line.split(" ", 2)]
            is_header = len(counts) == 2 and None not in counts  # word2vec's: words and columns
            expected_words, found = counts if is_header else (None, _trailing_numbers(line))
            if not found:
                raise _damaged(path, number, line, f"found no numbers, expected a word and {columns} numbers")
            _require_width(path, found, columns)
            if is_header:
                continue
        fields = line.rsplit(" ", columns)
        if len(fields) != columns + 1:
            raise _damaged(path, number, line, f"found {_trailing_numbers(line)} numbers, expected {columns}")
        words += 1
        if any(ids := vectors.wanted(fields[0])):
            vectors.put(ids, _numbers(path, number, line, fields[1:]))
    if not words:
        raise InputError(f"{path}: found no vector, expected a word and {columns} numbers in each line")
    if expected_words is not None and expected_words != words:
        raise InputError(
            f"{path}:{number}: the file ends after {words:,} words, expected {expected_words:,} as line 1 states",
            hint="the file is incomplete: copy or download it again",
        )


def _trailing_numbers(line: str) -> int:
    """Count of the numbers at the end of a line; the first field is the word."""
    count = 0
    for field in reversed(line.split(" ")[1:]):
        try:
            float(field)
        except ValueError:
            break
        count += 1
    return count


def _numbers(path: Path, number: int, line: str, fields: Sequence[str]) -> Tensor:
    try:
        row = np.array(fields, dtype=np.float32)
    except ValueError:
        wrong = next(field for field in fields if not _trailing_numbers(f"- {field}"))
        raise _damaged(path, number, line, f"found '{wrong[:40]}', expected a number") from None
    if not np.isfinite(row).all():
        raise _damaged(path, number, line, "found a number that is not finite")
    return torch.from_numpy(row)


def _damaged(path: Path, number: int, line: str, problem: str) -> InputError:
    is_binary = "\0" in line or "\ufffd" in line
    return InputError(
        f"{path}:{number}: {problem}",
        hint="word2vec's binary format is not read: save the vectors as text" if is_binary else None,
    )


# -- safetensors -------------------------------------------------------------------------------------------------------


def _read_matrix(path: Path, vectors: Vectors, tokenizer: Tokenizer, work: Work) -> None:
    beside = path.parent / "tokenizer.json"
    words = (Tokenizer.load(beside) if beside.is_file() else tokenizer).tokens
    with open_regular(path) as stream:
        header, specs = read_header(stream, name=str(path))
        matrices = {spec.name: spec for spec in specs if len(spec.shape) == 2 and spec.dtype.is_floating_point}
        if len(matrices) != 1 and TABLE not in matrices:
            raise InputError(f"{path}: found {len(matrices)} matrices, expected a single one or one named {TABLE}")
        spec = matrices[TABLE] if TABLE in matrices else next(iter(matrices.values()))
        count, columns = spec.shape
        _require_width(path, columns, vectors.rows.shape[1])
        if count < len(words):
            owner = beside if beside.is_file() else "the model's tokenizer"
            raise InputError(
                f"{path}: {spec.name} has {count:,} rows, expected one for each of the {len(words):,} ids of {owner}",
                hint="put the tokenizer.json of the vectors beside the file",
            )
        stream.seek(len(header) + spec.start)
        block = max(1, BLOCK_BYTES // (columns * spec.dtype.itemsize))
        for start in range(0, len(words), block):
            work.raise_if_stopped(f"while reading {path}")
            number = min(block, count - start)
            content = bytearray(stream.read(number * columns * spec.dtype.itemsize))
            rows_nE = torch.frombuffer(content, dtype=spec.dtype).view(number, columns).float()
            for row, word in zip(rows_nE, words[start : start + number], strict=False):
                if word and any(ids := vectors.wanted(word)):
                    if not row.isfinite().all():
                        raise InputError(f"{path}: {spec.name} has a number that is not finite in the row of '{word}'")
                    vectors.put(ids, row)
