"""SGLang's prefill and decode servers: both get the same request at the same time.

    both halves    bootstrap_host, bootstrap_port: where the prefill server is met
                   bootstrap_room: a number that the two know this request by

The prefill server samples the first token and hands it over with the blocks, so that both halves carry the
same parameters, and all that is heard comes from the decode server. A room is used once: whatever goes wrong,
the next attempt draws another.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from headrace.core.errors import UnavailableError
from headrace.core.messages import Output
from headrace.core.request import Request
from headrace.core.routing import Outcome
from headrace.router.external.completions import error_status
from headrace.router.external.engine import refuse
from headrace.router.external.faults import ServerFault, fault_of_status, garbage
from headrace.router.external.pair import Ear, PairWorker, PrefillCall, with_fields
from headrace.router.external.sse import EventTooLargeError, SSEReader

LIMIT = "it does nothing without its other half, and prompt_logprobs is not supported"

DEFAULT_BOOTSTRAP_PORT = 8998
ROOM_BITS = 63

_rooms = random.SystemRandom()


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Answer)


class SGLangSample:
    """See ``pair.Sample``."""

    def __init__(self, pair: PairWorker, request: Request, index: int, ear: Ear) -> None:
        refuse("SGLang with prefill and decode apart", request.sampling, "prompt_logprobs")
        self._pair = pair
        self._request = request
        self._index = index
        self._ear = ear
        base = pair.prefill.client.base
        meeting = {
            "bootstrap_host": f"[{base.host}]" if ":" in base.host else base.host,
            "bootstrap_port": pair.prefill.endpoint.bootstrap_port or DEFAULT_BOOTSTRAP_PORT,
            "bootstrap_room": _rooms.getrandbits(ROOM_BITS),
        }
        body, self._streams = pair.decode.encode(request, index)
        self._decode_body = with_fields(body, **meeting)
        self._prefill_body = with_fields(pair.prefill.encode(request, index)[0], **meeting)
        self._prefill: PrefillCall | None = None
        self._has_begun = False

    def start(self) -> None:
        """Sends both halves."""
        self._prefill = PrefillCall(
            self._pair.prefill, self._request, self._prefill_body, self._on_answer, self._on_fault
        )
        self._pair.decode.send(self._request, {self._index: (self._decode_body, self._streams)}, self)

    def stop(self) -> None:
        """See Sample."""
        if self._prefill is not None:
            self._prefill.stop()
        self._pair.decode.abort(self._request.request_id, self._index)

    def _on_answer(self, status: int, body: bytes) -> None:
        """The prefill server is done; only what went wrong counts."""
        fault = fault_in(self._pair.prefill.name, status, body)
        if fault is not None:
            self._on_fault(fault)

    def _on_fault(self, fault: ServerFault) -> None:
        if not self._has_begun:  # else the decode server has all that it needs
            self._ear.on_prefill_failed(fault)

    # From the decode half

    def on_outputs(self, outputs: list[Output]) -> None:
        """See Receiver."""
        self._has_begun = True
        self._ear.on_outputs(outputs)

    def on_failed(self, error: Any, outcome: Outcome) -> None:
        """See Receiver."""
        self._ear.on_failed(error, outcome)


def fault_in(name: str, status: int, body: bytes) -> ServerFault | None:
    """What is wrong with a prefill server's whole answer, if anything is."""
    if status != 200:
        return fault_of_status(name, status, body)
    last: dict[str, Any] | None = None
    try:
        for event in SSEReader().feed(body):
            if event == b"[DONE]":
                continue
            answer = _decoder.decode(event)
            if answer.error is not None:
                return fault_of_status(name, error_status(answer.error), event)
            if answer.meta_info is not None and answer.meta_info.finish_reason is not None:
                last = answer.meta_info.finish_reason
    except (msgspec.DecodeError, EventTooLargeError) as error:
        return garbage(name, error)
    if last is not None and last.get("type") != "abort":
        return None
    code = last.get("status_code") if last is not None else None
    if isinstance(code, int) and 400 <= code < 500:
        return fault_of_status(name, code, msgspec.json.encode(last))
    why = (last.get("message") if last is not None else None) or "no reason given"
    return ServerFault(UnavailableError(f"{name} stopped computing the prompt: {why}"), "replica_fault")
