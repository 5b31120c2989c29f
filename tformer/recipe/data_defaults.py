"""Defaults that follow the data: what `tformer train --arch NAME --data X` trains where no preset is named.

A survey counts the examples and measures their length. The table `CHOICES` has a function for each family and kind of
data, which chooses the shipped preset to start from and the values that the data changes, each beside its reason. The
values of a file, of flags and of `--set` win, and a preset that the user names is taken as shipped. The run's recipe
holds the result, so a resumed run chooses nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tformer.recipe.overrides import Origin
from tformer.support.formatting import plural
from tformer.tokenizer.options import TokenizerModel

CHOSEN = Origin("chosen by the data", "")
MAX_SURVEYED = 500_000
"""Examples that a survey reads; all rules are the same for more."""


CHARACTERS_OF_A_WORD = 8
"""Characters that count as a word in a script without spaces."""


def words_of(text: str) -> int:
    """About how many words a text has, in any script."""
    return max(len(text.split()), len(text) // CHARACTERS_OF_A_WORD)


@dataclass(frozen=True)
class TextSurvey:
    """Number of labelled texts and their lengths in words; the length of a pair is the sum of both texts.

    long_words: 95 % of the texts have no more words.
    """

    examples: int
    mean_words: float
    long_words: int
    with_pairs: bool = False

    @property
    def kind(self) -> str:
        return "pairs of texts" if self.with_pairs else "texts"

    def __str__(self) -> str:
        texts = f"{plural(self.examples, 'pair')} of texts" if self.with_pairs else plural(self.examples, "text")
        return f"{texts} of {plural(round(self.mean_words), 'word')}"


@dataclass(frozen=True)
class PairSurvey:
    """Number of sources with their targets, and the mean words and characters of the longer side.

    distinct_words: of both sides, counted up to one more than `FORMAL_WORDS`.
    word_tokens: the first of `WORD_TOKENS` that gives the texts back.
    tags: the distinct tags in the last source column where there are several columns, as in V;PAST;3;SG.
    """

    examples: int
    mean_words: float
    mean_characters: float
    distinct_words: int
    tags: tuple[str, ...] = ()
    word_tokens: TokenizerModel = "word"
    kind = "pairs"

    def __str__(self) -> str:
        return f"{plural(self.examples, 'pair')} of {plural(round(self.mean_words), 'word')}"


@dataclass(frozen=True)
class TagSurvey:
    """Number of sentences with tags."""

    examples: int
    kind = "tagged sentences"

    def __str__(self) -> str:
        return plural(self.examples, "tagged sentence")


@dataclass(frozen=True)
class ImageSurvey:
    """Number of labelled images, pixels of the shorter side, channels (1: grey, 3: colours)."""

    examples: int
    side: int
    channels: int
    kind = "images"

    def __str__(self) -> str:
        colour = "grey" if self.channels == 1 else "colour"
        return f"{plural(self.examples, f'{colour} image')} of {self.side} pixels"


@dataclass(frozen=True)
class CorpusSurvey:
    """Megabytes of running text."""

    megabytes: float
    kind = "running text"

    def __str__(self) -> str:
        return f"{self.megabytes:.2g} MB of text"


Survey = TextSurvey | PairSurvey | TagSurvey | ImageSurvey | CorpusSurvey


@dataclass(frozen=True)
class DataChoice:
    """The preset that the data chooses, and by dotted path the values that it changes, with the phrase of the note."""

    survey: Survey | None
    preset: str
    values: dict[str, tuple[Any, str]]

    def note(self, arch: str, kept: set[str]) -> str:
        """One line: the survey, the preset and the values that no file or flag replaced (`kept`)."""
        words = ", ".join(dict.fromkeys(word for path, (_, word) in self.values.items() if path in kept and word))
        with_words = f" with {words}" if words else ""
        if self.survey is None:
            return f"chosen for the time: {arch}/{self.preset}{with_words} (as shipped: --preset {self.preset})"
        return f"chosen from {self.survey}: {arch}/{self.preset}{with_words} (as shipped: --preset {self.preset})"


def choose_by_data(arch: str, survey: Survey | None) -> DataChoice | None:
    """The choice for a family and its data; None where the family has none for such data."""
    choose = None if survey is None else CHOICES.get((arch, survey.kind))
    return None if choose is None else choose(survey)


def _between(least: float, value: float, most: float) -> int:
    return round(min(most, max(least, value)))


SMALL_CORPUS_WORDS = 1_000_000
"""Words of all texts up to which a model of width 256 trains in minutes on one core."""


def _texts(survey: TextSurvey) -> DataChoice:
    """Classifiers of single texts."""
    is_small = survey.examples * survey.mean_words <= SMALL_CORPUS_WORDS
    width = 256 if is_small else 128
    epochs = _between(2, 30_000 / survey.examples, 6)
    wanted = 64 * math.ceil(1.15 * survey.long_words / 64)
    seq_len = _between(128, wanted, 384)
    neighbours = {"attention": {"kind": "sliding_window", "window": 2}}
    return DataChoice(
        survey,
        "classify",
        {
            # Neighbouring words tell more than words alone, and with few texts full attention does not learn to read
            # neighbours. On TREC a first layer that reads neighbours gains half a point; a convolution over two words
            # lowers the loss from 0.47 to 0.45.
            "model.embedding.convolution": (2, "a convolution over two words"),
            "model.encoder.layers.0": (neighbours, "a first layer that reads neighbours"),
            # With few texts a wider model is more accurate; with many texts a narrow one makes more passes in the same
            # time.
            "model.d_model": (width, f"width {width}"),
            "model.encoder.num_heads": (4, ""),
            "model.encoder.feedforward.d_ff": (4 * width, ""),
            # An average of the weights smooths single steps on noisy labels, so that more epochs overfit less.
            "training.ema_decay": (0.98, "averaged weights"),
            "training.max_epochs": (epochs, plural(epochs, "epoch")),
            "objectives.0.label_smoothing": (0.1, "label smoothing 0.1"),
            "data.seq_len": (seq_len, f"at most {seq_len} tokens"),
            # The beginning and the end of a review or letter tell most of its class.
            "data.truncation": ("head_tail" if wanted > seq_len else "head", ""),
        },
    )


def _text_pairs(survey: TextSurvey) -> DataChoice:
    """Classifiers of two texts: attention between them is slow to learn, so few pairs need many epochs.

    Long pairs are memorized sooner: 3,576 of 38 words (MRPC) overfit after 4 epochs, 4,500 of 19 (SICK) improve until
    epoch 7.
    """
    epochs = _between(3, 600_000 / max(1.0, survey.examples * survey.mean_words), 7)
    seq_len = _between(128, 64 * math.ceil(1.6 * survey.long_words / 64), 512)
    return DataChoice(
        survey,
        "pairs",
        {
            "training.max_epochs": (epochs, plural(epochs, "epoch")),
            "data.seq_len": (seq_len, f"at most {seq_len} tokens"),
        },
    )


SENTENCES_SEEN = 30_000
"""Sentences of all epochs together, from which a small model of words and their tags learns."""


def _tags(survey: TagSurvey) -> DataChoice:
    """Models that label words: few sentences need many epochs."""
    epochs = _between(3, SENTENCES_SEEN / max(1, survey.examples), 30)
    return DataChoice(survey, "tags", {"training.max_epochs": (epochs, plural(epochs, "epoch"))})


FORMAL_WORDS = 500
"""Maximum number of distinct words of a language of commands, digits or symbols."""
WORD_TOKENS: tuple[TokenizerModel, ...] = ("word", "bpe", "byte-bpe")
"""Tokenizers for the words of such a language: words lose the space in "3 .", bpe line ends; bytes give all back."""
FORMAL_USES = 20
"""Minimum number of pairs for each distinct word of such a language."""

SHORT_CHARACTERS = 40
SHORT_WORDS = 4
"""Maximum mean number of characters and words of the longer side where pairs are words or dates, not sentences."""


TRANSLATED_WORDS = 29_000 * 12
"""Words in Multi30k, 29,000 pairs times 12 words (mean of the longer side); `transformer/modern` was measured on it."""


def _pairs(survey: PairSurvey) -> DataChoice:
    """Encoder-decoders for sources and targets."""
    if survey.distinct_words <= min(FORMAL_WORDS, survey.examples / FORMAL_USES):
        return _formal_pairs(survey)
    if survey.mean_characters <= SHORT_CHARACTERS and survey.mean_words <= SHORT_WORDS:
        return _short_pairs(survey)
    # A piece must occur often enough to be learned: 3.6 pairs for each, as in the preset (8,000 pieces, 29,000 pairs).
    # More text needs less dropout and fewer epochs: the number of steps grows with the square root of the number of
    # words. Only 29,000 pairs were measured.
    vocabulary = _between(2000, survey.examples / 3.6, 16_000)
    dropout = 0.3 if survey.examples < 200_000 else 0.1
    steps = _between(1000, 3000 * (survey.examples * survey.mean_words / TRANSLATED_WORDS) ** 0.5, 12_000)
    return DataChoice(
        survey,
        "modern",
        {
            "tokenizer.train.vocab_size": (vocabulary, f"{vocabulary:,} pieces"),
            "model.embedding.dropout": (dropout, ""),
            "model.encoder.dropout": (dropout, f"dropout {dropout}"),
            "model.decoder.dropout": (dropout, ""),
            "training.max_steps": (steps, f"{steps:,} steps"),
        },
    )


def _formal_pairs(survey: PairSurvey) -> DataChoice:
    """Commands and the like: every word is a token, and the data has no noise, so there is no dropout."""
    steps = _between(600, 18 * survey.examples / 64, 6000)
    return DataChoice(
        survey,
        "dates",
        {
            "tokenizer.train.model": (survey.word_tokens, f"{survey.distinct_words:,} words as tokens"),
            "tokenizer.train.min_frequency": (1, ""),
            "training.max_steps": (steps, f"{steps:,} steps"),
            "training.eval_every": (-(-steps // 4), ""),
            "training.save_every": (-(-steps // 4), ""),
        },
    )


MOST_TAGS = 200
"""Maximum number of distinct tags in a column of tags."""

TAGS = re.compile(r"[\w.:=+/-]+([;|,][\w.:=+/-]+)+", re.ASCII)


def tags_of(text: str) -> list[str]:
    """The tags at the end of a source, after the last space: V;PAST;3;SG or Case=Nom|Number=Sing; [] without any."""
    words = text.split()[-1:]
    return [tag for word in words if TAGS.fullmatch(word) for tag in re.split("[;|,]", word)]


def _short_pairs(survey: PairSurvey) -> DataChoice:
    """Inflections, spellings: the change is inside words, so tokens are characters. 10,000 pairs train for 32 epochs.

    Large batches, strong dropout and more width than the dates need (arXiv 2005.10213; measured: configs/README.md).
    """
    steps = _between(800, 32 * survey.examples / 128, 6000)
    tags = plural(len(survey.tags), "tag")
    return DataChoice(
        survey,
        "dates",
        {
            "tokenizer.train.added_tokens": (list(survey.tags), f"{tags} as tokens" if survey.tags else ""),
            "model.d_model": (256, "characters, width 256"),
            "model.encoder.feedforward.d_ff": (1024, ""),
            "model.decoder.feedforward.d_ff": (1024, ""),
            "model.encoder.num_heads": (8, ""),
            "model.decoder.num_heads": (8, ""),
            "model.encoder.dropout": (0.3, "dropout 0.3"),
            "model.decoder.dropout": (0.3, ""),
            "model.embedding.dropout": (0.1, ""),
            "objectives.0.label_smoothing": (0.1, "label smoothing 0.1"),
            "optimizer.kind": ("normuon", "NorMuon"),
            "training.max_steps": (steps, f"{steps:,} steps"),
            "training.batch_size": (128, "batches of 128"),
            "training.eval_every": (-(-steps // 4), ""),
            "training.save_every": (-(-steps // 4), ""),
        },
    )


SMALL_TEXT_MEGABYTES = 2.0
"""Maximum of running text for which characters are better tokens than pieces."""


def _running_text(survey: CorpusSurvey) -> DataChoice | None:
    """Values for language models of little text: characters, since each piece would occur too rarely to be learned."""
    if survey.megabytes > SMALL_TEXT_MEGABYTES:
        return None
    values = {
        "tokenizer.train.model": ("char", "characters as tokens"),
        "tokenizer.train.template": ("none", ""),
        "optimizer.kind": ("normuon", "NorMuon"),
        "optimizer.adam_lr": (0.003, ""),
    }
    return DataChoice(survey, "tiny", values)


IMAGES_SEEN = {"mnist": 480_000, "cifar": 405_000}
"""Images of all epochs together, as the presets have it: 8 epochs of 60,000 and 30 of 13,500."""


def _images(survey: ImageSurvey) -> DataChoice:
    """Vision Transformers: digits and other grey images, or photographs."""
    preset = "mnist" if survey.channels == 1 else "cifar"
    side = _between(28, survey.side, 224)
    # About 8 x 8 patches, more only of large images: the time of a step grows with their number. A power of two, as
    # every convolution of a stem halves the image.
    size = 4 if side <= 40 else 8 if side <= 80 else 16
    side = size * round(side / size)
    epochs = _between(3, IMAGES_SEEN[preset] / survey.examples, 40)
    values: dict[str, tuple[Any, str]] = {}
    if preset == "cifar" and size > 8:
        # The time of convolutions grows with the pixels: at 224 pixels those of the preset would take most of a step.
        values["model.patches.stem_depth"] = (1, "one residual convolution at each size")
    return DataChoice(
        survey,
        preset,
        {
            "model.patches.image_size": (side, f"{side} pixels a side"),
            "model.patches.size": (size, f"patches of {size}"),
            "training.max_epochs": (epochs, plural(epochs, "epoch")),
            **values,
        },
    )


CHOICES: dict[tuple[str, str], Callable[[Any], DataChoice | None]] = {
    ("gpt", "running text"): _running_text,
    ("llama", "running text"): _running_text,
    ("bert", "texts"): _texts,
    ("bert", "pairs of texts"): _text_pairs,
    ("bert", "tagged sentences"): _tags,
    ("transformer", "pairs"): _pairs,
    ("vit", "images"): _images,
}
"""The choice for each family and kind of data."""
