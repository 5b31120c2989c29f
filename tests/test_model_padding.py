"""What an encoder says of a text depends on that text alone: not on padding, company in the batch, or order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tformer.build import build_model
from tformer.model import Transformer
from tformer.nn.classification_heads import POOLINGS
from tformer.recipe.model import Model

VOCABULARY, LABELS = 23, 3
LENGTHS = (7, 1, 12, 4, 7, 9)
POSITIONS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "sinusoidal": {"kind": "sinusoidal"},
    "learned": {"kind": "learned"},
    "learned-roberta": {"kind": "learned", "offset": 2, "ids": "nonpad_cumsum"},
    "rope": {"kind": "rope"},
    "alibi": {"kind": "alibi"},
    "t5_bias": {"kind": "t5_bias", "buckets": 8, "max_distance": 16},
    "learned_t5_bias": {
        "kind": "learned_t5_bias",
        "offset": 2,
        "ids": "nonpad_cumsum",
        "buckets": 8,
        "max_distance": 16,
    },
    "shaw": {"kind": "shaw", "clip": 4},
}
every_position = pytest.mark.parametrize("positions", list(POSITIONS.values()), ids=list(POSITIONS))
every_pooling = pytest.mark.parametrize("pooling", POOLINGS)
every_place = pytest.mark.parametrize("place", ["post", "pre"])


def make(positions: dict[str, Any], *, pooling: str = "cls", place: str = "post", side: str = "encoder") -> Transformer:
    """A tiny model of one stack with every parameter random and logits of the order of 1."""
    torch.manual_seed(0)
    stack = {
        "num_layers": 2,
        "num_heads": 4,
        "positions": positions,
        "feedforward": {"d_ff": 24},
        "norm": {"place": place},
        "final_norm": place == "pre",
    }
    head = {"kind": "classifier", "num_labels": LABELS, "pooling": pooling}
    heads = [head, {"kind": "masked_lm"}, {"kind": "replaced_token"}]
    values = {"d_model": 16, "max_seq_len": 24, "vocab_size": VOCABULARY, "heads": heads, side: stack}
    model = build_model(Model.model_validate({**values, "embedding": {"norm": True, "token_types": 2}}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def texts() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=draw) for length in LENGTHS]


def batch(rows: Sequence[Tensor], *, width: int, left: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Rows in a batch of `width`, with random tokens as padding; `left` of them before each row's text."""
    ids = torch.randint(0, VOCABULARY, (len(rows), width), generator=torch.Generator().manual_seed(2))
    types, mask = torch.ones_like(ids), torch.zeros_like(ids)
    for index, row in enumerate(rows):
        start = left[index] if left is not None else 0
        place = slice(start, start + len(row))
        ids[index, place], mask[index, place] = row, 1
        types[index, place] = segments(row)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def segments(row: Tensor) -> Tensor:
    return (torch.arange(len(row)) > len(row) // 2).long()


def alone(model: Transformer, row: Tensor, head: str) -> Tensor:
    """The answer for one text by itself, without padding or mask."""
    with torch.no_grad():
        return model(row.unsqueeze(0), token_type_ids=segments(row).unsqueeze(0)).head(head)[0]


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@every_pooling
@every_position
@every_place
def test_padding_does_not_change_a_prediction(positions: dict[str, Any], pooling: str, place: str) -> None:
    """Right, left, and any number of padding tokens on both sides; a batch as wide as its longest text, and wider."""
    model, rows = make(positions, pooling=pooling, place=place), texts()
    expected = torch.stack([alone(model, row, "classifier") for row in rows])
    assert expected.std(dim=0).min() > 0.01  # the texts are told apart at all
    longest = max(LENGTHS)
    for width in (longest, longest + 5):
        spare = [width - length for length in LENGTHS]
        for left in (None, spare, [(3 * index) % (room + 1) for index, room in enumerate(spare)]):
            with torch.no_grad():
                assert_same(model(**batch(rows, width=width, left=left)).logits, expected)


@pytest.mark.parametrize("pooling", ["eos", "mean", "max"])
@pytest.mark.parametrize("kind", ["rope", "learned-roberta", "alibi", "none"])
def test_padding_does_not_change_a_prediction_of_a_decoder(kind: str, pooling: str) -> None:
    model, rows = make(POSITIONS[kind], pooling=pooling, place="pre", side="decoder"), texts()
    expected = torch.stack([alone(model, row, "classifier") for row in rows])
    assert expected.std(dim=0).min() > 0.01
    width = max(LENGTHS) + 3
    for left in (None, [width - length for length in LENGTHS]):
        with torch.no_grad():
            assert_same(model(**batch(rows, width=width, left=left)).logits, expected)


@every_pooling
@every_position
def test_company_and_order_do_not_change_a_prediction(positions: dict[str, Any], pooling: str) -> None:
    model, rows = make(positions, pooling=pooling), texts()
    expected = torch.stack([alone(model, row, "classifier") for row in rows])
    for order in ([5, 4, 3, 2, 1, 0], [2, 0], [1], [3, 1, 4], [0, 0, 0]):
        chosen = [rows[index] for index in order]
        with torch.no_grad():
            found = model(**batch(chosen, width=max(map(len, chosen)))).logits
        assert_same(found, expected[order])


@pytest.mark.parametrize("head", ["masked_lm", "replaced_token"])
@every_position
def test_padding_does_not_change_the_logits_of_a_token(positions: dict[str, Any], head: str) -> None:
    model, rows = make(positions), texts()
    left = [(5 * index) % (15 - length) for index, length in enumerate(LENGTHS)]
    with torch.no_grad():
        found = model(**batch(rows, width=14, left=left)).head(head)
    for index, row in enumerate(rows):
        assert_same(found[index, left[index] : left[index] + len(row)], alone(model, row, head))


def test_an_image_does_not_depend_on_its_company() -> None:
    torch.manual_seed(0)
    heads = [{"kind": "classifier", "num_labels": LABELS, "pooler": False}]
    values = {"d_model": 16, "patches": {"image_size": 8, "size": 4}, "heads": heads}
    model = build_model(Model.model_validate({**values, "encoder": {"num_layers": 2, "num_heads": 4}})).eval()
    pixels = torch.randn(5, 3, 8, 8)
    with torch.no_grad():
        expected = torch.cat([model(pixel_values=image.unsqueeze(0)).logits for image in pixels])
        order = [4, 2, 0, 1]
        assert_same(model(pixel_values=pixels[order]).logits, expected[order])


# --- where padding stands --------------------------------------------------------------------------------------------


def rows_used(model: Transformer, **inputs: Any) -> set[int]:
    """Rows of the table of learned positions that a forward pass reads: those that get a gradient."""
    side = model.encoder if model.encoder is not None else model.decoder
    assert side is not None
    table = side.positions_of(0).get_parameter("weight")
    model.zero_grad()
    model(**inputs).hidden.square().sum().backward()
    assert table.grad is not None
    return set(table.grad.abs().sum(dim=1).nonzero().flatten().tolist())


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize(("offset", "padding_row"), [(2, 1), (5, 4), (0, 0)])
def test_nonpad_cumsum_keeps_padding_before_the_first_position(side: str, offset: int, padding_row: int) -> None:
    """RoBERTa's rule: row = cumsum(non-pad) · non-pad + offset - 1, so that padding stands in the row of its own id."""
    torch.manual_seed(0)
    stack = {"num_layers": 1, "num_heads": 2, "norm": {"place": "pre"}}
    stack["positions"] = {"kind": "learned", "ids": "nonpad_cumsum", "offset": offset}
    model = build_model(Model.model_validate({"d_model": 8, "max_seq_len": 9, "vocab_size": 11, side: stack}))
    ids, mask = torch.randint(0, 11, (2, 6)), torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    assert rows_used(model, input_ids=ids, attention_mask=mask) == {padding_row, *range(offset, offset + 4)}
    assert rows_used(model, input_ids=ids) == set(range(offset, offset + 6))
    given = torch.tensor([[3, 1, 2, 0, 0, 0]]).expand(2, -1)
    assert rows_used(model, input_ids=ids, position_ids=given) == set(range(offset, offset + 4))


def test_nonpad_cumsum_in_cached_decoding() -> None:
    """With left padding in the cache, new tokens count on from the real ones."""
    torch.manual_seed(0)
    positions = {"kind": "learned", "ids": "nonpad_cumsum", "offset": 2}
    stack = {"num_layers": 2, "num_heads": 2, "positions": positions}
    model = build_model(Model.model_validate({"d_model": 8, "max_seq_len": 9, "vocab_size": 11, "decoder": stack}))
    ids, mask = torch.randint(0, 11, (2, 6)), torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        whole = model.eval()(ids, attention_mask=mask).logits
        cache = model.new_cache(2, 6)
        model(ids[:, :4], attention_mask=mask[:, :4], cache=cache)
        assert_same(model(ids[:, 4:], attention_mask=mask[:, 4:], cache=cache).logits, whole[:, 4:])
