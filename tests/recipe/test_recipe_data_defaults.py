"""Defaults that follow the data: surveys, the choices, what wins over them, and that a run keeps them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.image_makers import write_idx
from tformer.build import build_model
from tformer.recipe import load_recipe, recipe_to_yaml
from tformer.recipe.data_defaults import (
    CHOICES,
    SMALL_TEXT_MEGABYTES,
    CorpusSurvey,
    DataChoice,
    ImageSurvey,
    PairSurvey,
    Survey,
    TextSurvey,
    choose_by_data,
    words_of,
)
from tformer.recipe.load import Resolved
from tformer.recipe.sizes import CHARACTERS, DEFAULT_MINUTES, TEXT
from tformer.tasks.table import survey_of
from tformer.training.options import TrainOptions
from tformer.training.request import find_training
from tformer.workflows.sweep.grid import check_model

TREC = TextSurvey(5452, 10.2, 18)


def test_a_survey_of_one_example_is_in_the_singular() -> None:
    surveys = (
        TextSurvey(1, 1, 1),
        TextSurvey(2, 9, 9, with_pairs=True),
        PairSurvey(1, 5, 20, 3),
        ImageSurvey(1, 28, 1),
    )
    words = ("1 text of 1 word", "2 pairs of texts of 9 words", "1 pair of 5 words", "1 grey image of 28 pixels")
    assert tuple(map(str, surveys)) == words


def choice(arch: str, survey: Survey) -> DataChoice:
    found = choose_by_data(arch, survey)
    assert found is not None
    return found


def load(arch: str, survey: Survey, **more: object) -> Resolved:
    flags = {"data.train": [{"path": "x"}], **more.pop("flags", {})}  # type: ignore[dict-item]
    return load_recipe(arch=arch, flags=flags, by_data=choice(arch, survey), **more)  # type: ignore[arg-type]


SURVEYS = {
    "bert": st.builds(
        TextSurvey, st.integers(2, 500_000), st.floats(0, 5000), st.integers(0, 10_000), with_pairs=st.booleans()
    ),
    "transformer": st.builds(
        PairSurvey, st.integers(2, 500_000), st.floats(0, 500), st.floats(0, 3000), st.integers(2, 501)
    ),
    "vit": st.builds(ImageSurvey, st.integers(2, 500_000), st.integers(1, 4000), st.sampled_from([1, 3])),
    **{arch: st.builds(CorpusSurvey, st.floats(0, SMALL_TEXT_MEGABYTES)) for arch in ("gpt", "llama")},
}


@pytest.mark.parametrize("arch", SURVEYS)
@settings(max_examples=8)
@given(data=st.data())
def test_every_survey_gives_a_recipe_that_builds(arch: str, data: st.DataObject) -> None:
    check_model(load(arch, data.draw(SURVEYS[arch])).recipe)


def test_families_and_data_of_the_table_are_surveyed() -> None:
    assert {arch for arch, _ in CHOICES} == set(SURVEYS)
    assert choose_by_data("gpt", TREC) is None and choose_by_data("bert", None) is None


@pytest.mark.parametrize("arch", ["bert", "vit", "transformer"])
def test_more_examples_train_for_no_more_epochs(arch: str) -> None:
    makers = {
        "bert": lambda count: TextSurvey(count, 20.0, 40),
        "vit": lambda count: ImageSurvey(count, 32, 3),
        "transformer": lambda count: PairSurvey(count, 12.0, 60.0, 501),
    }
    counts = (100, 5_000, 50_000, 500_000)
    trainings = [load(arch, makers[arch](count)).recipe.training for count in counts]
    epochs = [found.max_epochs or found.max_steps / count for found, count in zip(trainings, counts, strict=True)]
    assert epochs == sorted(epochs, reverse=True) and epochs[0] > epochs[-1]


def test_one_line_names_the_data_the_preset_and_the_values() -> None:
    [line] = [note for note in load("bert", TREC).notes if note.startswith("chosen from")]
    assert line == (
        "chosen from 5,452 texts of 10 words: bert/classify with a convolution over two words, a first layer that "
        "reads neighbours, width 256, averaged weights, 6 epochs, label smoothing 0.1, at most 128 tokens (as shipped: "
        "--preset classify)"
    )


def test_the_origin_of_a_chosen_value_is_the_data() -> None:
    origins = load("bert", TREC).origins
    assert origins["model.d_model"] == origins["training.ema_decay"] == "chosen by the data"
    assert origins["model.encoder.dropout"] == "preset bert/classify"


def test_flags_and_set_win_and_the_line_leaves_them_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("arch: bert\ntraining: {ema_decay: 0.9}\n")
    resolved = load("bert", TREC, flags={"training.max_epochs": 2.0}, sets=["model.d_model=64"], config=file)
    recipe = resolved.recipe
    assert (recipe.training.max_epochs, recipe.model.d_model, recipe.training.ema_decay) == (2.0, 64, 0.9)
    assert recipe.model.encoder is not None and recipe.model.encoder.feedforward.d_ff == 256  # in proportion
    [line] = [note for note in resolved.notes if note.startswith("chosen from")]
    assert "width" not in line and "epochs" not in line and "averaged" not in line and "label smoothing" in line


def test_a_named_preset_is_taken_as_shipped() -> None:
    shipped = load_recipe(arch="bert", preset="classify", flags={"data.train": [{"path": "x"}]})
    assert load("bert", TREC, preset="classify").recipe == shipped.recipe and not shipped.preset_by_default


def test_pairs_of_texts_photographs_and_short_strings_have_presets_of_their_own() -> None:
    assert choice("bert", TextSurvey(4500, 19.0, 30, with_pairs=True)).preset == "pairs"
    assert [choice("vit", ImageSurvey(9000, 32, channels)).preset for channels in (1, 3)] == ["mnist", "cifar"]
    assert choice("transformer", PairSurvey(10_000, 2.0, 20.0, 501)).preset == "dates"
    assert choice("transformer", PairSurvey(29_000, 12.0, 70.0, 501)).preset == "modern"


def test_commands_of_few_words_have_a_token_for_each_and_short_strings_one_for_each_character() -> None:
    commands = load("transformer", PairSurvey(15_892, 17.0, 120.0, 19)).recipe
    assert (commands.preset, commands.tokenizer.train.model) == ("dates", "word")
    forms = load("transformer", PairSurvey(10_000, 2.0, 20.0, 501, ("PST", "V"))).recipe
    assert (forms.preset, forms.tokenizer.train.model, forms.training.max_steps) == ("dates", "char", 2500)
    assert forms.tokenizer.train.added_tokens == ("PST", "V") and forms.optimizer.kind == "normuon"


def test_the_translation_of_29000_pairs_stays_near_the_measured_preset() -> None:
    chosen = load("transformer", PairSurvey(29_000, 12.0, 70.0, 501)).recipe
    shipped = load_recipe(arch="transformer", preset="modern").recipe
    assert chosen.model == shipped.model and chosen.optimizer == shipped.optimizer
    assert chosen.training.max_steps == shipped.training.max_steps
    assert chosen.tokenizer.train.vocab_size == pytest.approx(8_000, rel=0.05)


def test_more_pairs_train_for_more_steps_and_with_less_dropout() -> None:
    few, many = (load("transformer", PairSurvey(count, 12.0, 70.0, 501)).recipe for count in (5_000, 500_000))
    assert few.training.max_steps < 3000 < many.training.max_steps == 12_000
    for recipe, dropout in ((few, 0.3), (many, 0.1)):
        encoder = recipe.model.encoder
        assert encoder is not None and encoder.dropout == dropout


@pytest.mark.parametrize(
    ("preset", "survey"), [("mnist", ImageSurvey(60_000, 28, 1)), ("cifar", ImageSurvey(13_500, 32, 3))]
)
def test_images_like_those_of_a_preset_have_the_presets_values(preset: str, survey: ImageSurvey) -> None:
    chosen, shipped = load("vit", survey).recipe, load_recipe(arch="vit", preset=preset).recipe
    assert (chosen.model, chosen.training) == (shipped.model, shipped.training)


@pytest.mark.parametrize(("side", "patches"), [(28, 7), (32, 8), (64, 8), (96, 6), (224, 14), (4000, 14)])
def test_images_of_any_size_are_some_patches(side: int, patches: int) -> None:
    model = load("vit", ImageSurvey(10_000, side, 3)).recipe.model
    assert model.patches is not None and model.patches.image_size == patches * model.patches.size
    assert load("vit", ImageSurvey(10_000, side, 1)).recipe.model.patches.channels == 1  # type: ignore[union-attr]


def test_large_photographs_have_fewer_residual_convolutions() -> None:
    def depths(channels: int, *sides: int) -> list[int]:
        recipes = [load("vit", ImageSurvey(10_000, side, channels)).recipe for side in sides]
        return [recipe.model.patches.stem_depth for recipe in recipes if recipe.model.patches is not None]

    small, *large = depths(3, 32, 96, 224)
    assert large == [1, 1] and small > 1 and depths(3, 64) == [small]
    assert len(set(depths(1, 28, 224))) == 1


def test_words_are_counted_in_scripts_without_spaces() -> None:
    assert words_of("a few words") == 3 and words_of("") == 0 and words_of("彼は毎朝駅まで歩いて行きます。") == 1
    assert words_of("彼は毎朝駅まで歩いて行きます。" * 10) == 18


# --- surveys of real files --------------------------------------------------------------------------------------------


def rows_file(path: Path, count: int) -> Path:
    path.write_text("label\ttext\n" + "".join(f"{'xy'[n % 2]}\tone two three\n" for n in range(count)))
    return path


def test_labelled_texts_are_counted(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.tsv", 40)
    recipe = load_recipe(arch="bert", flags={"data.train": [{"path": str(data)}]}).recipe
    assert survey_of(recipe) == TextSurvey(40, 3.0, 3)


def test_aligned_files_are_counted_by_their_longer_side(tmp_path: Path) -> None:
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    source.write_text("one two\n" * 30)
    target.write_text("eins zwei drei\n" * 30)
    spec = {"path": str(source), "target_path": str(target)}
    recipe = load_recipe(arch="transformer", flags={"data.train": [spec]}).recipe
    assert survey_of(recipe) == PairSurvey(30, 3.0, 14.0, 5)


def test_the_tags_in_the_last_of_several_columns_are_found(tmp_path: Path) -> None:
    def survey(name: str, features: Callable[[int], str]) -> Survey | None:
        path = tmp_path / name
        rows = (f"geben\tgab\t{features(number)}\n" for number in range(300))
        path.write_text("lemma\tform\tfeatures\n" + "".join(rows))
        spec, columns = {"path": str(path)}, {"source": "lemma,features", "target": "form"}
        return survey_of(load_recipe(arch="transformer", flags={"data.train": [spec], "data.columns": columns}).recipe)

    found = survey("few.tsv", lambda number: f"V;{('PST', 'PRS')[number % 2]};SG")
    assert isinstance(found, PairSurvey) and found.tags == ("PRS", "PST", "SG", "V")
    others: dict[str, Callable[[int], str]] = {
        "many.tsv": lambda number: f"V;{number}",
        "words.tsv": lambda number: ("give", "take")[number % 2],
        "rare.tsv": lambda number: "V;PST" if number % 3 == 0 else "",
        "special.tsv": lambda number: "[MASK];V",
    }
    for name, features in others.items():
        found = survey(name, features)
        assert isinstance(found, PairSurvey) and found.tags == (), name


def test_images_are_measured_as_they_are_stored(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (40, 36), (9, 9, 9)).save(tmp_path / "set" / name / f"{number}.png")
    grey = write_idx(
        tmp_path / "train-images-idx3-ubyte", np.zeros((5, 20, 24), np.uint8), np.arange(5, dtype=np.uint8) % 2
    )
    for path, survey in ((tmp_path / "set", ImageSurvey(6, 36, 3)), (grey, ImageSurvey(5, 20, 1))):
        assert survey_of(load_recipe(arch="vit", flags={"data.train": [{"path": str(path)}]}).recipe) == survey


def test_standard_input_and_unreadable_data_are_not_surveyed(tmp_path: Path) -> None:
    for arch, path in (("bert", "-"), ("gpt", "-"), ("bert", str(tmp_path / "none.tsv"))):
        assert survey_of(load_recipe(arch=arch, flags={"data.train": [{"path": path}]}).recipe) is None


@pytest.mark.parametrize("arch", ["gpt", "llama"])
def test_a_small_text_is_read_by_characters_in_a_size_for_characters(arch: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 1000)
    start = find_training(TrainOptions(arch=arch, data=(str(tmp_path / "text.txt"),)))
    assert any("chosen from 0.01 MB of text" in note and "characters as tokens" in note for note in start.notes)
    assert start.recipe.training.minutes == DEFAULT_MINUTES
    assert {size.tokenizer.train.model for size in start.sizes.recipes} == {"char"}
    assert [size.model.d_model for size in start.sizes.recipes] == [size.width for size in CHARACTERS.sizes]
    pieces = find_training(
        TrainOptions(arch=arch, data=(str(tmp_path / "text.txt"),), sets=("tokenizer.train.model=byte-bpe",))
    )
    assert [size.model.d_model for size in pieces.sizes.recipes] == [size.width for size in TEXT.sizes]


def test_a_large_text_is_read_by_pieces() -> None:
    assert choose_by_data("gpt", CorpusSurvey(0.5)) is not None
    assert choose_by_data("gpt", CorpusSurvey(50.0)) is None
    assert choose_by_data("t5", CorpusSurvey(0.5)) is None  # hides words


def test_a_training_without_data_has_the_preset_and_two_minutes() -> None:
    flags = {"training.minutes": DEFAULT_MINUTES}
    assert find_training(TrainOptions(arch="bert")).recipe == load_recipe(arch="bert", flags=flags).recipe
    steps = find_training(TrainOptions(arch="bert", max_steps=9)).recipe
    assert steps == load_recipe(arch="bert", flags={"training.max_steps": 9}).recipe


def test_a_preset_that_is_named_runs_as_shipped() -> None:
    for arch, preset in (("gpt", "small"), ("roberta", "small"), ("bart", "base"), ("gpt", "tiny")):
        start = find_training(TrainOptions(arch=arch, preset=preset))
        assert start.recipe == load_recipe(arch=arch, preset=preset).recipe and not start.sizes.recipes


@pytest.mark.parametrize("arch", ["gpt", "llama", "roberta", "electra", "t5", "bart"])
def test_a_training_by_time_may_have_every_size_and_only_the_size_differs(arch: str) -> None:
    start = find_training(TrainOptions(arch=arch, minutes=5.0))
    assert [size.model.d_model for size in start.sizes.recipes] == [size.width for size in TEXT.sizes]
    for size in start.sizes.recipes:
        same = ("tokenizer", "data", "objectives", "optimizer", "schedule", "seed")
        assert all(getattr(size, name) == getattr(start.sizes.recipes[0], name) for name in same)
        build_model(size.model, vocab_size=100, target_vocab_size=100, device="meta")


def test_a_classifier_by_time_trains_at_most_as_long_as_its_data_allow(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.tsv", 40)
    by_data = find_training(TrainOptions(arch="bert", data=(str(data),))).recipe.training
    timed = find_training(TrainOptions(arch="bert", data=(str(data),), minutes=9.0)).recipe.training
    assert (by_data.minutes, timed.minutes) == (None, 9.0) and timed.max_epochs == by_data.max_epochs == 6
    longer = find_training(TrainOptions(arch="bert", data=(str(data),), minutes=9.0, max_epochs=20.0)).recipe.training
    assert longer.max_epochs == 20


def test_flags_and_set_win_over_the_sizes_of_a_training_by_time() -> None:
    start = find_training(TrainOptions(arch="gpt", minutes=5.0, lr=0.5, sets=("model.d_model=96",)))
    assert {size.model.d_model for size in start.sizes.recipes} == {96} and start.recipe.optimizer.lr == 0.5
    assert find_training(TrainOptions(arch="gpt", preset="tiny", minutes=5.0)).sizes.recipes == ()


def test_the_choice_is_kept_in_the_run_and_never_made_again(tmp_path: Path) -> None:
    data, out = rows_file(tmp_path / "rows.tsv", 40), tmp_path / "run"
    first = find_training(TrainOptions(arch="bert", data=(str(data),), out=out))
    assert first.recipe.training.max_epochs == 6 and any("chosen from 40 texts" in note for note in first.notes)
    out.mkdir()
    (out / "recipe.yaml").write_text(recipe_to_yaml(first.recipe))
    rows_file(tmp_path / "rows.tsv", 40_000)
    again = find_training(TrainOptions(arch="bert", resume=True, out=out))
    assert again.recipe == first.recipe and not any("chosen from" in note for note in again.notes)


def test_words_are_tokens_only_where_decoding_gives_the_texts_back(tmp_path: Path) -> None:
    """Toy translations whose sentences end in " .": words would be written as "vida."."""
    for name, end in (("plain", ""), ("ended", " .")):
        rows = (f"life {number % 9}{end}\tla vida {number % 9}{end}\n" for number in range(400))
        (tmp_path / f"{name}.tsv").write_text("source\ttarget\n" + "".join(rows))
    kinds = {}
    for name in ("plain", "ended"):
        options = TrainOptions(arch="transformer", data=(str(tmp_path / f"{name}.tsv"),), max_steps=1)
        kinds[name] = find_training(options).recipe.tokenizer.train.model
    assert kinds == {"plain": "word", "ended": "bpe"}
