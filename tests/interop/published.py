"""Published configurations by their name on the hub, each with the source of its values."""

from __future__ import annotations

from typing import Any

from tests.interop.decoder_configs import PARAMETERS
from tests.interop.encoder_configs import PUBLISHED as ENCODERS
from tests.interop.hub_seq2seq import HUB
from tests.interop.more_configs import MORE
from tformer.interop.architectures import ARCHITECTURES

COUNTED = "sizes held to the published number of parameters"
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    **{name: (config, COUNTED) for name, (config, _) in (PARAMETERS | HUB).items() if "Phi-" not in name},
    "Phi-3-mini-4k": (PARAMETERS["Phi-3-mini-4k"][0], COUNTED),  # the factors of the others stand in MORE
    **{name: (config, "the file on the hub") for name, config in ENCODERS.items()},
    **MORE,
}


def class_of(config: dict[str, Any]) -> str:
    """The class that tformer reads the file as; of a body whose output is tied, the one with that head."""
    classes = ARCHITECTURES[config["model_type"]].classes
    bodies = () if config.get("is_encoder_decoder") else classes
    return next((name for name in config["architectures"] if classes.get(name) or name in bodies), next(iter(classes)))
