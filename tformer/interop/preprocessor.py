"""`preprocessor_config.json` of image models: scaling of pixels, resizing and cropping.

Means and deviations go into the recipe. tformer always scales the shorter side to the model's size (bicubic), crops the
middle and divides values by 255. transformers' ViT processor resizes to the square with bilinear interpolation and
changes the aspect ratio, unless its file sets other values. Both agree for images that already have the model's size;
`preprocessor_notes` describes the difference for others. The exported processor (CLIP's) does the same as tformer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tformer.interop.config import Config
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.support.files import read_object

PREPROCESSOR = "preprocessor_config.json"
MAX_BYTES = 16 << 20  # config.json may name many labels
BICUBIC = 3
RESAMPLING = ("nearest", "Lanczos", "bilinear", "bicubic", "box", "Hamming")  # Pillow's numbers
RESCALE = 1 / 255
HALF = 0.5  # default mean and deviation of a ViT
USUAL_SIZE = 224


def read_preprocessor(folder: Path) -> dict[str, Any]:
    """{"image_mean": [...], "image_std": [...]}; {} where the folder has no such file.

    Raises InputError, naming the key, for what cannot be done here: pixels that are not divided by 255, another size
    than the model's.
    """
    keys = _keys(folder)
    if keys is None:
        return {}
    keys.expect("do_rescale", True)
    factor = keys.take("rescale_factor", default=RESCALE, kind=float)
    if abs(factor - RESCALE) > 1e-9:
        raise InputError(f"{keys.name}: rescale_factor: found {factor}, tformer divides pixels by 255")
    path = folder / "config.json"
    model = read_object(path, max_bytes=MAX_BYTES) if path.exists() else {}
    size, found = model.get("image_size", USUAL_SIZE), _final_size(keys)
    if found is not None and found != (size, size):
        raise InputError(
            f"{keys.name}: images of {found[0]} x {found[1]} pixels, the model reads {size} x {size} (config.json)"
        )
    channels = int(model.get("num_channels", 3))
    if not keys.take("do_normalize", default=True, kind=bool):
        return {"image_mean": [0.0] * channels, "image_std": [1.0] * channels}
    return {name: _per_channel(keys, name, channels) for name in ("image_mean", "image_std")}


def preprocessor_notes(folder: Path) -> tuple[str, ...]:
    """One line for each difference from transformers in the treatment of images of another size."""
    keys = _keys(folder)
    return () if keys is None else tuple(f"{keys.name}: {difference}" for difference in _differences(keys))


def write_preprocessor(recipe: Recipe) -> dict[str, Any]:
    """The content of preprocessor_config.json; {} for a model without images.

    Raises InputError for a recipe without mean and deviation, which training fills in.
    """
    patches, data = recipe.model.patches, recipe.data
    if patches is None:
        return {}
    if len(data.image_mean) != patches.channels or len(data.image_std) != patches.channels:
        raise InputError(
            f"data.image_mean, data.image_std: found {len(data.image_mean)} and {len(data.image_std)} values, "
            f"expected one for each of the {patches.channels} channels"
        )
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": patches.image_size},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": patches.image_size, "width": patches.image_size},
        "do_rescale": True,
        "rescale_factor": RESCALE,
        "do_normalize": True,
        "image_mean": list(data.image_mean),
        "image_std": list(data.image_std),
        "do_convert_rgb": patches.channels == 3,
    }


def _keys(folder: Path) -> Config | None:
    path = folder / PREPROCESSOR
    return Config(read_object(path, max_bytes=MAX_BYTES), name=str(path)) if path.exists() else None


def _per_channel(keys: Config, name: str, channels: int) -> list[float]:
    values = keys.take(name, default=[HALF] * channels, kind=list)
    if len(values) != channels or not all(isinstance(value, int | float) for value in values):
        raise InputError(f"{keys.name}: {name}: found {values}, expected a number for each of {channels} channels")
    if name == "image_std" and not all(value > 0 for value in values):
        raise InputError(f"{keys.name}: {name}: found {values}, expected numbers above 0")
    return [float(value) for value in values]


def _final_size(keys: Config) -> tuple[int, int] | None:
    """Height and width of the model's input; None where images keep their size."""
    crops = keys.take("do_center_crop", default=False, kind=bool)
    if not crops and not keys.take("do_resize", default=True, kind=bool):
        return None
    name = "crop_size" if crops else "size"
    size = keys.take(name, default=USUAL_SIZE, kind=(int, dict))
    if isinstance(size, int):
        return size, size
    if isinstance(size.get("height"), int) and isinstance(size.get("width"), int):
        return size["height"], size["width"]
    raise InputError(f"{keys.name}: {name}: found {size}, expected one size of every image: height and width")


def _differences(keys: Config) -> Iterator[str]:
    if not keys.take("do_resize", default=True, kind=bool):
        yield "transformers does not resize images for this model; tformer resizes them to the model's size"
        return
    size = keys.take("size", default=USUAL_SIZE, kind=(int, dict))
    crop = _final_size(keys) if isinstance(size, Mapping) else None
    if crop is None or not isinstance(size, Mapping) or not size.get("shortest_edge") == crop[0] == crop[1]:
        yield "transformers squeezes images into a square; tformer crops the middle of an oblong one"
    resample = keys.take("resample", default=2)
    if resample != BICUBIC:
        named = RESAMPLING[resample] if 0 <= resample < len(RESAMPLING) else f"method {resample}"
        yield f"transformers resizes images of another size {named}; tformer bicubic"
