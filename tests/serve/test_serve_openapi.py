"""The OpenAPI document, and requests that are drawn from it: none is answered with 500."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.conftest import Server

JUNK: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def drawn(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """Values of a schema as pydantic writes them."""
    if "$ref" in schema:
        return drawn(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return st.one_of([drawn(each, schemas) for each in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "integer":
        return st.integers(schema.get("minimum", -(2**65)), min(schema.get("maximum", 40), 40))
    if kind == "number":
        return st.floats(schema.get("minimum", 0), schema.get("maximum", 100), allow_nan=False)
    if kind == "array":
        return st.lists(drawn(schema["items"], schemas), min_size=schema.get("minItems", 0), max_size=3)
    if kind == "object":
        required = {name: drawn(each, schemas) for name, each in schema["properties"].items()}
        needed = schema.get("required", [])
        return st.fixed_dictionaries(
            {name: required[name] for name in needed},
            optional={name: each for name, each in required.items() if name not in needed},
        )
    simple = {"boolean": st.booleans(), "null": st.none()}
    return simple.get(str(kind), st.text("abcdefgh .?é[]<>\x00\u202e😀", max_size=8))


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.send("/openapi.json").json
    return found


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(document)


def test_the_document_names_every_endpoint(document: dict[str, Any], server: Server) -> None:
    for path, methods in document["paths"].items():
        for method in methods:
            reply = server.send(path, {} if method == "post" else None)
            assert reply.status in (200, 400) and reply.status in map(int, methods[method]["responses"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    ["completions", "chat", "embed", "generate", "translate", "classify", "fill", "score", "tokenize", "look"],
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_request_is_answered_with_500_or_a_path(
    path: str, data: st.DataObject, document: dict[str, Any], server: Server, runs: dict[str, Path]
) -> None:
    path = next(each for each in document["paths"] if path in each)
    schemas = document["components"]["schemas"]
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = data.draw(drawn(reference, schemas))
    if data.draw(st.booleans()):
        body = body | {data.draw(st.sampled_from(list(body) or ["x"])): data.draw(JUNK)}
    families = {"/translate": "pairs", "/classify": "labels", "/fill": "masked"}
    if data.draw(st.integers(0, 9)):
        body["model"] = runs[families.get(path, "gpt")].name
    reply = server.send(path, json.dumps(body).encode("utf-8", "surrogatepass"))
    assert reply.status in (200, 400, 404, 422), (reply.status, reply.body, body)
    assert str(runs["gpt"].parent).encode() not in reply.body, "a path of the machine"
    if reply.status != 200:
        assert reply.error["message"]
