"""Repositories of the hub: what is fetched of them, and what is said when that cannot be."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tformer.interop import hub
from tformer.support.errors import InputError, TformerError


def test_a_repository_is_downloaded_without_pickles_and_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(repository=repository, **options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hub.download("hf:owner/name@v1.0") == tmp_path
    assert asked["repository"] == "owner/name" and asked["revision"] == "v1.0"
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.txt", "*.model"]
    hub.download("hf:gpt2")
    assert (asked["repository"], asked["revision"]) == ("gpt2", None)


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:../x", "hf:a/b@", "hf:a/b@../../x", "hf:a b", "hf:/etc"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InputError, match="no name on the hub") as caught:
        hub.download(name)
    assert "hf:owner/name" in (caught.value.hint or "")


def test_without_the_extra_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="not installed") as caught:
        hub.download("hf:owner/name")
    assert "tformer[hub]" in (caught.value.hint or "")


def test_offline_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TformerError, match="cannot be reached") as caught:
        hub.download("hf:owner/name")
    assert not isinstance(caught.value, InputError) and caught.value.hint


def test_mistakes_about_repositories_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    response = types.SimpleNamespace(headers={}, request=None, status_code=404)
    for kind, word in (
        (errors.RepositoryNotFoundError, "no such repository"),
        (errors.RevisionNotFoundError, "no revision"),
        (errors.GatedRepoError, "restricts who may download"),
    ):

        def fail(*names: str, kind: Any = kind, **options: Any) -> str:
            raise kind("404", response=response)

        monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
        with pytest.raises(InputError, match=word):
            hub.download("hf:owner/name@main")
