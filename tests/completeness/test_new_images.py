"""A new stem, a new pooling and a new change of training images take one row each, beside a class or function."""

from __future__ import annotations

from pathlib import Path

from tests.completeness.overlay import overlay
from tests.end_to_end.labelled_examples import write_images

TABLE = "STEMS: dict[str, type[PatchEmbedding]] = {\n"
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

RECIPE = """\
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

SCRIPT = """
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


def test_a_new_stem_pooling_and_change_of_images_take_one_row_each(tmp_path: Path) -> None:
    changed = overlay(
        tmp_path,
        files={},
        rows={
            "tformer/nn/patches.py": [(TABLE, f'{STEM}{TABLE}    "means": MeanPatches,\n')],
            "tformer/nn/classification_heads.py": [(POOLINGS, MIDDLE + POOLINGS + MIDDLE_ROW)],
            "tformer/data/sources/augmentation.py": [(CHANGES, f'{CHANGE}{CHANGES}    "invert": random_inversion,\n')],
        },
    )
    images, recipe = write_images(tmp_path / "images", 20), tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    found = changed.run(SCRIPT.replace("{recipe}", str(recipe)).replace("{images}", str(images)), cwd=tmp_path)
    assert found["accuracy"] > 0.9 and found["flops"] > 0 and "dark" in found["label"]
    assert "the mean of each square" in found["shapes"] and "means" in found["shapes"]
    assert "the middle of the largest" in found["shapes"] and found["unknown"] == [2, 2, 2]
