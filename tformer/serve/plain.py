"""Plain endpoints over the Python API: generate, translate, classify, fill masks and score.

A list of texts is answered in blocks, so that other requests go on between them. `results` has one for each text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

from tformer.data.encoding import encode_prompt
from tformer.decoding.output import translation_document
from tformer.decoding.prompts import encode_continuation
from tformer.decoding.scheduler import STEP_ROWS
from tformer.decoding.score import score_continuations, score_targets
from tformer.serve.models import Served
from tformer.serve.openai import Answer, Document, each_of, pieces, prompt_ids, token_text
from tformer.serve.requests import (
    ClassifyRequest,
    FillRequest,
    GenerateRequest,
    RequestBody,
    RequestError,
    ScoreRequest,
    TranslateRequest,
)
from tformer.serve.service import Call, Service, Writing


def _given(body: RequestBody) -> dict[str, Any]:
    """The fields that were given, as keywords of the Python API; without the texts."""
    names = type(body).model_fields.keys() - {"model", "user", "text", "text2"}
    return {name: value for name in names if (value := getattr(body, name)) is not None}


async def generate(service: Service, body: GenerateRequest, call: Call) -> Answer:
    """Continuations with the model's own settings; `samples` of each prompt."""
    entry = service.chosen(body, "generate", call)
    if body.alternatives and not (body.stream and body.logprobs):
        raise RequestError("alternatives needs stream and logprobs: true", param="alternatives", code="invalid_value")
    writing = await service.write(
        entry,
        body,
        call,
        lambda run: prompt_ids(run, body.prompt),
        max_new_tokens=body.max_new_tokens,
        is_openai=False,
        logprobs=bool(body.logprobs),
        alternatives=body.alternatives or 0,
    )
    if body.stream:
        return _streamed(writing, body, call)
    count = body.n or 1
    samples: list[Document] = [
        {"text": "", "ids": [], "finish_reason": None, "logprobs": [] if body.logprobs else None}
        for _ in range(len(writing.texts) * count)
    ]
    async for piece in pieces(writing, body, call):
        sample = samples[piece.index]
        sample["text"] += piece.text
        sample["finish_reason"] = piece.finish
        if piece.token:
            sample["ids"].append(piece.token.id)
            if body.logprobs:
                sample["logprobs"].append(piece.token.logprob)
    results = [
        {"prompt": text, "text": samples[index * count]["text"], "samples": samples[index * count :][:count]}
        for index, text in enumerate(writing.texts)
    ]
    return {"model": call.model, "results": results, "usage": call.usage}


async def _streamed(writing: Writing, body: GenerateRequest, call: Call) -> AsyncIterator[Document]:
    count = body.n or 1
    async for piece in pieces(writing, body, call):
        chunk: Document = {"index": piece.index // count, "sample": piece.index % count, "text": piece.text}
        if piece.token:
            chunk |= {"id": piece.token.id}
            if body.logprobs:
                tokenizer = writing.run.text_tokenizer
                chunk |= {"token": token_text(tokenizer, piece.token.id), "logprob": piece.token.logprob}
                chunk["alternatives"] = [
                    {"id": other, "token": token_text(tokenizer, other), "logprob": logprob}
                    for other, logprob in piece.token.alternatives
                ]
        yield chunk | {"finish_reason": piece.finish}


async def translate(service: Service, body: TranslateRequest, call: Call) -> Answer:
    """Targets of sources, by beam search or with a temperature by sampling: as `tformer generate --json`."""

    def answer(block: Sequence[str], run: Served) -> list[Any]:
        found = run.translate(list(block), **_given(body))
        tokenizers = (run.text_tokenizer, run.target_tokenizer) if body.alignments else None
        documents = []
        for each in found:
            document = translation_document(0, each.prompt, each.completions, tokenizers=tokenizers)  # type: ignore[arg-type]
            document["source"] = document.pop("prompt")
            del document["index"]
            documents.append(document)
        call.completion_tokens += sum(len(one.ids) for each in found for one in each.completions)
        return documents

    # a block of this number takes at most about twice the time of one text
    return await service.in_blocks(body, "translate", call, each_of(body.text), answer, at_once=STEP_ROWS)


async def classify(service: Service, body: ClassifyRequest, call: Call) -> Answer:
    """The label, labels, score or spans of texts, or of pairs of texts: as `tformer classify --json`."""
    texts: list[Any] = each_of(body.text)
    if body.text2 is not None:
        texts = _pairs(texts, each_of(body.text2), "text", "text2")

    def answer(block: Sequence[Any], run: Served) -> list[Any]:
        found = run.classify(list(block), **_given(body))
        return [{name: value for name, value in asdict(each).items() if value not in (None, (), {})} for each in found]

    return await service.in_blocks(body, "classify", call, texts, answer)


async def fill(service: Service, body: FillRequest, call: Call) -> Answer:
    """The most probable tokens for each mask of a text: as `tformer generate --json` with a masked model."""

    def answer(block: Sequence[str], run: Served) -> list[Any]:
        found = run.fill_masks(list(block), **_given(body))
        return [{"masks": [[asdict(each) for each in mask] for mask in masks]} for masks in found]

    return await service.in_blocks(body, "fill", call, each_of(body.text), answer)


async def score(service: Service, body: ScoreRequest, call: Call) -> Answer:
    """Log-probabilities of targets after their sources, or continuations after prompts: as `evaluate --score`."""
    pairs = _pairs(each_of(body.source), each_of(body.target), "source", "target")
    return await service.in_blocks(body, "score", call, pairs, _scores)


def _scores(pairs: Sequence[tuple[str, str]], run: Served) -> list[Any]:
    tokenizer, options = run.text_tokenizer, dict[str, Any](vocab_size=run.target_tokenizer.vocab_size)
    if run.model.is_encoder_decoder:
        start = run.decoder_tokens.prefix
        targets = [run.encode_target(target)[1][len(start) - 1 :] for _, target in pairs]
        sources = [run.encode(source) for source, _ in pairs]
        found = score_targets(run.model, sources, targets, start_ids=start, **options)
    else:
        most = run.model.max_seq_len + 2  # enough to be refused
        prompts = [encode_prompt(tokenizer, source, most=most) for source, _ in pairs]
        targets = [encode_continuation(tokenizer, *pair, most=most) for pair in pairs]
        found = score_continuations(run.model, prompts, targets, **options)
    return [{"logprob": each.logprob, "tokens": len(each.logprobs)} for each in found]


def _pairs(first: list[str], second: list[str], *names: str) -> list[tuple[str, str]]:
    if len(first) != len(second):
        message = f"{names[0]} and {names[1]}: found {len(first)} and {len(second)} texts, expected one for each"
        raise RequestError(message, param=names[1], code="invalid_value")
    return list(zip(first, second, strict=True))
