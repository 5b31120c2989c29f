"""`hf:owner/name` against a server of the hub's API on this machine: revisions, cuts, the cache, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.interop import tiny_folders as tiny
from tests.interop.local_hub import Hub, serving
from tformer.interop import hub
from tformer.interop.foreign_checkpoint import open_folder
from tformer.support.errors import InputError, TformerError

Cli = Callable[..., Any]
NAME = "owner/tiny"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one repository: GPT-2 in shards, and files that no import reads."""
    constants = pytest.importorskip("huggingface_hub").constants
    folder = tiny.gpt2(tmp_path / "original")
    transformers.GPT2LMHeadModel.from_pretrained(folder).save_pretrained(tmp_path / "shards", max_shard_size="12KB")
    for path in folder.glob("tokenizer*"):
        path.rename(tmp_path / "shards" / path.name)
    with serving(Hub()) as found:
        found.commit(NAME, tmp_path / "shards", **{"pytorch_model.bin": b"pickle", "modeling.py": b"code"})
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield found


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_what_an_import_reads_is_downloaded_and_nothing_else(server: Hub) -> None:
    folder = hub.download(f"hf:{NAME}")
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert not {"pytorch_model.bin", "modeling.py"} & names
    assert not {"pytorch_model.bin", "modeling.py"} & set(server.files_sent())
    assert open_folder(folder).foreign.class_name == "GPT2LMHeadModel"


def test_revisions_are_commits_branches_and_tags(server: Hub, tmp_path: Path) -> None:
    first = next(iter(server.commits[NAME]))
    changed = json.loads(server.commits[NAME][first]["config.json"]) | {"n_head": 4}
    second = server.commit(NAME, tmp_path / "shards", **{"config.json": json.dumps(changed).encode()})
    server.tags["v1"] = first
    heads = {
        name: open_folder(hub.download(f"hf:{NAME}{name}")).recipe.model.decoder.num_heads  # type: ignore[union-attr]
        for name in ("", "@main", "@v1", f"@{first}", f"@{second}")
    }
    assert heads == {"": 4, "@main": 4, "@v1": 2, f"@{first}": 2, f"@{second}": 4}
    with pytest.raises(InputError, match=r"hf:owner/tiny@v2: the repository has no revision v2"):
        hub.download(f"hf:{NAME}@v2")


def test_a_file_that_is_cut_goes_on_where_it_ended(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)  # what came of a chunk is lost with it
    shard = max(name for name in server.commits[NAME][next(iter(server.commits[NAME]))] if name.startswith("model-"))
    whole = server.commits[NAME][next(iter(server.commits[NAME]))][shard]
    server.cut[shard] = 1
    folder = hub.download(f"hf:{NAME}")
    assert (folder / shard).read_bytes() == whole
    ranges = [given for method, path, given in server.asked if path.endswith(shard) and method == "GET"]
    assert ranges[0] is None and len(ranges) == 2
    start = re.fullmatch(r"bytes=(\d+)-", ranges[1] or "")
    assert start is not None and 0 < int(start[1]) <= len(whole) // 2


def test_a_download_that_failed_fetches_only_the_rest(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a repository is not taken for the whole, offline either."""
    commit = next(iter(server.commits[NAME]))
    shard = max(name for name in server.commits[NAME][commit] if name.startswith("model-"))
    data = server.commits[NAME][commit].pop(shard)
    server.commits[NAME][commit][shard] = data
    real, there = server.commits[NAME][commit], dict(server.commits[NAME][commit])

    class Failing(dict[str, bytes]):
        def __contains__(self, name: object) -> bool:
            return name != shard and super().__contains__(name)

    server.commits[NAME][commit] = Failing(real)  # listed, but not to be had
    with pytest.raises(TformerError):
        hub.download(f"hf:{NAME}")
    offline(monkeypatch)
    with pytest.raises(TformerError, match="cannot be reached"):
        hub.download(f"hf:{NAME}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server.commits[NAME][commit] = there
    server.asked.clear()
    open_folder(hub.download(f"hf:{NAME}"))
    assert shard in server.files_sent() and "config.json" not in server.files_sent()


def test_the_cache_serves_offline_and_what_is_there_is_not_sent_again(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub.download(f"hf:{NAME}")
    server.asked.clear()
    assert hub.download(f"hf:{NAME}") == folder and server.files_sent() == []
    offline(monkeypatch)
    server.asked.clear()
    assert hub.download(f"hf:{NAME}") == folder and server.asked == []
    with pytest.raises(TformerError, match="cannot be reached, and the repository was not downloaded") as caught:
        hub.download("hf:owner/other")
    assert not isinstance(caught.value, InputError)


def test_a_server_that_is_gone_leaves_the_cache(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.download(f"hf:{NAME}")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert hub.download(f"hf:{NAME}") == folder


def test_a_private_repository_needs_a_token(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.private.add(NAME)
    for name in (NAME, "owner/absent"):  # the hub does not tell them apart
        with pytest.raises(InputError, match=f"hf:{name}: there is no such repository, or it is private") as caught:
            hub.download(f"hf:{name}")
        assert caught.value.hint == "a private one needs: hf auth login"
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(InputError, match="or it is private"):
        hub.download(f"hf:{NAME}")
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert (hub.download(f"hf:{NAME}") / "config.json").is_file()


def test_a_gated_repository_is_refused_by_its_terms(server: Hub) -> None:
    server.gated.add(NAME)
    with pytest.raises(InputError, match="its owner restricts who may download it") as caught:
        hub.download(f"hf:{NAME}")
    assert "accept the terms on its page" in (caught.value.hint or "")


def test_the_command_imports_a_repository_and_says_first_what_it_would_do(
    server: Hub, cli: Cli, tmp_path: Path
) -> None:
    planned = cli("import", f"hf:{NAME}", "--dry-run")
    assert planned.code == 0 and "GPT2LMHeadModel (gpt2)" in planned.out and "nothing was written" in planned.out
    server.asked.clear()
    outcome = cli("import", f"hf:{NAME}@main", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert server.files_sent() == [] and (tmp_path / "out" / "manifest.json").is_file()
    server.private.add("owner/mine")
    refused = cli("import", "hf:owner/mine", "--out", tmp_path / "mine")
    assert refused.code == 2 and "or it is private" in refused.err and not (tmp_path / "mine").exists()
