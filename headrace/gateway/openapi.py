"""/openapi.json: the API as its own schemas describe it."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.gateway.errors import ErrorBody
from headrace.gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from headrace.gateway.tokenize import DetokenizeResponse, TokenizeResponse

_TEXT = {"type": "string"}
_ANY: dict[str, Any] = {"type": "object"}
_PROMPT = {
    "description": "Text, token ids, or a list of either.",
    "oneOf": [
        _TEXT,
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": _TEXT},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ],
}
_POSTS = {
    "/v1/chat/completions": ("Answer a conversation", ChatBody, None),
    "/v1/completions": ("Continue a prompt", CompletionBody, None),
    "/tokenize": ("Token ids of a text or a conversation", TokenizeBody, TokenizeResponse),
    "/detokenize": ("Text of token ids", DetokenizeBody, DetokenizeResponse),
}
_GETS = {
    "/v1/models": "Models that are served",
    "/v1/models/{model}": "One of them",
    "/health": "200 as long as the process is up",
    "/ready": "200 when a replica is connected and loaded, 503 otherwise",
    "/metrics": "Counters in Prometheus' format",
    "/version": "Version of the server",
    "/openapi.json": "This description",
}


def describe(version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    kinds = [kind for post in _POSTS.values() for kind in post[1:] if kind is not None]
    _, components = msgspec.json.schema_components(
        [*kinds, ErrorBody],
        ref_template="#/components/schemas/{name}",
    )
    components["CompletionBody"]["properties"]["prompt"] = _PROMPT
    paths: dict[str, Any] = {}
    for path, (summary, body, answer) in _POSTS.items():
        content: dict[str, Any] = {"application/json": {"schema": _ref(answer) if answer else _ANY}}
        if answer is None:
            content["text/event-stream"] = {"schema": _TEXT}
        paths[path] = {"post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
            "responses": {"200": {"description": "Done", "content": content}, "default": _failure()},
        }}  # fmt: skip
    for path, summary in _GETS.items():
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {"200": {"description": "Done"}, "default": _failure()},
        }
        if "{" in path:
            operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]
        paths[path] = {"get": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _failure() -> dict[str, Any]:
    return {"description": "An error", "content": {"application/json": {"schema": _ref(ErrorBody)}}}
