"""A new entry of a table takes one file and one row: every command works with it.

The entries that a small decoder can train with share one script; `ENTRIES` has the text of each file, its rows, and the
values of `--set` that choose it and that must be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.completeness.overlay import overlay
from tests.conftest import TINY_RECIPE, write_text
from tests.end_to_end.labelled_examples import write_images
from tformer.nn.attention import Mechanism
from tformer.nn.cache import LayerState

Rows = Mapping[str, Sequence[tuple[str, str]]]
FoundOf = Callable[[str], tuple[Path, Any]]


@dataclass(frozen=True)
class Entry:
    """A dummy entry of a table.

    Attributes:
        files: text by path; rows: (old, new) texts by path.
        chosen: values of `--set` that choose it.
        wrong: values of `--set` that a training refuses, each beside `chosen` or alone.
        more: further lines of the script, which add to `found`.
    """

    files: Mapping[str, str]
    rows: Rows
    chosen: tuple[str, ...] = ()
    wrong: tuple[tuple[str, ...], ...] = ()
    more: str = ""


def before(old: str, new: str) -> tuple[str, str]:
    """A row: `new` is inserted before `old`."""
    return old, new + old


SCRIPT = """
def sets(texts):
    return [word for text in texts for word in ("--set", text)]


train = ["train", "--config", "{recipe}", "--data", "{text}", "--json", "--out"]
found = {"trained": json.loads(succeed(*train, "run", "--max-steps", "8", *sets({chosen})))}
succeed("train", "--resume", "--out", "run", "--max-steps", "12")
found["evaluated"] = json.loads(succeed("evaluate", "run", "--json"))
found["inspected"] = json.loads(succeed("inspect", "run", "--json"))
found["shapes"] = succeed("inspect", "run", "--shapes", "--text", "the cat")
found["generated"] = succeed("generate", "run", "--prompt", "the", "--greedy", "--max-new-tokens", "4")
found["codes"] = [command(*train, "other", *sets(texts))[0] for texts in {wrong}]
{more}
report(found)
"""

AVERAGING = '''\
"""Averaging attention: each query takes the mean of the values it sees."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from tformer.nn.attention.mechanism import Mechanism, ProjectionOptions, StateBytes


class AveragingState:
    """Sum of the values so far [B, K, 1, v], and their number."""

    def __init__(self):
        self.total, self.length = 0.0, 0

    def select_rows(self, index, *, capacity=None, spares=None):
        self.total = self.total.index_select(0, index)

    def truncate(self, length):
        raise ValueError("sums cannot be cut")


