"""Short ways to open a source, read its documents and tokenize it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.data.fakes import ByteTokenizer, open_one, read_documents
from tformer.data.shards.corpus import TokenCorpus, token_corpus
from tformer.workers.work import Work

settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
settings.load_profile("no deadline")


@pytest.fixture
def documents() -> Callable[..., list[str]]:
    """`documents(path, column=..., errors=...)`: every document of one source."""
    return lambda path, **options: read_documents(open_one(path, **options))


@pytest.fixture
def tokenized(tmp_path: Path) -> Callable[..., TokenCorpus]:
    """`tokenized(path)`: its bytes as a corpus, cached in this test's own folder."""

    def make(path: Path | str, tokenizer: ByteTokenizer | None = None, **options: object) -> TokenCorpus:
        source = open_one(path, **options)  # type: ignore[arg-type]
        return token_corpus(source, tokenizer or ByteTokenizer(), Work(cache_dir=tmp_path / "cache"))

    return make


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Fifty short documents in a jsonl file."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(50)))
    return path
