"""`tformer import hf:owner/name` with a server of the hub's API on this machine: revisions, cuts, cache, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.interop import tiny_folders as tiny
from tests.interop.local_hub import Hub, serving
from tformer.loading import load

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


@dataclass(frozen=True)
class Imported:
    """code, said: the exit code of the command, and its standard error on one line; run: the new checkpoint."""

    code: int
    said: str
    run: Path

    @property
    def num_heads(self) -> int:
        assert self.code == 0, self.said
        decoder = load(self.run).recipe.model.decoder
        assert decoder is not None
        return decoder.num_heads


Import = Callable[..., Imported]


@pytest.fixture
def run_import(server: Hub, cli: Callable[..., Any], tmp_path: Path) -> Import:
    """Runs `tformer import hf:NAME --out DIR`; the server then lists only this command's requests."""
    numbers = count()

    def runs(name: str = NAME) -> Imported:
        out = tmp_path / f"run-{next(numbers)}"
        server.asked.clear()
        outcome = cli("import", f"hf:{name}", "--out", out)
        assert out.exists() == (outcome.code == 0), outcome.err
        return Imported(outcome.code, " ".join(outcome.err.split()), out)

    return runs


def first_commit(server: Hub) -> str:
    return next(iter(server.commits[NAME]))


def last_shard(server: Hub) -> str:
    return max(name for name in server.commits[NAME][first_commit(server)] if name.startswith("model-"))


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_the_import_of_a_repository_is_that_of_its_folder(server: Hub, run_import: Import, tmp_path: Path) -> None:
    """Only what an import reads is downloaded: no pickle and no code."""
    found = run_import()
    assert found.code == 0 and "GPT2LMHeadModel (gpt2)" in found.said
    names = {path.name for path in (tmp_path / "cache").rglob("*")}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json", last_shard(server)} <= names
    assert not {"pytorch_model.bin", "modeling.py"} & (names | set(server.files_sent()))
    direct, downloaded = (load(path).model.state_dict() for path in (tmp_path / "shards", found.run))
    assert all(torch.equal(direct[name], downloaded[name]) for name in direct)


def test_a_dry_run_downloads_into_the_cache_and_the_import_takes_it_from_there(
    server: Hub, cli: Callable[..., Any], run_import: Import
) -> None:
    planned = cli("import", f"hf:{NAME}", "--dry-run")
    assert planned.code == 0 and "GPT2LMHeadModel (gpt2)" in planned.out and "nothing was written" in planned.out
    assert run_import().code == 0 and server.files_sent() == []


def test_revisions_are_commits_branches_and_tags(server: Hub, run_import: Import, tmp_path: Path) -> None:
    first = first_commit(server)
    changed = json.loads(server.commits[NAME][first]["config.json"]) | {"n_head": 4}
    second = server.commit(NAME, tmp_path / "shards", **{"config.json": json.dumps(changed).encode()})
    server.tags["v1"] = first
    heads = {name: run_import(f"{NAME}{name}").num_heads for name in ("", "@main", "@v1", f"@{first}", f"@{second}")}
    assert heads == {"": 4, "@main": 4, "@v1": 2, f"@{first}": 2, f"@{second}": 4}
    refused = run_import(f"{NAME}@v2")
    assert refused.code == 2 and "hf:owner/tiny@v2: the repository has no revision v2" in refused.said


def test_a_branch_that_moved_is_read_anew_and_sends_only_what_changed(
    server: Hub, run_import: Import, tmp_path: Path
) -> None:
    assert run_import().num_heads == 2
    changed = json.loads(server.commits[NAME][first_commit(server)]["config.json"]) | {"n_head": 4}
    server.commit(NAME, tmp_path / "shards", **{"config.json": json.dumps(changed).encode()})
    assert run_import().num_heads == 4 and server.files_sent() == ["config.json"]


def test_a_download_that_is_cut_goes_on_where_it_ended(
    server: Hub, run_import: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)  # what came of a chunk is lost with it
    shard = last_shard(server)
    server.cut[shard] = 1
    assert run_import().code == 0
    ranges = [given for method, path, given in server.asked if path.endswith(shard) and method == "GET"]
    assert ranges[0] is None and len(ranges) == 2
    start = re.fullmatch(r"bytes=(\d+)-", ranges[1] or "")
    whole = server.commits[NAME][first_commit(server)][shard]
    assert start is not None and 0 < int(start[1]) <= len(whole) // 2


def test_after_a_kill_only_the_file_that_was_being_downloaded_is_sent_again(
    server: Hub, run_import: Import, tmp_path: Path
) -> None:
    """A kill leaves the first bytes of a file under a name of their own, which are not taken for the file."""
    before, shard = run_import(), last_shard(server)
    [there] = (tmp_path / "cache").glob(f"*/snapshots/*/{shard}")
    blob = there.resolve()
    there.unlink()
    blob.with_name(f"{blob.name}.01234567.incomplete").write_bytes(blob.read_bytes()[:1000])
    blob.unlink()
    after = run_import()
    assert after.code == 0 and server.files_sent() == [shard]
    assert (after.run / "model.safetensors").read_bytes() == (before.run / "model.safetensors").read_bytes()


def test_after_a_failure_only_the_rest_is_downloaded(
    server: Hub, run_import: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a repository is not taken for the whole, offline either."""
    commit, shard = first_commit(server), last_shard(server)
    there = dict(server.commits[NAME][commit])
    there[shard] = there.pop(shard)  # the last that is listed

    class Failing(dict[str, bytes]):
        def __contains__(self, name: object) -> bool:
            return name != shard and super().__contains__(name)

    server.commits[NAME][commit] = Failing(there)  # listed, but not to be had
    assert run_import().code == 1
    offline(monkeypatch)
    without = run_import()
    assert without.code == 1 and "the repository was not downloaded whole before" in without.said
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server.commits[NAME][commit] = there
    assert run_import().code == 0
    assert shard in server.files_sent() and "config.json" not in server.files_sent()


def test_the_cache_serves_offline_and_what_is_there_is_not_sent_again(
    server: Hub, run_import: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_import().code == 0
    assert run_import().code == 0 and server.files_sent() == []
    offline(monkeypatch)
    assert run_import().code == 0 and server.asked == []
    assert run_import(f"{NAME}@{first_commit(server)}").code == 0 and server.asked == []
    absent = run_import("owner/other")
    assert absent.code == 1 and "the hub cannot be reached, and the repository was not downloaded" in absent.said


def test_a_server_that_is_gone_leaves_the_cache(
    server: Hub, run_import: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_import().code == 0
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert run_import().code == 0


def test_a_private_repository_needs_a_token(server: Hub, run_import: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    server.private.add(NAME)
    for name in (NAME, "owner/absent"):  # the hub does not tell them apart
        refused = run_import(name)
        assert refused.code == 2 and f"hf:{name}: there is no such repository, or it is private" in refused.said
        assert "hint: a private one needs: hf auth login" in refused.said
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "or it is private" in run_import().said
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert run_import().code == 0


def test_a_gated_repository_is_refused_by_its_terms(server: Hub, run_import: Import) -> None:
    server.gated.add(NAME)
    refused = run_import()
    assert refused.code == 2 and "its owner restricts who may download it" in refused.said
    assert "accept the terms on its page" in refused.said
