"""Vectors of tokens and labels: nearest neighbours and principal components of the rows of a table.

The cosine of two vectors is u·v / (|u| |v|); centred, the mean of all rows of the table is subtracted first. The
vectors of trained models share a large mean (arXiv 1702.01417), so that centred cosines tell more apart. Principal
components are those of the rows that are shown.
"""

# Shapes: N rows, D width, S rows that are shown, A rows asked for, K neighbours, C components.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.data.encoding import token_text
from tformer.inside.answers import answer_id, label_names
from tformer.inside.options import EMBEDDING_TABLES, EmbeddingOptions
from tformer.loading import Loaded
from tformer.metrics.statistics import principal_components
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.heads import VocabularyHead
from tformer.support.errors import InputError, require_finite
from tformer.tokenizer import Tokenizer

COMPONENTS = 3
CHUNK_ELEMENTS = 1 << 24  # cosines that exist at a time


@dataclass(frozen=True)
class EmbeddingReport:
    """Report of `tformer viz-embeddings` and `Run.embedding_table`.

    Attributes:
        table: its name. A row's number is the id of its token or label.
        names: texts of the tokens, or names of the labels [N]. vectors: fp32 [N, D].
        shown: rows that are drawn int64 [S]. coordinates: their principal components fp64 [S, C].
        explained: the share of their variance that each component has [C].
        asked: rows whose neighbours were asked for int64 [A].
        neighbours: their nearest rows, the nearest first int64 [A, K]. cosines: fp32 [A, K].
        centred: the mean of all rows was subtracted before the cosine.
    """

    table: str
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
        problem = f"{loaded.path} has no table '{name}': {EMBEDDING_TABLES[name]}"
        raise InputError(problem, hint=f"it has: {', '.join(tables) or 'none'}")
    weight, tokenizer = tables[name]
    if tokenizer is None:
        names = label_names(loaded)
    else:  # rows behind the vocabulary have no meaning
        known = enumerate(tokenizer.tokens[: len(weight)])
        names = [token_text(tokenizer, token) if spelled else f"id {token}" for token, spelled in known]
    vectors = weight[: len(names)].detach().to("cpu", torch.float32, copy=True).numpy()
    require_finite(vectors, f"vectors of the table '{name}'")

    def rows_of(words: Iterable[str], option: str) -> np.ndarray:
        head = "classifier" if tokenizer is None else "lm"
        found = (answer_id(loaded, head, word, option=option, tokenizer=tokenizer) for word in words)
        return np.array(list(dict.fromkeys(found)), dtype=np.int64)

    asked = rows_of(options.token, "--token")
    shown = np.arange(len(names)) if options.tokens is None else rows_of(options.tokens.split(","), "--tokens")
    if len(shown) < 2:
        raise InputError(f"principal components need at least 2 vectors, found {len(shown)}")
    components = principal_components(vectors[shown], COMPONENTS)
    near = nearest(vectors, asked, options.top_k, centred=options.centred)
    texts = np.array(names, dtype=object)
    return EmbeddingReport(name, texts, vectors, shown, *components, asked, *near, options.centred)


def tables_of(loaded: Loaded) -> dict[str, tuple[Tensor, Tokenizer | None]]:
    """The tables of a model by name, in the order of `EMBEDDING_TABLES`: rows [N, D], and the tokenizer of tokens."""
    model, target = loaded.model, loaded.own_target_tokenizer or loaded.tokenizer
    found: dict[str, tuple[Tensor, Tokenizer | None]] = {}
    sides = ("tokens", model.embedding, loaded.tokenizer), ("target", model.decoder_embedding, target)
    for name, embedding, tokenizer in sides:
        is_shared = name == "target" and getattr(embedding, "weight", None) is getattr(model.embedding, "weight", None)
        if isinstance(embedding, TokenEmbedding) and not is_shared:
            rows = F.normalize(embedding.weight, dim=-1) if embedding.fixnorm else embedding.weight
            found[name] = rows, tokenizer  # as the model reads them, apart from a common factor
    for head in model.heads.values():
        if isinstance(head, VocabularyHead) and not head.is_tied:
            found.setdefault("output", (head.matrix(), target))
    if "classifier" in model.heads:
        classifier: Any = model.heads["classifier"]
        found["labels"] = classifier.project.weight, None
    return found


def nearest(
    vectors_ND: np.ndarray, rows_A: Sequence[int] | np.ndarray, count: int, *, centred: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(rows int64 [A, K], cosines fp32 [A, K]) with the largest cosines to the rows `rows_A`, the largest first.

    K is `count`, or the number of other rows; a row is no neighbour of itself. A row of zeros has cosine 0 with all.
    """
    wide_ND = vectors_ND.astype(np.float64)
    unit_ND = F.normalize(torch.from_numpy(wide_ND - wide_ND.mean(axis=0) if centred else wide_ND), dim=-1).float()
    most = min(count, len(unit_ND) - 1)
    found, cosines = [torch.empty(0, most, dtype=torch.long)], [torch.empty(0, most)]
    for rows_n in torch.as_tensor(np.asarray(rows_A, dtype=np.int64)).split(max(1, CHUNK_ELEMENTS // len(unit_ND))):
        cosines_nN = (unit_ND[rows_n] @ unit_ND.T).scatter_(1, rows_n[:, None], -torch.inf)
        top = cosines_nN.topk(most, dim=1)
        found.append(top.indices)
        cosines.append(top.values)
    return torch.cat(found).numpy(), torch.cat(cosines).numpy()
