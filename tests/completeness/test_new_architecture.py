"""A new Hugging Face architecture takes one file and one row."""

from __future__ import annotations

from pathlib import Path

from tests.completeness.overlay import overlay

FILE = '''\
"""A toy architecture: GPT-2 with other tensor names and another key for the number of layers."""

from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.architectures import gpt2
from tformer.interop.config import Config
from tformer.interop.mapping import Link
from tformer.recipe.model import Model


def read(config: Config, class_name: str) -> dict[str, Any]:
    section = gpt2.CONFIG.read(config, class_name)
    section["decoder"]["num_layers"] = config.size("depth")
    return section


def write(model: Model, class_name: str) -> dict[str, Any]:
    values = gpt2.CONFIG.write(model, class_name)
    return {**values, "depth": values.pop("n_layer")}


def links(model: Model, class_name: str) -> list[Link]:
    return [
        Link(entry.ours, tuple(name.replace("transformer.", "toy.") for name in entry.theirs), entry.layout, entry.also)
        for entry in gpt2.links(model, class_name)
    ]


TOY = Architecture(
    model_type="toy",
    classes={"ToyForCausalLM": ("lm",)},
    family="gpt",
    read=read,
    write=write,
    links=links,
    prefix="toy.",
    special_ids={"bos": 0, "eos": 0},
)
'''

ROW = (
    "        *(GPT2, OPT, BLOOM, LLAMA, MISTRAL, QWEN2, QWEN3),\n",
    "        *(GPT2, OPT, BLOOM, LLAMA, MISTRAL, QWEN2, QWEN3, TOY),\n",
)
IMPORT = (
    "from tformer.interop.architectures.vit import VIT\n",
    "from tformer.interop.architectures.toy import TOY\nfrom tformer.interop.architectures.vit import VIT\n",
)

SCRIPT = """
positions = ["--set", "model.decoder.positions.kind=learned", "--set", "model.decoder.final_norm=true"]
options = ["--prompt", "the", "--greedy", "--max-new-tokens", "6"]
succeed("train", "--config", "{recipe}", "--data", "{text}", "--out", "run", "--max-steps", "8", *positions)
exported = json.loads(succeed("export", "run", "--as", "toy", "--out", "hf", "--json"))
imported = json.loads(succeed("import", "hf", "--out", "back", "--json"))
texts = [succeed("generate", model, *options) for model in ("run", "hf", "back")]
losses = [json.loads(succeed("evaluate", model, "--data", "{text}", "--json"))["loss"] for model in ("run", "back")]
refused = command("export", "run", "--as", "none-such", "--out", "other")[0]
report({"exported": exported, "imported": imported, "texts": texts, "losses": losses, "refused": refused})
"""


def test_a_new_architecture_takes_one_file_and_one_row(tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    changed = overlay(
        tmp_path,
        files={"tformer/interop/architectures/toy.py": FILE},
        rows={"tformer/interop/architectures/__init__.py": [ROW, IMPORT]},
    )
    found = changed.run(SCRIPT.replace("{recipe}", str(tiny_recipe)).replace("{text}", str(text_file)), cwd=tmp_path)
    assert found["exported"]["class"] == found["imported"]["class"] == "ToyForCausalLM"
    assert found["imported"]["model_type"] == "toy" and found["exported"]["tensors"] == found["imported"]["tensors"]
    assert len(set(found["texts"])) == 1 and found["texts"][0].startswith("the")
    assert found["losses"][0] == found["losses"][1] and found["refused"] == 2
