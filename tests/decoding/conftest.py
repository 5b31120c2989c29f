"""A model whose next-token logits are scripted, behind the same calls as the real one, and a tokenizer of bytes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Rule = Callable[[list[int]], Sequence[float]]


class ScriptedCache:
    """Remembers the ids themselves; padding is -1."""

    def __init__(self, batch_size: int, capacity: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(batch_size)]
        self.capacity = capacity

    @property
    def length(self) -> int:
        return len(self.rows[0])

    def expand(self, n: int) -> None:
        self.rows = [list(row) for row in self.rows for _ in range(n)]

    def compact(self, rows: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]


class ScriptedModel(nn.Module):
    """`rule(tokens seen, without padding) -> logits [V]`. `calls` records the shape of each batch of inputs."""

    def __init__(self, rule: Rule, *, max_seq_len: int = 64) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.rule = rule
        self.max_seq_len = self.longest_target = max_seq_len
        self.compute_dtype = torch.float32
        self.compiled_decoder = None
        self.kernels = None
        self.encoder = None
        self.calls: list[tuple[int, int]] = []

    def new_cache(self, batch_size: int, capacity: int, **_: Any) -> ScriptedCache:
        return ScriptedCache(batch_size, capacity)

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: ScriptedCache | None = None,
    ) -> Any:
        assert not self.training
        self.calls.append(tuple(input_ids.shape))
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        new = torch.where(mask, input_ids, -1).tolist()
        if cache is None:
            rows = new
        else:
            assert len(cache.rows) == len(new)
            assert cache.length + input_ids.shape[1] <= cache.capacity
            for row, ids in zip(cache.rows, new, strict=True):
                row.extend(ids)
            rows = cache.rows
        seen = [[token for token in row if token >= 0] for row in rows]
        if position_ids is not None:
            assert position_ids[:, -1].tolist() == [len(row) - 1 for row in seen]

        def logits_at(index: int) -> Tensor:
            assert index == -1
            return torch.tensor([self.rule(row) for row in seen], dtype=torch.float32)

        return SimpleNamespace(logits_at=logits_at)


class BytesTokenizer:
    """Every token stands for some bytes; `special` tokens have no text."""

    def __init__(self, pieces: Sequence[bytes], *, bos: int | None = None, eos: int | None = None) -> None:
        self.pieces = list(pieces)
        self.vocab_size = len(self.pieces)
        self.special = SimpleNamespace(bos=bos, eos=eos, unk=None)

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(character.encode()) for character in text]

    def stream(self) -> Any:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        hidden = {self.special.bos, self.special.eos}
        return SimpleNamespace(
            push=lambda token: "" if token in hidden else decoder.decode(self.pieces[token]),
            finish=lambda: decoder.decode(b"", final=True),
        )


@pytest.fixture
def scripted() -> type[ScriptedModel]:
    return ScriptedModel


@pytest.fixture
def bytes_tokenizer() -> type[BytesTokenizer]:
    return BytesTokenizer


@pytest.fixture
def spelling() -> Callable[..., ScriptedModel]:
    """A model that writes the given ids after a prompt of any length, whatever the prompt says."""

    def make(ids: Sequence[int], *, prompt_length: int, vocab_size: int, max_seq_len: int = 64) -> ScriptedModel:
        def rule(seen: list[int]) -> list[float]:
            step = len(seen) - prompt_length
            wanted = ids[step] if step < len(ids) else ids[-1]
            return [10.0 if token == wanted else 0.0 for token in range(vocab_size)]

        return ScriptedModel(rule, max_seq_len=max_seq_len)

    return make
