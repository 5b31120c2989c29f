"""preprocessor_config.json: means and deviations in, a processor of the same pixels out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from tformer.data.sources.image_files import fit_image
from tformer.data.sources.images import to_pixels
from tformer.interop.preprocessor import preprocessor_notes, read_preprocessor, write_preprocessor
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError

SIZE = 24


def folder_with(path: Path, **values: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": SIZE}))
    (path / "preprocessor_config.json").write_text(json.dumps(values))
    return path


def recipe(*, mean: tuple[float, ...] = (0.4, 0.5, 0.6), std: tuple[float, ...] = (0.2, 0.3, 0.4)) -> Recipe:
    model = {
        **{"d_model": 8, "encoder": {"num_layers": 1, "num_heads": 2}, "heads": [{"kind": "classifier"}]},
        "patches": {"image_size": SIZE, "size": 8, "channels": 3},
    }
    data = {"image_mean": mean, "image_std": std}
    return Recipe.model_validate({"model": model, "data": data, "objectives": [{"kind": "classification"}]})


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def ours(image: Image.Image, mean: Any, std: Any) -> np.ndarray:
    decoded = fit_image(image, size=SIZE, channels=3)
    return to_pixels(np.array(decoded.pixels)[None], mean, std).numpy()


def test_mean_and_deviation_come_into_the_recipe(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6], size={"height": 24, "width": 24}
    )
    assert read_preprocessor(folder) == {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    assert read_preprocessor(folder_with(tmp_path, size=24))["image_std"] == [0.5, 0.5, 0.5]
    unscaled = read_preprocessor(folder_with(tmp_path, size=24, do_normalize=False))
    assert unscaled == {"image_mean": [0.0, 0.0, 0.0], "image_std": [1.0, 1.0, 1.0]}


def test_a_folder_without_the_file_has_neither(tmp_path: Path) -> None:
    assert read_preprocessor(tmp_path) == {} and preprocessor_notes(tmp_path) == ()


def test_an_image_of_the_models_size_becomes_the_same_pixels(tmp_path: Path) -> None:
    theirs = ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}, image_mean=[0.4, 0.5, 0.6])
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": SIZE}))
    found, image = read_preprocessor(tmp_path), picture(SIZE, SIZE)
    expected = theirs(image, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(ours(image, found["image_mean"], found["image_std"]), expected, atol=1e-5)


@pytest.mark.parametrize("size", [(24, 24), (48, 48), (60, 32), (30, 61)], ids=str)
def test_what_is_exported_makes_the_same_pixels_of_any_image(size: tuple[int, int]) -> None:
    document = write_preprocessor(recipe())
    assert document.pop("image_processor_type") == "CLIPImageProcessor"
    image = picture(*size)
    expected = CLIPImageProcessorPil(**document)(image, return_tensors="np")["pixel_values"]
    found = ours(image, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert found.shape == expected.shape == (1, 3, SIZE, SIZE)
    if size[0] == size[1]:
        np.testing.assert_allclose(found, expected, atol=1e-5)
    else:  # the middle that is cut out begins between two pixels: before scaling here, after it there
        deviations = np.array([0.2, 0.3, 0.4])[:, None, None]
        assert np.abs((found - expected) * deviations).mean() < 0.05  # of values in [0, 1]


def test_what_is_exported_reads_back(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, **write_preprocessor(recipe()))
    assert read_preprocessor(folder) == {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    assert preprocessor_notes(folder) == ()


def test_a_recipe_without_mean_is_refused_and_one_of_text_has_nothing_to_say() -> None:
    with pytest.raises(InputError, match=r"data\.image_mean, data\.image_std: found 0 and 0 values, expected one for"):
        write_preprocessor(recipe(mean=(), std=()))
    text = {"model": {"d_model": 8, "decoder": {"num_layers": 1, "num_heads": 2}, "heads": [{"kind": "lm"}]}}
    assert write_preprocessor(Recipe.model_validate(text)) == {}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": 32}, "images of 32 x 32 pixels, the model reads 24 x 24"),
        ({"size": {"height": 24, "width": 30}}, "images of 24 x 30 pixels"),
        ({"size": {"shortest_edge": 24}}, "size: found {'shortest_edge': 24}, expected one size of every image"),
        ({"size": 24, "rescale_factor": 0.5}, "rescale_factor: found 0.5, tformer divides pixels by 255"),
        ({"size": 24, "do_rescale": False}, "do_rescale: found False"),
        ({"size": 24, "image_mean": [0.5]}, "image_mean: found [0.5], expected a number for each of 3 channels"),
        ({"size": 24, "image_std": [0.5, 0.5, 0]}, "image_std: found [0.5, 0.5, 0], expected numbers above 0"),
    ],
)
def test_what_cannot_be_done_names_the_key(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_preprocessor(folder_with(tmp_path, **values))
    assert "preprocessor_config.json" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("values", "notes"),
    [
        (
            {"size": 24},
            ["transformers squeezes images into a square", "transformers resizes images of another size bilinear"],
        ),
        ({"size": 24, "resample": 3}, ["transformers squeezes images into a square"]),
        ({"do_resize": False}, ["transformers does not resize images"]),
        ({"size": {"shortest_edge": 24}, "crop_size": 24, "do_center_crop": True, "resample": 3}, []),
        ({"size": {"shortest_edge": 32}, "crop_size": 24, "do_center_crop": True, "resample": 1},
         ["transformers squeezes images", "transformers resizes images of another size Lanczos"]),
    ],
)  # fmt: skip
def test_how_other_images_come_out_otherwise_is_told(tmp_path: Path, values: dict[str, Any], notes: list[str]) -> None:
    found = preprocessor_notes(folder_with(tmp_path, **values))
    assert len(found) == len(notes)
    assert all(note.split(": ", 1)[1].startswith(expected) for note, expected in zip(found, notes, strict=True))
