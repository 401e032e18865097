"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Any

from headrace.core.errors import InvalidRequestError
from headrace.core.messages import Hello
from headrace.core.request import MAX_LOGPROBS, Request, SamplingParams
from headrace.gateway.fields import chat_reader
from headrace.gateway.generation import Generation, Sample
from headrace.gateway.logprobs import chat_logprobs, prompt_logprobs
from headrace.gateway.prompts import check_context, identities
from headrace.gateway.sampling import include_usage, sampling_params
from headrace.gateway.schema import ChatBody
from headrace.gateway.sse import json_value, usage_event

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.state import Gateway
    from headrace.text.stream import TextDelta

_reader = chat_reader()


async def chat_completions(gateway: Gateway, exchange: Exchange, body: bytes, arrival: float) -> None:
    """Answers one chat request."""
    hello = gateway.require_replica()
    exchange.watch()

    def work() -> tuple[ChatBody, list[str], array[int], bytes, SamplingParams]:
        fields, ignored = _reader.read(body)
        gateway.check_model(fields.model)
        params = _sampling(fields, hello)
        gateway.admission.check(1, params.n)
        token_ids = gateway.prompts.chat(fields, hello.max_model_len)
        check_context(len(token_ids), params.max_tokens, hello.max_model_len, "messages")
        return fields, ignored, token_ids, identities(token_ids, hello), params

    (fields, ignored, token_ids, block_ids, params), seconds = await gateway.prompts.run(len(body), work)
    exchange.note(gateway.metrics, ignored, seconds)
    if exchange.disconnected:
        return
    response_id = f"chatcmpl-{exchange.new_id()}"
    request = Request(
        request_id=response_id,
        prompt=token_ids.tobytes(),
        sampling=params,
        block_ids=block_ids if gateway.client.hello is hello else b"",
        model=hello.model,
    )
    shape = ChatShape(gateway, response_id, gateway.check_model(fields.model), fields, params)
    with gateway.admission.more(params.n - 1):  # the first sample has its permit
        generation = Generation(
            gateway.client,
            gateway.prompts,
            gateway.metrics,
            [request],
            arrival=arrival,
            max_backlog_bytes=gateway.max_backlog_bytes,
        )
        if fields.stream:
            await generation.stream_events(exchange, shape)
        else:
            await generation.respond(exchange, shape)


class ChatShape:
    """Writes chat.completion objects and their chunks."""

    def __init__(
        self, gateway: Gateway, response_id: str, model: str, fields: ChatBody, params: SamplingParams
    ) -> None:
        self._tokenizer = gateway.tokenizer
        self._id = response_id
        self._model = model
        self._created = int(time.time())
        self._usage = include_usage(fields)
        self._with_logprobs = bool(fields.logprobs)
        self._n = params.n
        chunk = b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":['
        self._head = chunk % (response_id.encode(), self._created, json_value(model))
        tail = b"}]" + (b',"usage":null}\n\n' if self._usage else b"}\n\n")
        self._tail = tail
        self._before = [self._head + b'{"index":%d,"delta":{"content":' % index for index in range(self._n)]
        self._after = b'},"logprobs":null,"finish_reason":null' + tail

    def opening(self) -> bytes:
        role = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return b"".join([self._head + role % index + self._tail for index in range(self._n)])

    def event(self, sample: Sample, delta: TextDelta) -> bytes:
        reason = delta.finish_reason
        if reason is None and not delta.logprobs:
            if not delta.text:
                return b""
            return self._before[sample.index] + json_value(delta.text) + self._after
        logprobs = b"null"
        if delta.logprobs:
            logprobs = json_value({"content": chat_logprobs(delta.logprobs), "refusal": None})
        parts = [self._before[sample.index], json_value(delta.text), b'},"logprobs":', logprobs]
        if reason is None:
            parts.append(b',"finish_reason":null')
        else:
            parts.append(b',"finish_reason":"%b","stop_reason":' % reason.encode())
            parts.append(json_value(sample.stop_reason))
        parts.append(self._tail)
        return b"".join(parts)

    def closing(self, generation: Generation) -> bytes:
        if not self._usage:
            return b""
        return usage_event(self._id, "chat.completion.chunk", self._created, self._model, generation.usage)

    def response(self, generation: Generation) -> bytes:
        result: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(sample) for sample in generation.samples],
            "usage": generation.usage,
        }
        prompt = generation.samples[0].prompt_logprobs
        if prompt is not None:
            result["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt)
        return json_value(result)

    def _choice(self, sample: Sample) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs:
            logprobs = {"content": chat_logprobs(sample.logprobs), "refusal": None}
        return {
            "index": sample.index,
            "message": {"role": "assistant", "content": sample.text_stream.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }


def _sampling(fields: ChatBody, hello: Hello) -> SamplingParams:
    max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    logprobs = None
    if fields.logprobs:
        logprobs = fields.top_logprobs or 0
    elif fields.top_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {logprobs}", param="top_logprobs"
        )
    return sampling_params(fields, max_tokens=max_tokens, logprobs=logprobs, vocab_size=hello.vocab_size)
