"""Vectors of tokens, labels and positions: nearest neighbours and principal components of the rows of a table.

The cosine of two vectors is u·v / (|u| |v|); centred, the mean of all rows of the table is subtracted first. The
vectors of trained models share a large mean (arXiv 1702.01417), so that centred cosines tell more apart. Principal
components are those of the rows that are shown.
"""

# Shapes: N rows, D width, S rows that are shown, A rows asked for, K neighbours, C components.

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.data.encoding import token_text
from tformer.inside.answers import label_names, named_token
from tformer.inside.options import EMBEDDING_TABLES, EmbeddingOptions
from tformer.loading import Loaded
from tformer.metrics.statistics import principal_components
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.heads import VocabularyHead
from tformer.nn.positions.base import LearnedPositions
from tformer.support.errors import InputError, did_you_mean, require_finite
from tformer.support.files import read_bounded
from tformer.support.options import parse_numbers
from tformer.tokenizer import Tokenizer

COMPONENTS = 3
CHUNK_ELEMENTS = 1 << 24  # cosines that exist at a time
MAX_LIST_BYTES = 8 << 20


@dataclass(frozen=True)
class EmbeddingReport:
    """What `tformer viz-embeddings` shows, and what `Run.embedding_table` returns.

    Attributes:
        table: its name.
        ids: numbers of the tokens, labels or positions int64 [N]. names: what they are called [N].
        vectors: fp32 [N, D].
        shown: places (of N) of the rows that are drawn int64 [S].
        coordinates: their principal components fp64 [S, C]. explained: the share of their variance of each [C].
        asked: places of the rows whose neighbours were asked for int64 [A].
        neighbours: places of the nearest rows, the nearest first int64 [A, K]. cosines: fp32 [A, K].
        centred: the mean of all rows was subtracted before the cosine.
    """

    table: str
    ids: np.ndarray
    names: np.ndarray
    vectors: np.ndarray
    shown: np.ndarray
    coordinates: np.ndarray
    explained: np.ndarray
    asked: np.ndarray
    neighbours: np.ndarray
    cosines: np.ndarray
    centred: bool


def embedding_report(loaded: Loaded, options: EmbeddingOptions) -> EmbeddingReport:
    """The rows of a table with their neighbours and principal components.

    Raises InputError for a table that the model does not have, a row that the table does not have, and fewer than two
    rows to show; NotFiniteError for vectors that are not finite.
    """
    tables = tables_of(loaded)
    name = options.table or next(iter(tables), "tokens")
    if name not in tables:
        raise InputError(
            f"{loaded.path} has no table '{name}': {EMBEDDING_TABLES[name]}",
            hint=f"it has: {', '.join(tables) or 'none'}",
        )
    weight, named_by = tables[name]
    rows = weight.detach().float().cpu().numpy()
    ids = np.arange(len(rows))
    if isinstance(named_by, Tokenizer):
        ids = np.flatnonzero(np.array(named_by.tokens[: len(rows)], dtype=object) != "")
        names = [token_text(named_by, token) for token in ids.tolist()]
    else:
        names = list(named_by)
    vectors = rows[ids]
    require_finite(vectors, f"vectors of the table '{name}'")

    def place_of(word: str, option: str) -> int:
        if isinstance(named_by, Tokenizer):
            return int(np.searchsorted(ids, named_token(named_by, word, option=option)))
        if word not in names:
            hint = f"0 to {len(names) - 1}" if "positions" in name else did_you_mean(word, names)
            raise InputError(f"{option} {word}: not in the table '{name}' of {loaded.path}", hint=hint)
        return names.index(word)

    asked = list(dict.fromkeys(place_of(word, "--token") for word in options.token))
    shown = list(range(len(names)))
    if options.tokens is not None:
        numbers = parse_numbers(options.tokens, "--tokens") if "positions" in name else None
        words = _words(options.tokens) if numbers is None else (("--tokens", str(number)) for number in numbers)
        shown = list(dict.fromkeys(place_of(word, option) for option, word in words))
    if len(shown) < 2:
        raise InputError(f"principal components need at least 2 vectors, found {len(shown)}")
    coordinates, explained = principal_components(vectors[shown], COMPONENTS)
    near = nearest(vectors, asked, options.top_k, centred=options.centred)
    return EmbeddingReport(
        name, ids, np.array(names, dtype=object), vectors, np.array(shown), coordinates, explained,
        np.array(asked, dtype=np.int64), *near, options.centred,
    )  # fmt: skip


