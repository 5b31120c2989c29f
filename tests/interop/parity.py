"""One check for every class: import, logits, export tensor by tensor, and back into `transformers`.

Every parameter of the reference is randomized (fresh biases and gains would hide swapped norms), buffers that are saved
too; configurations have unusual sizes; a row of the batch is padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.interop.classes import note_exchange
from tformer.build import build_model
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.choose import choose_class, label_keys
from tformer.interop.config import Config
from tformer.interop.read_model import ForeignModel, read_model
from tformer.interop.weight_files import outgoing
from tformer.model import Transformer
from tformer.recipe.model import Model

TOLERANCE = 2e-5  # of the largest logit, fp32
Logits = Callable[[Any, Mapping[str, Tensor]], Tensor]  # (model, inputs) -> logits


def randomized(reference: nn.Module, *, seed: int = 0) -> nn.Module:
    """Every floating tensor that is saved, in place; norm gains around 1."""
    generator = torch.Generator().manual_seed(seed)
    trained = dict(reference.named_parameters())
    with torch.no_grad():
        for name, value in reference.state_dict().items():
            if value.is_floating_point() and trained.get(name, value).requires_grad | (name not in trained):
                noise = torch.randn(value.shape, generator=generator) * 0.3
                is_gain = value.dim() == 1 and name.endswith("weight")
                value.copy_(noise + 1.0 if is_gain else noise)
    return reference.eval()


def saved(reference: nn.Module, folder: Path) -> Path:
    reference.save_pretrained(folder)  # type: ignore[operator]
    return folder


def imported(folder: Path) -> tuple[Transformer, ForeignModel]:
    """The folder's model, through the public reader alone."""
    foreign = read_model(folder)
    model = build_model(foreign.model).eval()
    weights = foreign.weights()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) == set(model.tied_names())
    return model, foreign


def section_of(config: dict[str, Any], class_name: str | None = None) -> Model:
    """The model section of a config, every key of it understood.

    class_name: None: the class that it names; of a bare body, the first of the architecture.
    """
    architecture, reader = ARCHITECTURES[config["model_type"]], Config(config)
    named = class_name or config["architectures"][0]
    values = architecture.read(reader, named if named in architecture.classes else next(iter(architecture.classes)))
    reader.finish()
    return Model.model_validate(values)


def exported(foreign: ForeignModel, model: Transformer, folder: Path, *, model_type: str | None = None) -> Path:
    """Config and weights as an export writes them, without tokenizer; special ids are the original's."""
    source = foreign.architecture.model_type
    choice = choose_class(foreign.model, family=foreign.architecture.family, source=source, model_type=model_type)
    assert choice.architecture.model_type == (model_type or source)  # it goes back as what it was
    owners = {name: value for name, value in model.state_dict().items() if name not in model.tied_names()}
    tensors = outgoing(*choice.architecture.written(foreign.model, choice.class_name), owners)
    ids = {key: value for key, value in foreign.config.items() if key.endswith("_token_id")}
    header = {"model_type": choice.architecture.model_type, "architectures": [choice.class_name]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(header | ids | label_keys(foreign.model) | choice.config))
    made = {name: tensors.make(name).contiguous() for name in tensors.shapes}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_agree(ours: Tensor, theirs: Tensor, mask: Tensor | None = None) -> float:
    """Errors against the largest logit; where a mask is given, at its real positions only. Returns the error."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    if mask is not None:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error <= TOLERANCE, error
    return error


def assert_parity(
    reference: nn.Module,
    inputs: Mapping[str, Tensor],
    tmp_path: Path,
    *,
    theirs: Logits = lambda model, inputs: model(**inputs).logits,
    ours: Logits = lambda model, inputs: model(**inputs).logits,
    mask: Tensor | None = None,
    model_type: str | None = None,
    their_inputs: Mapping[str, Tensor] | None = None,
    published: tuple[str, Mapping[str, Any]] | None = None,
) -> tuple[Transformer, ForeignModel]:
    """Import gives the reference's logits; export gives the reference's very file, which it loads again.

    their_inputs: for the reference, where its names or needs differ (GPT-2's position ids under left padding).
    model_type: what to export as, where another architecture with the same function would come first.
    published: a name, and the config.json that is read in place of the one that `transformers` writes.
    """
    randomized(reference)
    original = saved(reference, tmp_path / "original")
    if published is not None:
        (original / "config.json").write_text(json.dumps(published[1]))
    model, foreign = imported(original)
    asked = inputs if their_inputs is None else their_inputs
    with torch.no_grad():
        expected = theirs(reference, asked)
        error = assert_agree(ours(model, inputs), expected, mask)
    again = exported(foreign, model, tmp_path / "again", model_type=model_type)
    before, after = load_file(original / "model.safetensors"), load_file(again / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    loaded, report = type(reference).from_pretrained(again, output_loading_info=True)  # type: ignore[attr-defined]
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        for tensor in (*loaded.parameters(), *loaded.buffers()):
            # Out of the file's bytes: where a tensor lies in memory decides the last bits of a product.
            tensor.data = tensor.data.clone()
        assert torch.equal(theirs(loaded.eval(), asked), expected)
    note_exchange(type(reference).__name__, foreign, error)
    if published is not None:
        note_exchange(published[0], foreign, error)
    return model, foreign


def tokens(*shape: int, vocabulary: int, seed: int = 1) -> Tensor:
    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def padding(length: int, *real: int, left: bool = False) -> Tensor:
    """A mask [rows, length]: row n has `real[n]` real tokens."""
    mask = (torch.arange(length) < torch.tensor(real).unsqueeze(1)).long()
    return mask.flip(1) if left else mask