class AveragingAttention(Mechanism):
    """out_t = mean(v_0 ... v_t), or the mean of all values without causality."""

    one_document = True
    takes_position_scores = False
    drops_weights = False

    def new_state(self, *, batch_size, capacity, device, dtype):
        return AveragingState()

    def state_bytes(self, dtype):
        return StateBytes(0, self.sizes.num_kv_heads * self.sizes.value_dim * dtype.itemsize)

    def forward(self, inputs):
        q, k, v, context = inputs[:4]
        state = inputs.state
        before, past = (0.0, 0) if state is None else (state.total, state.length)
        length = v.shape[2]
        visible = torch.ones(length, length, device=v.device)
        visible = visible.tril() if context.causal else visible
        counts = (visible.sum(-1) + past)[:, None]
        out = (visible.to(v.dtype) @ v + before) / counts.to(v.dtype)
        if state is not None:
            state.total, state.length = before + v.sum(2, keepdim=True), past + length
        weights = None
        if inputs.need_weights:
            weights = (visible / counts).expand(q.shape[0], q.shape[1], -1, -1)
        return out.repeat_interleave(q.shape[1] // v.shape[1], dim=1).to(q.dtype), weights


@dataclass(frozen=True)
class AveragingOptions(ProjectionOptions):
    """Options of averaging attention."""

    mechanism: ClassVar[type[Mechanism]] = AveragingAttention

    kind: Literal["averaging"] = "averaging"
'''

ABSOLUTE = '''\
"""Absolute value as an activation."""

from torch import Tensor


def absolute(x: Tensor) -> Tensor:
    """|x|."""
    return x.abs()
'''

MAX_NORM = '''\
"""Max norm: x · g / max |x|."""

from torch import Tensor

from tformer.nn.layer_norm import Norm


class MaxNorm(Norm):
    """Divides each vector by its largest magnitude."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        out = x / x.abs().amax(-1, keepdim=True).clamp(min=self.eps)
        return out if self.weight is None else out * self.weight.to(x.dtype)
'''

SLOPE = '''\
"""A learned slope per head: bias = -slope · distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tformer.nn.positions.base import Positions, PositionSizes


class SlopePositions(Positions):
    kind = "slope"
    about = "Each head subtracts a learned slope times the distance from its scores."
    per_head = True

    def __init__(self, *, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        distance = (k_pos_BS.unsqueeze(1) - q_pos_BT.unsqueeze(2)).abs()
        return distance.unsqueeze(1) * -self.weight.view(1, -1, 1, 1)


@dataclass(frozen=True)
class SlopeOptions:
    module: ClassVar = SlopePositions
    kind: Literal["slope"] = "slope"

    def build(self, sizes: PositionSizes) -> Positions:
        return SlopePositions(num_heads=sizes.num_heads)
'''

SGD = """\
def _sgd(groups: list[dict[str, Any]], settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=settings.momentum)


def _sgd_state(parameter: nn.Parameter, settings: Settings) -> dict[str, Tensor]:
    return {"momentum_buffer": torch.zeros_like(parameter)}


"""
OPTIMIZERS = "OPTIMIZERS: dict[str, OptimizerKind] = {\n"

COUNTED_TEXT = '''\
"""Running text, of which validation and evaluation also report the number of texts."""

from __future__ import annotations

from typing import Any

from tformer.tasks.text import Text


class CountedText(Text):
    """Running text with the number of texts among the metrics."""

    description = "a model of counted text"
    options = frozenset({"stride"})

    def validation(self, recipe: Any, corpora: Any, tokenizer: Any) -> Any:
        validate = super().validation(recipe, corpora, tokenizer)
        return lambda *arguments: validate(*arguments) | {"texts": len(corpora)}

    def evaluate(self, *arguments: Any) -> dict[str, Any]:
        return super().evaluate(*arguments) | {"texts": 1}
'''

ENTRIES = {
    "attention": Entry(
        files={"tformer/nn/attention/averaging.py": AVERAGING},
        rows={
            "tformer/nn/attention/__init__.py": [
                before("| AdditiveOptions", "| AveragingOptions "),
                before(
                    "from tformer.nn.attention.bigbird import",
                    "from tformer.nn.attention.averaging import AveragingOptions\n",
                ),
            ]
        },
        chosen=("model.decoder.attention_dropout=0", "model.decoder.attention.kind=averaging"),
        wrong=(("model.decoder.attention.kind=none-such",),),
        more='found["seen"] = succeed("viz-attention", "run", "--text", "the cat", "--format", "json")',
    ),
    "activation": Entry(
        files={"tformer/nn/absolute.py": ABSOLUTE},
        rows={
            "tformer/nn/feedforward.py": [
                before('    "relu2": relu2,\n', '    "absolute": absolute,\n'),
                before("from tformer.nn.linear import", "from tformer.nn.absolute import absolute\n"),
            ]
        },
        chosen=("model.decoder.feedforward.activation=absolute",),
        wrong=(("model.decoder.feedforward.activation=none-such",),),
    ),
    "norm": Entry(
        files={"tformer/nn/max_norm.py": MAX_NORM},
        rows={
            "tformer/nn/norm.py": [
                before('    "batchnorm": BatchNorm,\n', '    "maxnorm": MaxNorm,\n'),
                before("from tformer.nn.options import", "from tformer.nn.max_norm import MaxNorm\n"),
            ]
        },
        chosen=("model.decoder.norm.kind=maxnorm",),
        wrong=(
            ("model.decoder.norm.kind=maxnorm", "model.decoder.norm.groups=2"),
            ("model.decoder.norm.kind=none-such",),
        ),
    ),
    "positions": Entry(
        files={"tformer/nn/positions/slope.py": SLOPE},
        rows={
            "tformer/nn/positions/__init__.py": [
                before("    | Patch2dOptions\n", "    | SlopeOptions\n"),
                before(
                    "from tformer.nn.positions.shaw import", "from tformer.nn.positions.slope import SlopeOptions\n"
                ),
            ]
        },
        chosen=("model.decoder.positions.kind=slope",),
        wrong=(
            (
                "model.decoder.positions.kind=slope",
                "model.decoder.layers.0.num_heads=1",
                "model.decoder.head_dim=8",
            ),
        ),
        more="""
found["beams"] = succeed("generate", "run", "--prompt", "the", "--beam-size", "2", "--max-new-tokens", "4")
succeed("viz-attention", "run", "--text", "the cat", "-o", "attention.json", "--format", "json")
succeed("viz-pe", "--run", "run", "-o", "slope.json", "--format", "json")
succeed("viz-pe", "-o", "page.html")
succeed("viz-pe", "--run", "run", "-o", "run.html")
""",
    ),
    "optimizer": Entry(
        files={},
        rows={
            "tformer/optim/optimizers.py": [
                (OPTIMIZERS, f'{SGD}{OPTIMIZERS}    "sgd": OptimizerKind(_sgd, _sgd_state, moments=1),\n')
            ],
        },
        chosen=("optimizer.kind=sgd", "optimizer.lr=0.05"),
        wrong=(("optimizer.kind=none-such",),),
        more="""
succeed(*train, "other", *sets(["optimizer.kind=sgd"]), "--dry-run", "--devices", "2")
""",
    ),
    "task": Entry(
        files={"tformer/tasks/counted_text.py": COUNTED_TEXT},
        rows={
            "tformer/tasks/table.py": [
                before('    "text": Text(),\n', '    "counted_text": CountedText(),\n'),
                before("from tformer.tasks.base import Task\n", "from tformer.tasks.counted_text import CountedText\n"),
            ],
            "tformer/objectives/causal_lm.py": [('    data = "text"\n', '    data = "counted_text"\n')],
        },
        more="""
found["evaluated"] = json.loads(succeed("evaluate", "run", "--stride", "4", "--json"))
found["pruned"] = json.loads(succeed("prune", "run", "--drop-heads", "0.5", "--out", "pruned", "--json"))
found["codes"] += [command("evaluate", "run", "--text-column", "0")[0]]
""",
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_new_entry_takes_one_file_and_one_row(name: str, found_of: FoundOf) -> None:
    folder, found = found_of(name)
    inspected = found["inspected"]
    assert 0 < found["evaluated"]["loss"] < 6 and inspected["flops"]["forward_per_token"] > 0
    assert inspected["memory"]["activations_bytes"] > 0 and inspected["memory"]["optimizer_bytes"] > 0
    assert "norm" in found["shapes"] and found["generated"].startswith("the")
    assert found["codes"] and set(found["codes"]) == {2}
    if name == "attention":
        assert inspected["cache"]["bytes_per_token"] == 0 and inspected["cache"]["bytes_constant"] > 0
        assert "averaging" in found["seen"]
    if name == "positions":
        assert "bias" in found["shapes"] and found["beams"].startswith("the")
        assert "Each head subtracts a learned slope" in (folder / "page.html").read_text(encoding="utf-8")
        assert '"slope"' in (folder / "run.html").read_text(encoding="utf-8")
        assert (folder / "slope.json").stat().st_size > 1000
    if name == "task":
        assert found["trained"]["valid"]["texts"] == found["evaluated"]["texts"] == 1 and "before" in found["pruned"]


def test_a_kind_with_its_own_decoding_state_must_state_its_size() -> None:
    with pytest.raises(AssertionError, match="Silent needs state_bytes"):

        class Silent(Mechanism):
            def new_state(self, **_: object) -> LayerState:
                raise NotImplementedError


# --- an architecture of Hugging Face ----------------------------------------------------------------------------------

TOY_FILE = '''\
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

TOY_ROW = (
    "        *(GPT2, OPT, BLOOM, LLAMA, MISTRAL, QWEN2, QWEN3),\n",
    "        *(GPT2, OPT, BLOOM, LLAMA, MISTRAL, QWEN2, QWEN3, TOY),\n",
)
TOY_IMPORT = before(
    "from tformer.interop.architectures.vit import VIT\n", "from tformer.interop.architectures.toy import TOY\n"
)

TOY_SCRIPT = """
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


def test_a_new_architecture_takes_one_file_and_one_row(found_of: FoundOf) -> None:
    _, found = found_of("architecture")
    assert found["exported"]["class"] == found["imported"]["class"] == "ToyForCausalLM"
    assert found["imported"]["model_type"] == "toy" and found["exported"]["tensors"] == found["imported"]["tensors"]
    assert len(set(found["texts"])) == 1 and found["texts"][0].startswith("the")
    assert found["losses"][0] == found["losses"][1] and found["refused"] == 2


# --- an objective -----------------------------------------------------------------------------------------------------

WORD_ORDER = '''\
"""Word order: neighbouring tokens are swapped, and the original tokens of the swapped ones are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from tformer.data.batching.batch import Batch
from tformer.nn.heads import MaskedLmHeadOptions
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.options import require_probability
from tformer.objectives.base import Objective, TokenObjective
from tformer.objectives.collate import pad_samples


class WordOrder(TokenObjective):
    """The objective; an encoder learns it with the head of masked language modelling."""

    data = "masked_text"
    head = MaskedLmHeadOptions()
    parts = ("encoder",)
    without = ("decoder",)
    unused_keys = ("data.columns.label",)

    @staticmethod
    def predicted_share(head: str, options: Any) -> float:
        """The share of swapped tokens."""
        return options.share

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """Swaps tokens 2 i and 2 i + 1 in a share of the places i."""
        batch = pad_samples(samples, self.context, rng=rng)
        ids = batch.input_ids.numpy()
        even = ids.shape[1] // 2 * 2
        swapped = np.repeat(rng.random((len(ids), even // 2)) < self.options.share, 2, axis=1)
        other = ids[:, :even].reshape(len(ids), -1, 2)[:, :, ::-1].reshape(len(ids), even)
        inputs, labels = ids.copy(), np.full_like(ids, IGNORED_LABEL)
        inputs[:, :even][swapped], labels[:, :even][swapped] = other[swapped], ids[:, :even][swapped]
        labels[:, 0] = ids[:, 0]  # so that every batch has a label
        return replace(batch, input_ids=torch.from_numpy(inputs), labels=torch.from_numpy(labels))


@dataclass(frozen=True)
class WordOrderOptions:
    """Word order."""

    kind: Literal["word_order"] = "word_order"
    share: float = 0.5
    weight: float = 1.0
    objective: ClassVar[type[Objective]] = WordOrder

    def __post_init__(self) -> None:
        require_probability(share=self.share)
'''
WORD_ORDER_ROW = before("    | DenoisingOptions\n", "    | WordOrderOptions\n")
WORD_ORDER_IMPORT = before(
    "from tformer.objectives.span_corruption import SpanCorruptionOptions\n",
    "from tformer.objectives.word_order import WordOrderOptions\n",
)
WORD_ORDER_SCRIPT = """
SMALL = []
for setting in ("model.d_model=32", "model.encoder.num_layers=1", "model.encoder.num_heads=2", "data.seq_len=32",
                "model.encoder.feedforward.d_ff=48", "tokenizer.train.vocab_size=300", "training.compile=off"):
    SMALL += ["--set", setting]
TRAIN = ["train", "--data", "text.txt", "--batch-size", 8, "--json"]
START = [*TRAIN, "--arch", "bert", "--preset", "pretrain", "--objective", "word_order", "--max-steps", 6, *SMALL]

code, shown = command("config", "show", "--arch", "bert", "--preset", "pretrain", "--set",
                      "objectives=[{kind: word_order, share: 2}]")
assert code == 2, shown
succeed(*START, "--out", "run", "--set", "objectives.0.share=0.25")
succeed(*TRAIN, "--resume", "--out", "run", "--max-steps", 9)
succeed(*START, "--teacher", "run", "--out", "student", "--set", "teacher.hidden=0.5")
report({
    "evaluated": json.loads(succeed("evaluate", "run", "--data", "text.txt", "--json")),
    "held_out": json.loads(succeed("evaluate", "run", "--json")),
    "inspected": json.loads(succeed("inspect", "run", "--json")),
    "written": json.loads(succeed("generate", "run", "--prompt", "the quick [MASK] fox", "--json")),
    "help": succeed("train", "--help"),
})
"""


def metrics(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


def test_one_file_one_row_and_one_name_make_an_objective(found_of: FoundOf) -> None:
    folder, found = found_of("objective")
    recipe = (folder / "run" / "recipe.yaml").read_text()
    assert "kind: word_order" in recipe and "share: 0.25" in recipe
    assert '"step": 9' in metrics(folder / "run")[-1]
    for name in ("evaluated", "held_out"):
        assert {"loss", "accuracy", "perplexity"} <= found[name].keys()
    assert "distillation" in (folder / "student" / "metrics.jsonl").read_text()
    assert found["inspected"]["parameters"] and len(found["written"]["masks"]) == 1
    assert " word_order" in found["help"]


# --- images: a stem, a pooling and a change of training images --------------------------------------------------------

STEMS = "STEMS: dict[str, type[PatchEmbedding]] = {\n"
STEM = '''\
class MeanPatches(PatchEmbedding):
    """The mean of each square, projected to d_model."""

    parts = ("weight",)

    def build_stem(self) -> None:
        self.weight = nn.Parameter(torch.empty(self.d_model, self.channels))

    def patch_vectors(self, pixels_BCYX: Tensor, taps: TapSink | None) -> Tensor:
        means_BNC = tap(taps, "means", F.avg_pool2d(pixels_BCYX, self.size).flatten(2).transpose(1, 2))
        return F.linear(means_BNC, self.weight.to(means_BNC.dtype))

    def stem_taps(self) -> list[Tap]:
        return [Tap("means", "B N C", "the mean of each square")]

    def matrices(self) -> Iterator[tuple[Tensor, int]]:
        yield self.weight, self.side**2

    def reset_parameters(self, draw: Callable[[Tensor], None]) -> None:
        draw(self.weight)


'''

POOLINGS = "POOLINGS: dict[str, PoolingKind] = {\n"
MIDDLE = """\
def pool_middle(hidden_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
    return (hidden_BTD.amax(dim=1) + hidden_BTD.amin(dim=1)) / 2


"""
MIDDLE_ROW = '    "middle": PoolingKind("the middle of the largest and the smallest value", pool_middle),\n'

CHANGES = "AUGMENTATIONS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {\n"
CHANGE = """\
def random_inversion(pixels_BCYX: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where((rng.random(len(pixels_BCYX)) < 0.1)[:, None, None, None], 255 - pixels_BCYX, pixels_BCYX)


"""

IMAGES_RECIPE = """\
arch: vit
model:
  d_model: 16
  patches: {image_size: 8, size: 4, channels: 1, stem: means}
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}}
  heads: [{kind: classifier, pooler: false, pooling: middle}]
objectives: [{kind: classification}]
data: {augment: [invert]}
optimizer: {lr: 0.01}
training: {batch_size: 8, eval_every: 10, save_every: 10, log_every: 10, precision: fp32, device: cpu, threads: 1}
"""

IMAGES_SCRIPT = """
train = ["train", "--config", "{recipe}", "--data", "{images}", "--json", "--out"]
succeed(*train, "run", "--max-steps", "20")
succeed("train", "--resume", "--out", "run", "--max-steps", "30")
evaluated = json.loads(succeed("evaluate", "run", "--views", "2", "--json"))
inspected = json.loads(succeed("inspect", "run", "--json"))
shapes = succeed("inspect", "run", "--shapes")
label = succeed("classify", "run", "--image", "{images}/dark/0.png")
unknown = [command(*train, "other", "--set", text)[0]
           for text in ("model.patches.stem=none-such", "data.augment=[none-such]", "model.heads.0.pooling=none-such")]
report({"accuracy": evaluated["accuracy"], "flops": inspected["flops"]["forward_per_token"], "shapes": shapes,
        "label": label, "unknown": unknown})
"""


def test_a_new_stem_pooling_and_change_of_images_take_one_row_each(found_of: FoundOf) -> None:
    _, found = found_of("images")
    assert found["accuracy"] > 0.9 and found["flops"] > 0 and "dark" in found["label"]
    assert "the mean of each square" in found["shapes"] and "means" in found["shapes"]
    assert "the middle of the largest" in found["shapes"] and found["unknown"] == [2, 2, 2]


# --- all of them, in one copy of the package and one process ----------------------------------------------------------

OTHERS = {
    "architecture": Entry(
        files={"tformer/interop/architectures/toy.py": TOY_FILE},
        rows={"tformer/interop/architectures/__init__.py": [TOY_ROW, TOY_IMPORT]},
    ),
    "objective": Entry(
        files={"tformer/objectives/word_order.py": WORD_ORDER},
        rows={
            "tformer/objectives/__init__.py": [WORD_ORDER_IMPORT, WORD_ORDER_ROW],
            "tformer/training/options.py": [before('    *("contrastive", ', '    "word_order",\n')],
        },
    ),
    "images": Entry(
        files={},
        rows={
            "tformer/nn/patches.py": [(STEMS, f'{STEM}{STEMS}    "means": MeanPatches,\n')],
            "tformer/nn/classification_heads.py": [(POOLINGS, MIDDLE + POOLINGS + MIDDLE_ROW)],
            "tformer/data/sources/augmentation.py": [(CHANGES, f'{CHANGE}{CHANGES}    "invert": random_inversion,\n')],
        },
    ),
}
SCRIPTS = {"architecture": TOY_SCRIPT, "objective": WORD_ORDER_SCRIPT, "images": IMAGES_SCRIPT}


@pytest.fixture(scope="module")
def found_of(tmp_path_factory: pytest.TempPathFactory) -> FoundOf:
    """`found_of(name)`: the folder of an entry, and what its script reported."""
    home, entries = tmp_path_factory.mktemp("entries"), ENTRIES | OTHERS
    scripts = {}
    for name, entry in entries.items():
        folder = home / name
        folder.mkdir()
        (folder / "recipe.yaml").write_text(IMAGES_RECIPE if name == "images" else TINY_RECIPE)
        if name == "objective":
            words = "the quick brown fox jumps over the lazy dog and sees one more red hen in the old yard "
            (folder / "text.txt").write_text("\n\n".join(words * 6 for _ in range(30)))
        else:
            write_text(folder / "text.txt")
        values: dict[str, object] = {"chosen": entry.chosen, "wrong": entry.wrong, "more": entry.more}
        values |= {"recipe": "recipe.yaml", "text": "text.txt", "images": "images"}
        scripts[name] = SCRIPTS.get(name, SCRIPT)
        for key, value in values.items():
            scripts[name] = scripts[name].replace(f"{{{key}}}", str(value))
    write_images(home / "images" / "images", 20)
    files = {path: text for entry in entries.values() for path, text in entry.files.items()}
    rows = {path: changes for entry in entries.values() for path, changes in entry.rows.items()}
    assert len(rows) == sum(len(entry.rows) for entry in entries.values()), "two entries change one file"
    outcomes = overlay(home, files=files, rows=rows).run_each(scripts, cwd=home)

    def found(name: str) -> tuple[Path, Any]:
        assert "failed" not in outcomes[name], outcomes[name]["failed"]
        return home / name, outcomes[name]["found"]

    return found