def tables_of(loaded: Loaded) -> dict[str, tuple[Tensor, Tokenizer | Sequence[str]]]:
    """The tables of a model by name, in the order of `EMBEDDING_TABLES`: rows [N, D], and what names them."""
    model = loaded.model
    found: dict[str, tuple[Tensor, Tokenizer | Sequence[str]]] = {}
    if isinstance(model.embedding, TokenEmbedding):
        found["tokens"] = _rows(model.embedding), loaded.text_tokenizer
        other = model.decoder_embedding
        if other is not None and other.weight is not model.embedding.weight:
            found["target"] = _rows(other), loaded.target_tokenizer
    for head in model.heads.values():
        if isinstance(head, VocabularyHead) and not head.is_tied and "output" not in found:
            found["output"] = head.matrix(), loaded.target_tokenizer
    project = getattr(model.heads["classifier"], "project", None) if "classifier" in model.heads else None
    if isinstance(project, nn.Module):
        found["labels"] = project.weight, label_names(loaded)  # type: ignore[assignment]
    tables: list[Tensor] = []
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    for name, stack in zip(("positions", "target-positions"), stacks, strict=False):
        positions = stack.positions_of(0)
        if isinstance(positions, LearnedPositions) and all(positions.weight is not each for each in tables):
            tables.append(positions.weight)
            rows = positions.weight[positions.options.offset :]
            found[name] = rows, [str(number) for number in range(len(rows))]
    return found


def _rows(embedding: TokenEmbedding) -> Tensor:
    """The rows of a table as the model reads them, apart from a common factor."""
    return F.normalize(embedding.weight, dim=-1) if embedding.fixnorm else embedding.weight


def nearest(
    vectors_ND: np.ndarray, places: Sequence[int] | np.ndarray, count: int, *, centred: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(places int64 [A, K], cosines fp32 [A, K]) of the rows with the largest cosines to the rows at `places`.

    K is `count`, or the number of other rows; a row is no neighbour of itself. A row of zeros has cosine 0 with all.
    """
    rows_ND = vectors_ND.astype(np.float64)
    unit_ND = F.normalize(torch.from_numpy(rows_ND - rows_ND.mean(axis=0) if centred else rows_ND), dim=-1).float()
    most, size = min(count, len(unit_ND) - 1), max(1, CHUNK_ELEMENTS // len(unit_ND))
    found, cosines = [torch.empty(0, most, dtype=torch.long)], [torch.empty(0, most)]
    for places_n in torch.as_tensor(np.asarray(places, dtype=np.int64)).split(size):
        cosines_nN = unit_ND[places_n] @ unit_ND.T
        cosines_nN.scatter_(1, places_n[:, None], -torch.inf)
        top = cosines_nN.topk(most, dim=1)
        found.append(top.indices)
        cosines.append(top.values)
    return torch.cat(found).numpy(), torch.cat(cosines).numpy()


def _words(tokens: str) -> Iterator[tuple[str, str]]:
    """(where, word) of each word of `--tokens`: the lines of a file, else what stands between commas, as it is."""
    if not os.path.isfile(tokens):
        for word in tokens.split(","):
            if not word:
                raise InputError(f"--tokens {tokens}: found nothing between two commas, expected a token")
            yield "--tokens", word
        return
    try:
        text = read_bounded(Path(tokens), max_bytes=MAX_LIST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{tokens}: no UTF-8: {error.reason} at byte {error.start}") from None
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if line:
            yield f"{tokens}, line {number}:", line
