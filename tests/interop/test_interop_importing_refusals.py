"""What an import refuses: one message that names the place, and nothing written; interruptions and disks as well."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tformer
from tests.interop import tiny_folders as tiny
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.architectures.lacking import LACKING
from tformer.interop.importing import import_folder
from tformer.interop.opening import is_foreign, open_checkpoint
from tformer.support import files
from tformer.support.errors import InputError, Interrupted, StorageError
from tformer.workers.work import Work

# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_folder_without_a_config(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    (folder / "config.json").unlink()
    assert "config.json" in tiny.refusal(folder, out).message
    with pytest.raises(InputError, match=r"no config\.json"):
        tformer.load(folder)


def test_a_name_on_the_hub_is_imported_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name on the hub") as caught:
        tformer.load("hf:owner/name")
    assert caught.value.hint == "tformer import hf:owner/name --out DIR"


@pytest.mark.parametrize("name", ["gtp2", "frobnicator", "qwen", None, 3])
def test_an_unknown_model_type_lists_the_known(name: Any, tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.edit_json(folder / "config.json", {"model_type": name})
    error = tiny.refusal(folder, out)
    assert (
        "bert, " in error.message and "gpt2, " in error.message and ("gpt2" in (error.hint or "")) == (name == "gtp2")
    )


@pytest.mark.parametrize("name", LACKING)
def test_a_well_known_model_type_is_refused_by_the_feature_that_is_missing(
    name: str, tmp_path: Path, out: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "architectures": ["Some"]}))
    error = tiny.refusal(tmp_path, out)
    assert error.message.endswith(f"found {name!r}, which tformer does not read: it lacks {LACKING[name]}")
    assert error.hint is None and name not in ARCHITECTURES


def test_the_types_that_are_refused_by_a_feature_are_those_of_transformers() -> None:
    assert [name for name in LACKING if name not in transformers.CONFIG_MAPPING] == []


def test_a_key_that_nobody_knows_unless_it_is_ignored(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.edit_json(folder / "config.json", {"mystery_gate": 0.5})
    error = tiny.refusal(folder, out)
    assert "mystery_gate" in error.message and "--ignore mystery_gate" in (error.hint or "")
    import_folder(folder, out, ignore=["mystery_gate"])
    assert out.is_dir()


def test_code_of_a_repository_is_not_run(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    mark = tmp_path / "ran"
    (folder / "modeling_custom.py").write_text(f"open({str(mark)!r}, 'w')")
    tiny.edit_json(folder / "config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_custom.Model"}})
    assert "auto_map" in tiny.refusal(folder, out).message
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.bias"), ["missing transformer.h.1.mlp.c_fc.bias"]),
        (
            lambda tensors: tensors.update({"transformer.h.2.ln_1.bias": torch.ones(16)}),
            ["unknown transformer.h.2.ln_1.bias"],
        ),
        (
            lambda tensors: tensors.update({"transformer.wpe.weight": torch.ones(31, 16)}),
            ["transformer.wpe.weight", "[31, 16]", "[32, 16]"],
        ),
        (
            lambda tensors: tensors.update({"transformer.wpe.weight": torch.ones(32, 16, dtype=torch.int8)}),
            ["int8"],
        ),
    ],
    ids=["missing", "extra", "shape", "quantised"],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, out: Path, change: Callable[[dict[str, Any]], Any], words: list[str]
) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.change_weights(folder, change)
    message = tiny.refusal(folder, out).message
    assert all(word in message for word in words)


def test_a_tokenizer_with_more_ids_than_rows(tmp_path: Path, out: Path) -> None:
    folder = tiny.bert(tmp_path / "folder")
    shutil.copy(tiny.gpt2(tmp_path / "other") / "tokenizer.json", folder / "tokenizer.json")
    error = tiny.refusal(folder, out)
    assert "290 ids" in error.message and "25 rows" in error.message and "--tokenizer" in (error.hint or "")


def test_the_named_tokenizer_replaces_the_wrong_one(tmp_path: Path, out: Path) -> None:
    folder = tiny.bert(tmp_path / "folder")
    right = tmp_path / "right.json"
    shutil.move(folder / "tokenizer.json", right)
    shutil.copy(tiny.gpt2(tmp_path / "other") / "tokenizer.json", folder / "tokenizer.json")
    import_folder(folder, out, tokenizer=right)
    assert (out / "tokenizer.json").read_text() == right.read_text()


def test_a_folder_without_a_tokenizer(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    error = tiny.refusal(folder, out)
    assert "tokenizer" in error.message and error.hint


def test_an_end_of_sequence_that_the_tokenizer_lacks(tmp_path: Path, out: Path) -> None:
    folder = tiny.t5(tmp_path / "folder")
    for name in ("config.json", "generation_config.json"):
        tiny.edit_json(folder / name, {"eos_token_id": 50})
    message = tiny.refusal(folder, out).message
    assert "eos_token_id" in message and "50" in message


def test_an_existing_folder_is_never_written_to(tmp_path: Path) -> None:
    folder, out = tiny.gpt2(tmp_path / "folder"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(InputError, match="exists already"):
        import_folder(folder, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


# --- interruptions and disks ------------------------------------------------------------------------------------------


def test_an_interruption_leaves_nothing(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    with pytest.raises(Interrupted):
        import_folder(folder, out, work=Work(should_stop=lambda: True))
    assert not out.parent.exists()


@pytest.mark.parametrize("call", range(0, 30, 3))
def test_a_failing_disk_leaves_nothing(call: int, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    calls, write = iter(range(1000)), files.write

    def failing(descriptor: int, data: Any) -> None:
        if next(calls) == call:
            raise OSError(28, "No space left on device")
        write(descriptor, data)

    monkeypatch.setattr(files, "write", failing)
    try:
        import_folder(folder, out)
    except StorageError:
        assert not out.exists() and not (out.parent.exists() and list(out.parent.iterdir()))


# --- what a person may name -------------------------------------------------------------------------------------------


def test_what_is_a_folder_of_hugging_face(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    import_folder(folder, out)
    assert is_foreign(folder) and not is_foreign(out) and not is_foreign(tmp_path)
    assert type(open_checkpoint(out)) is not type(open_checkpoint(folder))
    (out / "manifest.json").unlink()  # a checkpoint that was cut off is none of theirs
    assert not is_foreign(out)


def test_a_pickle_in_a_folder_is_never_opened(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nabort\n(tR.")  # would end this process
    with pytest.raises(InputError) as caught:
        tformer.load(folder)
    for error in (tiny.refusal(folder, out), caught.value):
        assert "pytorch_model.bin" in error.message and "pickle" in error.message
