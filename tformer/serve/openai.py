"""Answers in the shapes of OpenAI's API: completions, chat completions and embeddings, whole and as streams.

Log-probabilities are those of the model's own distribution: before temperature, penalties and truncation.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tformer.decoding.scheduler import TokenEvent
from tformer.decoding.score import prompt_logprobs
from tformer.decoding.settings import FinishReason
from tformer.serve.models import Served
from tformer.serve.requests import ChatRequest, CompletionRequest, EmbeddingRequest, RequestError, Sampling
from tformer.serve.service import Call, Service, Writing, encoded
from tformer.tokenizer import Tokenizer

Document = dict[str, Any]
Answer = Document | AsyncIterator[Document]

FINISH: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
COMPLETION_TOKENS = 16  # OpenAI's default


@dataclass(frozen=True)
class CompletionDelta:
    """A part of a completion: text that became final, the token that it comes from, or the reason of its end."""

    index: int
    text: str = ""
    token: TokenEvent | None = None
    finish: str | None = None


async def pieces(writing: Writing, body: Sampling, call: Call) -> AsyncIterator[CompletionDelta]:
    """Stream the parts of all completions while they are written."""
    count, written = body.n or 1, set[int]()
    async for number, event in writing.events:
        if isinstance(event, list):
            written.add(number)
            for sample, found in enumerate(event):
                call.completion_tokens += len(found.ids)
                yield CompletionDelta(number * count + sample, finish=FINISH.get(found.finish_reason, "length"))
        else:
            call.first_token = call.first_token or time.perf_counter()
            yield CompletionDelta(number * count + event.sample, event.text, event)
    for index in range(len(writing.prompts) * count):
        if index // count not in written:  # max_tokens 0
            yield CompletionDelta(index, finish="length")


def envelope(kind: str, prefix: str, call: Call) -> Document:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": call.model}


async def with_usage(chunks: AsyncIterator[Document], body: Sampling, head: Document, call: Call) -> Any:
    """The chunks of a stream, and one with the usage where it was requested."""
    asked = body.stream_options is not None and body.stream_options.include_usage
    async for chunk in chunks:
        yield chunk | {"usage": None} if asked else chunk
    if asked:
        yield head | {"choices": [], "usage": call.usage}


# --- log-probabilities ------------------------------------------------------------------------------------------------


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; its spelling in the vocabulary where the text is empty or half a character."""
    text = tokenizer.decode([token], skip_special=False)
    if text and "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    with suppress(ValueError):  # no token has this id
        return tokenizer.token(token)
    return ""


def legacy_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenEvent], offset: int) -> dict[str, list[Any]]:
    """The lists of a completion's `logprobs`; a token that prints like another one is called `token_id:N`."""
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        name, top = token_text(tokenizer, token.id), None
        if token.logprob is not None:
            top = {name: token.logprob}
            for other, logprob in token.alternatives:
                if other != token.id:
                    text = token_text(tokenizer, other)
                    top[f"token_id:{other}" if text in top else text] = logprob
        for key, value in zip(lists, (name, token.logprob, top, offset), strict=True):
            lists[key].append(value)
        offset += len(token.text)
    return lists


def chat_logprobs(tokenizer: Tokenizer, token: TokenEvent) -> Document:
    def entry(id: int, logprob: float | None) -> Document:
        text, spelled = token_text(tokenizer, id), tokenizer.token_bytes(id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode() if spelled is None else spelled)}

    top = [entry(*each) for each in token.alternatives]
    return entry(token.id, token.logprob) | {"top_logprobs": top}


# --- completions ------------------------------------------------------------------------------------------------------


async def completions(service: Service, body: CompletionRequest, call: Call) -> Answer:
    """Continuations of prompts: `/v1/completions`."""
    entry = service.chosen(body, "generate", call)
    most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo:
        raise RequestError("max_tokens: found 0, expected at least 1 without echo", param="max_tokens")
    writing = await service.write(
        entry,
        body,
        call,
        lambda run: prompt_ids(run, body.prompt, with_text=bool(body.echo)),
        max_new_tokens=most,
        logprobs=body.logprobs is not None,
        alternatives=body.logprobs or 0,
    )
    echoes = await _echoes(service, writing, body) if body.echo else []
    head, parts = envelope("text_completion", "cmpl", call), _completion_choices(writing, body, call, echoes)
    if body.stream:
        chunks = (head | {"choices": [choice]} async for choice in parts)
        return with_usage(chunks, body, head, call)
    whole: dict[int, Document] = {}
    async for choice in parts:
        known = whole.setdefault(choice["index"], choice)
        if known is not choice:
            known["text"] += choice["text"]
            known["finish_reason"] = choice["finish_reason"]
            for key, values in (choice["logprobs"] or {}).items():
                known["logprobs"][key] += values
    return head | {"choices": [whole[index] for index in sorted(whole)], "usage": call.usage}


def each_of(value: Any) -> list[Any]:
    """The texts and lists of ids of a field that takes one or several."""
    return [value] if isinstance(value, str) or isinstance(value[0], int) else value


def prompt_ids(run: Served, prompt: Any, *, with_text: bool = False) -> tuple[list[list[int]], list[str]]:
    """The ids of each prompt of a request, and its text (without `with_text` "" where it was given as ids)."""
    each = each_of(prompt)
    if isinstance(each[0], str):
        return encoded(run, each), list(each)
    in_range = with_text and all(token < run.text_tokenizer.vocab_size for ids in each for token in ids)
    return [list(ids) for ids in each], [run.text_tokenizer.decode(ids) if in_range else "" for ids in each]


