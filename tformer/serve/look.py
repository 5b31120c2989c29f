"""What the page shows beside an answer: the tokens of a text, and where a token or label comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tformer.inside.options import AttributeOptions, LensOptions
from tformer.inside.reading import ModelInputs, side_of
from tformer.serve.models import Served
from tformer.serve.openai import Document, token_text
from tformer.serve.requests import LookRequest, RequestError, TokenizeRequest
from tformer.serve.service import Call, Service, encoded
from tformer.viz.attention.weights import Chosen, compute
from tformer.workers.work import Work
from tformer.workflows.attribution import attribute_inputs
from tformer.workflows.lens import make_report

MOST_TOKENS = {"attention": 512, "lens": 512, "attribution": 128}
"""Of a text that is looked at: attention keeps a matrix of each head, occlusion reads the text once for each token."""
SLICE_TOKENS = 256  # that occlusion reads between two decoding steps of others
DIGITS = 4


async def tokenize(service: Service, body: TokenizeRequest, call: Call) -> Document:
    """The tokens of a prompt, as the model reads it."""
    entry = service.chosen(body, "generate", call)

    def tokens(run: Served) -> list[Document]:
        [ids] = encoded(run, [body.text])
        return [{"id": token, "text": token_text(run.text_tokenizer, token)} for token in ids]

    return {"model": call.model, "tokens": await service.on_model(entry, tokens)}


async def look(service: Service, body: LookRequest, call: Call) -> Document:
    """Where the last token of some ids, or the label of a text, comes from: attention, lens or attribution."""
    if (body.ids is None) == (body.text is None):
        raise RequestError("expected ids or text", param="ids", code="invalid_value")
    if body.text is not None and body.what != "attribution":
        raise RequestError(f"what: found {body.what!r}, of a text there is attribution", param="what")
    entry = service.chosen(body, "classify" if body.ids is None else "generate", call)
    found = await service.on_model_in_slices(entry, lambda run, work: _looked(run, body, work))
    return {"model": call.model, "what": body.what, **found}


def _looked(run: Served, body: LookRequest, work: Work) -> Document:
    if body.ids is None:
        options = AttributeOptions(text=body.text, text2=body.text2, methods="occlusion")
        report = attribute_inputs(run, options, work, batch_tokens=SLICE_TOKENS)
        name = "encoder" if "encoder" in report.tokens else "decoder"
        scores = _rounded(report.scores["occlusion"][name][0])
        return {"target": report.targets[0], "tokens": list(report.tokens[name]), "scores": scores}
    tokenizer, ids = run.text_tokenizer, body.ids
    most = min(MOST_TOKENS[body.what], run.model.longest_target)
    if not 2 <= len(ids) <= most:
        raise RequestError(f"ids: found {len(ids)}, expected 2 to {most} for {body.what}", param="ids")
    known = tokenizer.tokens  # "" where no token has an id
    if wrong := [token for token in ids if token >= len(known) or not known[token]]:
        raise RequestError(f"ids: found {wrong[0]}, which no token has", param="ids")
    side, last = side_of("decoder", tokenizer, ids), len(ids) - 2
    reading = ModelInputs({"input_ids": torch.tensor([list(ids)])}, {"decoder": side})
    found: Document = {"target": side.tokens[-1], "tokens": list(side.tokens[:-1])}
    if body.what == "attention":
        layers = compute(run, reading, ("decoder",), Chosen())["decoder"].layers
        return found | {
            "layers": [[_rounded(head[last, : last + 1]) for head in layer.weights_HTS] for layer in layers]
        }
    if body.what == "lens":
        lens = make_report(run, LensOptions(text="", positions=str(last), top_k=5), reading=reading, with_parts=False)
        tops = zip(lens.top[:, 0].tolist(), lens.lens.top_probabilities[:, 0], strict=True)
        return found | {
            "rows": list(lens.lens.rows),
            "top": [[list(pair) for pair in zip(words, _rounded(shares), strict=True)] for words, shares in tops],
            "probability": _rounded(lens.lens.probability[:, 0]),
            "rank": lens.lens.rank[:, 0].tolist(),
        }
    options = AttributeOptions(text="", positions=str(last), methods="occlusion")
    report = attribute_inputs(run, options, work, reading=reading, batch_tokens=SLICE_TOKENS)
    return found | {"scores": _rounded(report.scores["occlusion"]["decoder"][0][:-1])}


def _rounded(values: np.ndarray | Sequence[float]) -> list[Any]:
    return [None if np.isnan(value) else round(float(value), DIGITS) for value in values]
