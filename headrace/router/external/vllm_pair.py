"""vLLM's prefill and decode servers (its NIXL connector, as of 0.32): one after the other.

    prefill half   max_tokens 1, no stream, kv_transfer_params: "somebody else will decode this"
                   answers kv_transfer_params: where the blocks of the prompt are
    decode half    the request itself with these, as they came; it pulls the blocks

The prefill server holds the blocks until they are pulled or a timeout of its own passes: that is what frees
those of a caller who leaves between the halves. One prefill half a sample: blocks are freed when one has
pulled them. An answer without parameters means that there is nothing to pull; the decode server then computes
the prompt itself.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from headrace.core.errors import UnavailableError
from headrace.core.messages import Output, Timing
from headrace.core.request import Request
from headrace.core.routing import Outcome
from headrace.router.external.completions import error_status
from headrace.router.external.faults import ServerFault, fault_of_status, garbage
from headrace.router.external.pair import Ear, PairWorker, PrefillCall, with_fields

LIMIT = (
    "blocks that nobody comes for, as when a caller leaves between the halves, stay until vLLM's own timeout"
)

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a prefill half carries: it decodes nothing, and nobody has computed anything of it yet."""

_COMPLETE = ("length", "stop")
"""How the one token of a prefill half may end; of anything else no blocks are kept."""


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    kv_transfer_params: dict[str, Any] | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Answer)


class VLLMSample:
    """See ``pair.Sample``."""

    def __init__(self, pair: PairWorker, request: Request, index: int, ear: Ear) -> None:
        self._pair = pair
        self._request = request
        self._index = index
        self._ear = ear
        self._decode_body, self._streams = pair.decode.encode(request, index)
        self._prefill_body = prefill_body(*pair.prefill.encode(one_token(request), index))
        self._prefill: PrefillCall | None = None
        self._started_at = self._filled_at = 0.0
        self._num_fetched_tokens = 0
        self._has_begun = False

    def start(self) -> None:
        """Sends the prefill half."""
        self._started_at = time.monotonic()
        self._prefill = PrefillCall(
            self._pair.prefill,
            self._request,
            self._prefill_body,
            self._on_answer,
            self._ear.on_prefill_failed,
        )

    def stop(self) -> None:
        """See Sample."""
        if self._prefill is not None:
            self._prefill.stop()
        self._pair.decode.abort(self._request.request_id, self._index)

    def _on_answer(self, status: int, body: bytes) -> None:
        name = self._pair.prefill.name
        if status != 200:
            self._ear.on_prefill_failed(fault_of_status(name, status, body))
            return
        try:
            answer = _decoder.decode(body)
        except msgspec.DecodeError as error:
            self._ear.on_prefill_failed(garbage(name, error))
            return
        if answer.error is not None:
            self._ear.on_prefill_failed(fault_of_status(name, error_status(answer.error), body))
            return
        reason = answer.choices[0].finish_reason if answer.choices else None
        if reason not in _COMPLETE:
            words = f"{name} stopped computing the prompt ({reason or 'no reason given'})"
            self._ear.on_prefill_failed(ServerFault(UnavailableError(words), "replica_fault"))
            return
        self._decode(answer.kv_transfer_params)

    def _decode(self, params: dict[str, Any] | None) -> None:
        decode, request = self._pair.decode, self._request
        self._filled_at = time.monotonic()
        body = self._decode_body
        if params:
            self._num_fetched_tokens = request.num_prompt_tokens
            body = with_fields(body, kv_transfer_params=params)
        else:
            decode.log.debug("%s handed nothing over for %s", self._pair.prefill.name, request.request_id)
        if decode.alive:
            decode.send(request, {self._index: (body, self._streams)}, self)
        else:
            error = UnavailableError("the connection to this server was closed")
            self._ear.on_failed(error, "replica_gone")

    # From the decode half

    def on_outputs(self, outputs: list[Output]) -> None:
        """Notes with the first of them where the time went."""
        if not self._has_begun:
            self._has_begun = True
            computed = self._request.num_prompt_tokens - self._num_fetched_tokens
            timing = Timing(
                queue_s=0.0,
                prefill_s=time.monotonic() - self._filled_at,
                num_computed_tokens=computed,
                fill_s=self._filled_at - self._started_at,
                num_fetched_tokens=self._num_fetched_tokens,
            )
            outputs = [msgspec.structs.replace(outputs[0], timing=timing), *outputs[1:]]
        self._ear.on_outputs(outputs)

    def on_failed(self, error: Any, outcome: Outcome) -> None:
        """See Receiver."""
        self._ear.on_failed(error, outcome)


def one_token(request: Request) -> Request:
    """The same prompt, of which one token is sampled that nobody sees."""
    sampling = msgspec.structs.replace(
        request.sampling,
        n=1,
        max_tokens=request.num_output_tokens + 1,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
    )
    return msgspec.structs.replace(request, sampling=sampling)


def prefill_body(body: bytes, streams: bool) -> bytes:
    """A request for one token as a prefill half."""
    return with_fields(body, stream=False, stream_options=None, kv_transfer_params=REMOTE_DECODE)
