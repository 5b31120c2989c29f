"""What the model reads: templates, pairs, continuations, translations, images, and what it cannot take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.viz.attention_models import DECODER, ENCODER, IMAGES, SEQ2SEQ, TEXT, load_of, tokenizer
from tformer.decoding.translate_loaded import translator_of
from tformer.errors import InputError
from tformer.viz.attention.reading import Asked, read
from tformer.viz.attention.sides import side_of


def test_an_encoder_reads_a_text_inside_its_template() -> None:
    loaded = load_of(ENCODER)
    found = read(loaded, Asked("the dog"))
    assert found.inputs["input_ids"][0].tolist() == loaded.text_tokenizer.encode("the dog", template=True)
    side = found.sides["encoder"]
    assert side.tokens[0] == "[CLS]" and side.tokens[-1] == "[SEP]"
    assert side.special[0] and side.special[-1] and not any(side.special[1:-1])


def test_a_pair_has_the_types_of_its_template() -> None:
    loaded = load_of(ENCODER)
    found = read(loaded, Asked("the dog", "the meadow"))
    ids, types = loaded.text_tokenizer.encode_pair("the dog", "the meadow")
    assert found.inputs["input_ids"][0].tolist() == ids and found.inputs["token_type_ids"][0].tolist() == types
    assert found.sides["encoder"].text_of[0] == 0 and found.sides["encoder"].text_of[-2] == 1


def test_a_decoder_reads_the_prompt_and_what_it_writes_after_it() -> None:
    loaded = load_of(DECODER)
    prompt = read(loaded, Asked("the dog"))
    longer = read(loaded, Asked("the dog", max_new_tokens=5))
    count = len(prompt.sides["decoder"])
    assert prompt.sides["decoder"].written_from is None and longer.sides["decoder"].written_from == count
    ids = longer.inputs["input_ids"]
    assert ids[0, :count].tolist() == prompt.inputs["input_ids"][0].tolist() and count < ids.shape[1] <= count + 5
    best = loaded.model(input_ids=ids).logits[0, count - 1].argmax()
    assert ids[0, count] == best, "the most probable token"
    assert any("model's own" in note for note in longer.notes)
    written = loaded.text_tokenizer.decode(ids[0, count:].tolist())
    assert longer.texts == {"text": "the dog", "continuation": written} and prompt.texts == {"text": "the dog"}


def test_an_encoder_decoder_shows_its_own_translation_or_the_target_given() -> None:
    loaded = load_of(SEQ2SEQ)
    own = read(loaded, Asked("the dog runs"))
    [[best, *_]] = translator_of(loaded).translate(["the dog runs"])
    ends = loaded.decoder_tokens
    expected = [*ends.prefix, *(token for token in best.ids if token != ends.eos)]
    assert own.inputs["decoder_input_ids"][0].tolist() == expected
    assert own.sides["decoder"].written_from == 1
    assert own.texts == {"text": "the dog runs", "translation": best.text}
    given = read(loaded, Asked("the dog runs", target="green meadow"))
    assert given.inputs["decoder_input_ids"][0].tolist() == [
        *ends.prefix,
        *loaded.target_tokenizer.encode("green meadow"),
    ]
    assert given.sides["decoder"].written_from is None
    assert given.inputs["input_ids"][0].tolist() == loaded.text_tokenizer.encode("the dog runs", template=True)


def test_a_labelling_decoder_beside_an_encoder_reads_the_text_again() -> None:
    recipe = SEQ2SEQ.replace("{kind: lm}", "{kind: classifier, pooling: eos}") + "data: {labels: [a, b]}\n"
    found = read(load_of(recipe.replace("output: true", "output: false")), Asked("the dog"))
    source, target = found.inputs["input_ids"][0].tolist(), found.inputs["decoder_input_ids"][0].tolist()
    assert target[1:] == source[:-1]


def test_an_image_becomes_patches_behind_the_class_token(tmp_path: Path) -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = read(load_of(IMAGES), Asked(image=tmp_path / "a.png"))
    assert found.sides["encoder"].tokens == ("CLS", "0,0", "0,1", "1,0", "1,1") and found.grid == (2, 2)
    assert found.pixels is not None and found.pixels.shape == (8, 8, 3)
    np.testing.assert_array_equal(found.pixels[..., 0], pixels)


def test_a_long_text_is_refused_and_cut_only_when_asked() -> None:
    loaded = load_of(ENCODER)
    text = " ".join([TEXT] * 4)
    with pytest.raises(InputError, match=r"tokens, but the model reads at most 32") as caught:
        read(loaded, Asked(text))
    assert "--max-tokens 32" in (caught.value.hint or "")
    cut = read(loaded, Asked(text, max_tokens=10))
    assert len(cut.sides["encoder"]) == 10 and cut.sides["encoder"].tokens[-1] == "[SEP]"
    assert any("first 10" in note for note in cut.notes), "it is said"
    assert len(read(loaded, Asked(text, text, max_tokens=12)).sides["encoder"]) == 12


@pytest.mark.parametrize(
    ("recipe", "asked", "words"),
    [
        (DECODER, Asked("a", target="b"), "--target: runs/tiny/checkpoints/step-00000003 is a decoder alone"),
        (ENCODER, Asked("a", target="b"), "--target"),
        (DECODER, Asked("a", "b"), "--text2"),
        (SEQ2SEQ, Asked("a", "b"), "--text2"),
        (ENCODER, Asked("a", max_new_tokens=3), "--max-new-tokens"),
        (ENCODER, Asked(image=Path("a.png")), "--image"),
        (IMAGES, Asked("a"), "model of images"),
        (ENCODER, Asked(), "nothing to look at"),
    ],
)
def test_what_a_model_cannot_take_is_refused(recipe: str, asked: Asked, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read(load_of(recipe), asked)
    assert words in caught.value.message


def test_tokens_read_as_text_and_know_where_words_begin() -> None:
    words = tokenizer("gpt")
    side = side_of("decoder", words, words.encode("unbelievable dog"))
    assert "".join(side.tokens) == "unbelievable dog"
    assert [text for _, _, text in side.words()] == ["unbelievable", " dog"]
    pieces = tokenizer("bert")
    side = side_of("encoder", pieces, pieces.encode("unbelievable dog", template=True))
    assert [text for _, _, text in side.words()] == ["[CLS]", "unbelievable", "dog", "[SEP]"]
    half = words.encode("é")[:1]
    assert "\ufffd" not in side_of("decoder", words, half).tokens[0], (
        "half a character is spelled as the vocabulary does"
    )