async def _echoes(service: Service, writing: Writing, body: CompletionRequest) -> list[list[TokenEvent]]:
    """The tokens of each prompt, scored where log-probabilities were requested, but for its first one."""
    run, tokenizer, found = writing.run, writing.run.text_tokenizer, []
    for ids in writing.prompts:
        scores: list[Any] = [(None, ())] * len(ids)
        if body.logprobs is not None:
            options = {"vocab_size": tokenizer.vocab_size, "alternatives": min(body.logprobs, tokenizer.vocab_size)}
            scores[1:] = await service.owner.call(partial(prompt_logprobs, run.model, ids, **options))
        stream = tokenizer.stream()
        scored = zip(ids, scores, strict=True)
        found.append([TokenEvent(0, token, stream.push(token), score, top, None) for token, (score, top) in scored])
    return found


async def _completion_choices(
    writing: Writing, body: CompletionRequest, call: Call, echoes: Sequence[Sequence[TokenEvent]]
) -> AsyncIterator[Document]:
    """The choices of chunks: text, log-probabilities or the end of one completion each."""
    tokenizer, scored = writing.run.text_tokenizer, body.logprobs is not None
    count, lengths = body.n or 1, dict[int, int]()

    def choice(index: int, text: str, tokens: Sequence[TokenEvent], finish: str | None = None) -> Document:
        start = lengths.get(index, 0)
        lengths[index] = start + len(text)
        logprobs = legacy_logprobs(tokenizer, tokens, start) if scored else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    for index in range(len(echoes) * count):
        yield choice(index, writing.texts[index // count], echoes[index // count])
    async for piece in pieces(writing, body, call):
        if piece.text or piece.finish or (scored and piece.token):
            tokens = [piece.token] if piece.token else []
            yield choice(piece.index, piece.text, tokens, piece.finish)


# --- chat -------------------------------------------------------------------------------------------------------------


async def chat(service: Service, body: ChatRequest, call: Call) -> Answer:
    """The answer to a conversation, in the words of the model's chat template: `/v1/chat/completions`."""
    entry = service.chosen(body, "chat", call)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if most == 0:
        raise RequestError("max_completion_tokens: found 0, expected at least 1", param="max_completion_tokens")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    messages = [{"role": each.role, "content": each.text} for each in body.messages]
    writing = await service.write(
        entry,
        body,
        call,
        lambda run: ([run.chat.prompt(messages)], [""]),
        max_new_tokens=most,
        ends=lambda run: run.chat.ends,
        logprobs=bool(body.logprobs),
        alternatives=body.top_logprobs or 0,
    )
    prefix, parts = "chatcmpl", pieces(writing, body, call)
    if body.stream:
        head = envelope("chat.completion.chunk", prefix, call)
        return with_usage(_chat_chunks(head, parts, writing, body), body, head, call)
    choices: list[Document] = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": {"content": [], "refusal": None} if body.logprobs else None,
            "finish_reason": "length",
        }
        for index in range(body.n or 1)
    ]
    async for piece in parts:
        choice = choices[piece.index]
        choice["message"]["content"] += piece.text
        if piece.token and body.logprobs:
            choice["logprobs"]["content"].append(chat_logprobs(writing.run.text_tokenizer, piece.token))
        choice["finish_reason"] = piece.finish or choice["finish_reason"]
    return envelope("chat.completion", prefix, call) | {"choices": choices, "usage": call.usage}


async def _chat_chunks(
    head: Document, parts: AsyncIterator[CompletionDelta], writing: Writing, body: ChatRequest
) -> AsyncIterator[Document]:
    def chunk(index: int, delta: Document, finish: str | None = None, logprobs: Document | None = None) -> Document:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return head | {"choices": [choice]}

    for index in range(body.n or 1):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for piece in parts:
        scored = None
        if piece.token and body.logprobs:
            scored = {"content": [chat_logprobs(writing.run.text_tokenizer, piece.token)], "refusal": None}
        if piece.text or scored or piece.finish:
            yield chunk(piece.index, {"content": piece.text} if piece.finish is None else {}, piece.finish, scored)


# --- embeddings -------------------------------------------------------------------------------------------------------


async def embeddings(service: Service, body: EmbeddingRequest, call: Call) -> Document:
    """A vector for each text: `/v1/embeddings`. Ids are read as the text that they stand for."""

    def vectors(block: Sequence[Any], run: Served) -> list[tuple[Any, int]]:
        texts = [text if isinstance(text, str) else run.decode(text) for text in block]
        given = {} if body.dimensions is None else {"dimensions": body.dimensions}
        lengths = [min(len(run.encode(text)), run.recipe.seq_len) for text in texts]
        return list(zip(run.embed(texts, **given), lengths, strict=True))

    found = await service.in_blocks(body, "embed", call, each_of(body.input), vectors)
    call.prompt_tokens = sum(length for _, length in found["results"])
    data: list[Document] = []
    for vector, _ in found["results"]:
        as_text = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        shown = as_text if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": len(data), "embedding": shown})
    usage = {"prompt_tokens": call.prompt_tokens, "total_tokens": call.prompt_tokens}
    return {"object": "list", "data": data, "model": call.model, "usage": usage}
