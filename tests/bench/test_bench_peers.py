"""Who can be compared with: unknown combinations and libraries that are not installed are one line."""

from __future__ import annotations

from importlib import import_module

import pytest

from tformer.bench.peers import PEERS, Peer, choose_peers
from tformer.support.errors import InputError


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, ("train", "here"), Peer("none", "Training", ("json",)))
    monkeypatch.setitem(PEERS, ("train", "missing"), Peer("none", "Training", ("json", "no_such_module")))


def test_every_precision_of_a_peer_unless_some_are_named() -> None:
    assert choose_peers("train", ["here"], None) == [("here", "fp32"), ("here", "bf16")]
    assert choose_peers("train", ["here", "here"], ["bf16"]) == [("here", "bf16")]
    assert choose_peers("train", [], None) == []


@pytest.mark.parametrize(
    ("work", "name", "precisions", "told"),
    [
        ("train", "nobody", None, "--peer nobody: not available for train; available: .*here"),
        ("train", "missing", None, "no_such_module is not installed"),
        ("train", "here", ["int4"], "--peer-precision int4"),
        ("no work", "here", None, "available: none"),
    ],
)
def test_mistakes(work: str, name: str, precisions: list[str] | None, told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        choose_peers(work, [name], precisions)
    assert name != "missing" or caught.value.hint == "pip install 'tformer[bench]'"


def test_an_installed_library_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Peer, device: object) -> None:
        raise ImportError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(Peer, "precisions_on", broken)
    with pytest.raises(InputError, match="--peer here: it cannot be imported: libfoo"):
        choose_peers("train", ["here"], None)


@pytest.mark.parametrize("key", PEERS, ids="-".join)
def test_the_table_names_classes_that_exist(key: tuple[str, str]) -> None:
    peer = PEERS[key]
    for module in peer.needs:
        pytest.importorskip(module)
    assert hasattr(import_module(f"tformer.bench.peers.{peer.module}"), peer.maker)
