"""Request bodies of each endpoint: their checks, before any model sees them, and their OpenAPI schema.

Values have the types of JSON: a number in quotes is refused. Fields that are not known are ignored and named in the
log, as vLLM does it; those of OpenAI's API that change an answer and are not computed here (`UNSUPPORTED`) are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from tformer.support.bounds import expected_by
from tformer.support.errors import InputError
from tformer.support.formatting import describe

Body = TypeVar("Body", bound="RequestBody")

MOST_ROWS, MOST_TEXTS, MOST_ALTERNATIVES = 128, 1024, 20
"""Of one request: completions; texts to embed, classify, fill, translate or score; alternatives of a token."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
}
"""Fields of OpenAI's API with the values, beside null, that change nothing: only these are taken."""


class RequestError(InputError):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        param: the field of the body; None: no single one.
        code: a word that programs can compare.
        retry_after: seconds after which the same request may succeed; None: it will not.
    """

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after


class RequestBody(BaseModel):
    """Fields of every request body."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)
    model: str | None = Field(None, max_length=1000, description="A name of /v1/models; null: the first one.")
    user: str | None = Field(None, description="Not used.")

    @property
    def unknown(self) -> list[str]:
        """The names of fields that are ignored."""
        return sorted((self.model_extra or {}).keys() - UNSUPPORTED.keys())


Several = Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
Texts = Annotated[str | Several, Field(description="A text, or a list of texts.")]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
SeveralIds = Annotated[list[Ids], Field(min_length=1, max_length=MOST_TEXTS)]
Prompts = Annotated[str | Several | Ids | SeveralIds, Field(description="A text, token ids, or a list of either.")]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    include_usage: bool = Field(False, description="A last chunk has the usage.")


class Sampling(RequestBody):
    """Sampling settings; null: OpenAI's default, for /generate the model's own."""

    temperature: float | None = Field(None, ge=0, le=1000, description="0: greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=1000)
    n: int | None = Field(None, ge=1, le=MOST_ROWS, description="Completions of each prompt.")
    stop: str | list[str] | None = Field(None, max_length=1000, description="Texts that end a completion.")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=100)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=0, lt=2**63, description="Null: another one for each request.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None


MaxTokens = Annotated[int | None, Field(ge=0, lt=2**31)]


class CompletionRequest(Sampling):
    prompt: Prompts
    max_tokens: MaxTokens = Field(None, description="New tokens at most; null: 16.")
    echo: bool | None = Field(None, description="The prompt comes first.")
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = Field(
        None, description="Log-probabilities of each token, and of this number of alternatives."
    )


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1, max_length=MOST_TEXTS)
    max_completion_tokens: MaxTokens = Field(None, description="New tokens at most; null: what the context holds.")
    max_tokens: MaxTokens = Field(None, description="The older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)


class EmbeddingRequest(RequestBody):
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, lt=2**31)


class GenerateRequest(Sampling):
    prompt: Texts | Ids
    max_new_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    alternatives: int | None = Field(
        None, ge=0, le=MOST_ALTERNATIVES, description="Of a stream with logprobs: the most probable tokens, best first."
    )


class TranslateRequest(RequestBody):
    text: Texts
    beam_size: int | None = Field(None, ge=1, le=MOST_ROWS)
    length_penalty: float | None = Field(None, ge=-100, le=100)
    n_best: int | None = Field(None, ge=1, le=MOST_ROWS)
    max_new_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=1000)
    seed: int | None = Field(None, ge=0, lt=2**63)
    prefix: str | None = Field(None, description="Written before each source.")
    source_language: str | None = None
    target_language: str | None = None
    alignments: bool | None = None


class ClassifyRequest(RequestBody):
    text: Texts
    text2: Texts | None = Field(None, description="The second text of each pair.")
    top_k: int | None = Field(None, ge=1, lt=2**31)
    threshold: float | None = Field(None, ge=0, le=1)


class FillRequest(RequestBody):
    text: Texts
    top_k: int | None = Field(None, ge=1, le=1000, description="Candidates for each mask; null: 5.")


class TokenizeRequest(RequestBody):
    text: str


class LookRequest(RequestBody):
    ids: Ids | None = Field(None, description="A text of a language model; the last token is looked at.")
    text: str | None = Field(None, description="A text that is classified.")
    text2: str | None = Field(None, description="The second text of a pair.")
    what: Literal["attention", "lens", "attribution"]


class ScoreRequest(RequestBody):
    source: Texts = Field(description="Sources, or prompts, which may be empty.")
    target: Texts = Field(description="Targets, or continuations.")


def read_body(body: bytes, kind: type[Body]) -> Body:
    """The checked body of a request. Raises RequestError, with the field, for what an endpoint does not take."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError(f"the body is {describe(data)}, expected a JSON object", code="invalid_json")
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error) from None
    for name, value in (request.model_extra or {}).items():
        if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
            raise RequestError(f"{name} is not supported, found {describe(value)}", param=name, code="unsupported")
    return request


def _refusal(error: ValidationError) -> RequestError:
    """The error of the first wrong field, with all values that it may have."""
    first, *others = error.errors(include_url=False)
    param = str(first["loc"][0]) if first["loc"] else None
    together = [first, *(each for each in others if each["loc"][:1] == first["loc"][:1])]
    expected = dict.fromkeys(map(expected_by, together))
    place = "".join(f"[{part}]" if isinstance(part, int) else "" for part in first["loc"][1:])
    if first["type"] == "missing":
        return RequestError(f"{'.'.join(map(str, first['loc']))} is missing", param=param, code="missing")
    found = f"found {describe(first['input'])}, expected {' or '.join(list(expected)[:4])}"
    return RequestError(f"{param}{place}: {found}", param=param, code="invalid_value")
