"""The table of endpoints that take a body, and the OpenAPI document of the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tformer.serve import look, openai, plain, requests
from tformer.serve.openai import Answer
from tformer.serve.service import Call, Service
from tformer.support import __version__


@dataclass(frozen=True)
class Endpoint:
    """Body type of a path and the function that answers; the function's docstring describes the path."""

    body: type[Any]
    answer: Callable[[Service, Any, Call], Awaitable[Answer]]

    @property
    def summary(self) -> str:
        return (self.answer.__doc__ or "").split(":")[0].strip(".")


ENDPOINTS = {
    "/v1/completions": Endpoint(requests.CompletionRequest, openai.completions),
    "/v1/chat/completions": Endpoint(requests.ChatRequest, openai.chat),
    "/v1/embeddings": Endpoint(requests.EmbeddingRequest, openai.embeddings),
    "/generate": Endpoint(requests.GenerateRequest, plain.generate),
    "/translate": Endpoint(requests.TranslateRequest, plain.translate),
    "/classify": Endpoint(requests.ClassifyRequest, plain.classify),
    "/fill": Endpoint(requests.FillRequest, plain.fill),
    "/score": Endpoint(requests.ScoreRequest, plain.score),
    "/tokenize": Endpoint(requests.TokenizeRequest, look.tokenize),
    "/look": Endpoint(requests.LookRequest, look.look),
}

READS = {
    "/health": ("Whether the server answers; 503 while the first model is being loaded", "application/json"),
    "/metrics": ("Counts in Prometheus' text format", "text/plain"),
    "/openapi.json": ("This document", "application/json"),
    "/v1/models": ("The models", "application/json"),
}
REFUSALS = ("400", "401", "404", "408", "413", "415", "422", "429", "499", "500", "503", "504")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document: bodies from the classes of `requests`; answers are JSON objects."""
    kinds: list[type[BaseModel]] = [Error, *(endpoint.body for endpoint in ENDPOINTS.values())]
    place = "#/components/schemas/{model}"
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=place)

    def operation(path: str, summary: str, content: dict[str, Any]) -> dict[str, Any]:
        answers = {"200": {"description": "The answer", "content": content}}
        answers |= {status: {"$ref": "#/components/responses/Error"} for status in REFUSALS}
        return {"summary": summary, "operationId": path.strip("/").replace("/", "_"), "responses": answers}

    plain_object = {"application/json": {"schema": {"type": "object"}}}
    paths: dict[str, Any] = {}
    for path, endpoint in ENDPOINTS.items():
        content = dict(plain_object)
        if "stream" in endpoint.body.model_fields:
            content["text/event-stream"] = {}
        schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": operation(path, endpoint.summary, content) | {"requestBody": body}}
    for path, (summary, kind) in READS.items():
        content = plain_object if kind in plain_object else {kind: {"schema": {"type": "string"}}}
        paths[path] = {"get": operation(path, summary, content)}
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    refused = {"description": "A refusal", "content": {"application/json": error}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "tformer", "version": __version__},
        "paths": paths,
        "security": [{}, {"key": []}],
        "components": {
            "schemas": schemas.get("$defs", {}),
            "responses": {"Error": refused},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
