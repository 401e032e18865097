"""What a server's refusals and failures mean for the caller, and whose fault they are."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from headrace.core.errors import (
    ContextLengthError,
    EngineError,
    HeadraceError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from headrace.core.routing import Outcome
from headrace.router.external.http_client import HTTPFailure

MAX_MESSAGE_CHARS = 1000
_CONTEXT_WORDS = ("context length", "context size", "context_length", "maximum model length", "max_model_len")


class ServerFault(Exception):
    """An answer that ends a request: ``error`` is for the caller, ``outcome`` says whose fault it is."""

    def __init__(self, error: HeadraceError, outcome: Outcome) -> None:
        super().__init__(error.message)
        self.error = error
        self.outcome: Outcome = outcome


def fault_of_status(server: str, status: int, body: bytes) -> ServerFault:
    """For an answer other than 200 to a request that we wrote ourselves.

    401, 403, 404 and 405 are then not the caller's doing: the server wants another key or lacks the route.
    """
    message = error_message(body)
    if status == 429:
        return ServerFault(OverloadedError(f"{server} is full: {message}"), "caller_fault")
    if status in (401, 403, 404, 405):
        return ServerFault(
            UnavailableError(f"{server} refuses requests with status {status}: {message}"), "replica_fault"
        )
    if 400 <= status < 500:
        lowered = message.lower()
        kind = ContextLengthError if any(word in lowered for word in _CONTEXT_WORDS) else InvalidRequestError
        return ServerFault(kind(message), "caller_fault")
    if status == 503:
        return ServerFault(UnavailableError(f"{server} is unavailable: {message}"), "replica_fault")
    return ServerFault(EngineError(f"{server} answered with status {status}: {message}"), "replica_fault")


def fault_of_failure(server: str, failure: HTTPFailure) -> ServerFault:
    """For an answer that did not come, or not to its end."""
    outcome: Outcome = "replica_fault" if failure.fault == "garbage" else "replica_gone"
    return ServerFault(UnavailableError(f"{server}: {failure}; the request was not finished"), outcome)


def refused_key(url: str, status: int, variable: str) -> UnavailableError:
    """A server wants another key than the one in the environment variable, or any (``variable`` empty)."""
    where = "--worker-api-key-env, or api_key_env of the worker in the deployment file"
    if not variable:
        hint = f"Name the environment variable that holds its key: {where}."
    else:
        state = "set" if os.environ.get(variable) else "not set"
        hint = f"Its key is taken from the environment variable {variable}, which is {state} ({where})."
    return UnavailableError(f"{url} refuses the key (status {status})", hint=hint)


def garbage(server: str, what: object) -> ServerFault:
    """For an answer of status 200 that is none."""
    message = f"{server} sent something that is no answer: {str(what)[:200]}"
    return ServerFault(EngineError(message), "replica_fault")


def error_message(body: bytes) -> str:
    """The words in an error body of any of the shapes in use; the body itself when it has none of them."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        value = None
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail") if key in value), None)
    if isinstance(value, list):
        value = msgspec.json.encode(value).decode()
    text = value if isinstance(value, str) else body.decode("utf-8", "replace")
    return text[:MAX_MESSAGE_CHARS] or "no reason given"
