"""The recipe's JSON schema, for editors that complete and check YAML as it is typed.

The comment beside a field in our own source is its description, so that the two cannot drift apart.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from typing import Any

from tformer.recipe.recipe import Recipe
from tformer.recipe.schema_tree import all_sections

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) of recipe files. Nothing is required at the top: a preset may supply it."""
    schema = Recipe.model_json_schema(by_alias=True, mode="validation")
    schema.pop("required")
    definitions = schema["$defs"]
    for section in all_sections():
        definition = schema if section is Recipe else definitions[section.__name__]
        for name, comment in field_comments(section):
            field = definition["properties"].get(name)
            if field is not None:
                field.setdefault("description", comment)
    described = {"title": "tformer recipe", "description": "Everything that defines a run of tformer."}
    return {"$schema": DIALECT, **schema, **described}


def field_comments(section: type) -> Iterator[tuple[str, str]]:
    """The name of each field of a class that has a comment at the end of its line, and that comment."""
    source = textwrap.dedent(inspect.getsource(section))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno in comments:
            yield node.target.id, comments[node.end_lineno]
