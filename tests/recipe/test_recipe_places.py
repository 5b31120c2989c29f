"""Paths in the recipe of a run: from its own folder in every other one, moved together, moved apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tformer.recipe.places import moved, placed, require_there, start_folder
from tformer.recipe.sections import SourceSpec
from tformer.support.errors import InputError

ELSEWHERE = [
    "builtin:python-docs",
    "-",
    "https://host/a.txt",
    "s3://bucket/a.txt",
    "hf://datasets/a/b.txt",
    "/data/a.txt",
]


def recipe(folder: Path | None, *paths: str, **sections: Any) -> dict[str, Any]:
    train = [{"path": path, "target_path": None} for path in paths]
    return {"data": {"folder": None if folder is None else str(folder), "train": train, "valid": []}, **sections}


def paths(found: dict[str, Any]) -> list[str]:
    return [spec["path"] for spec in found["data"]["train"]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "a.txt").touch()
    return folder


def test_relative_paths_start_from_the_folder_of_the_training(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe(
        project, "data/a.txt", "data/*.txt", *ELSEWHERE, teacher={"path": "runs/t"}, tokenizer={"path": "t.json"}
    )
    monkeypatch.chdir(project)
    assert placed(given) == given and start_folder(given) == str(project)
    monkeypatch.chdir(tmp_path)
    found = placed(given)
    assert paths(found) == [str(project / "data/a.txt"), str(project / "data/*.txt"), *ELSEWHERE]
    assert found["teacher"]["path"] == str(project / "runs/t") and found["tokenizer"]["path"] == str(project / "t.json")
    assert start_folder(found) == str(project)  # nothing starts in the current folder


def test_recipes_of_users_start_from_the_current_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (recipe(None, "data/a.txt", *ELSEWHERE), {"arch": "gpt"}, {"data": None}, {"data": {"folder": 3}}):
        assert placed(given) is given
    monkeypatch.chdir(project)
    assert start_folder(recipe(None, *ELSEWHERE)) is None


@pytest.mark.parametrize("is_absolute", [False, True])
def test_run_and_data_that_moved_together_are_found_from_their_new_folder(
    is_absolute: bool, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resumption in another folder, which keeps whole paths."""
    given = recipe(project, str(project / "data/a.txt") if is_absolute else "data/a.txt")
    new = project.rename(tmp_path / "new")
    monkeypatch.chdir(new)
    assert paths(placed(given)) == ["data/a.txt"]
    monkeypatch.chdir(tmp_path)
    [path] = paths(placed(given))
    assert path == str(tmp_path / "project/data/a.txt")
    with pytest.raises(InputError, match=f"{path}: no such file or directory, named by the recipe of runs/a") as caught:
        require_there([SourceSpec(path=path)], Path("runs/a"), "--data-folder")
    assert caught.value.hint == "--data-folder"
    [spec] = moved([SourceSpec(path=path)], new)
    require_there([spec, *(SourceSpec(path=path) for path in ELSEWHERE[:-1])], Path("runs/a"), "")
    assert spec.path == str(new / "data/a.txt")


def test_moved_data_are_found_by_the_end_of_their_paths(project: Path) -> None:
    (project / "a.txt").touch()
    specs = [SourceSpec(path="/old/data/a.txt", target_path="/old/b.txt"), SourceSpec(path="builtin:dates")]
    first, second = moved(specs, project)
    assert first.path == str(project / "data/a.txt") and first.target_path == str(project / "b.txt")
    assert second.path == "builtin:dates"
