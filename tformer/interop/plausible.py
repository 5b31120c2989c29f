"""Whether the sizes in config.json can be meant, before memory or minutes are spent on them."""

from __future__ import annotations

from tformer.build import build_model
from tformer.errors import InputError
from tformer.interop.weight_files import WeightFiles
from tformer.model import Transformer
from tformer.recipe.model import Model


def planned(model: Model, files: WeightFiles, *, name: str) -> Transformer:
    """The model without any memory for its tensors.

    Args:
        model: as config.json, which messages call `name`, describes it.
        files: the weights; a plan takes memory for each layer, so there may be no more layers than tensors in them.

    Raises:
        InputError: too many layers, sizes whose product is beyond counting, sizes that contradict each other.
    """
    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        if stack is not None and stack.num_layers > len(files.specs):
            raise InputError(
                f"{name}: found {stack.num_layers:,} layers of the {side}, but the weights are {len(files.specs):,} "
                "tensors only"
            )
    try:
        return build_model(model, device="meta")
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise InputError(f"{name}: its sizes make tensors larger than any memory ({error})") from None
