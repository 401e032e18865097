"""POST /v1/chat/completions."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from headrace.core.errors import InvalidRequestError
from headrace.core.request import MAX_LOGPROBS, SamplingParams
from headrace.core.routing import ModelInfo
from headrace.gateway.caller import caller_of
from headrace.gateway.fields import chat_reader
from headrace.gateway.generation import Generation, Sample
from headrace.gateway.logprobs import chat_logprobs, prompt_logprobs
from headrace.gateway.passthrough import pass_through
from headrace.gateway.prompts import check_context, identities
from headrace.gateway.requests import engine_request, note
from headrace.gateway.sampling import sampling_params
from headrace.gateway.schema import ChatBody
from headrace.gateway.shape import Shape

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.state import Gateway
    from headrace.text.stream import TokenText
    from headrace.text.tokenizer import Tokenizer

_reader = chat_reader()


async def chat_completions(gateway: Gateway, exchange: Exchange, body: bytes, arrival: float) -> None:
    """Answers one chat request."""
    served = await gateway.model_of(body)
    if served.text_only:
        await pass_through(gateway, served, exchange, body, arrival)
        return
    info = gateway.require(served)
    prompts = served.prompts
    assert prompts is not None

    def work() -> tuple[ChatBody, list[str], array[int], bytes, SamplingParams]:
        fields, ignored = _reader.read(body)
        gateway.model(fields.model)
        params = _sampling(fields, info, prompts.tokenizer)
        gateway.admission.check(1, params.n)
        token_ids = prompts.chat(fields, info.max_model_len)
        check_context(len(token_ids), params.max_tokens, info.max_model_len, "messages")
        return fields, ignored, token_ids, identities(token_ids, info), params

    (fields, ignored, token_ids, block_ids, params), seconds = await gateway.texts.run(len(body), work)
    served.metrics.text.observe(seconds)
    note(gateway, exchange, ignored, seconds)
    if exchange.disconnected:
        return
    caller = caller_of(exchange, fields)
    response_id = f"chatcmpl-{exchange.new_id()}"
    request = engine_request(
        response_id, served, info, token_ids, block_ids, params, caller, record=gateway.recorder is not None
    )
    name = fields.model or served.names[0]
    shape = ChatShape(response_id, name, fields, caller, params.n, prompts.tokenizer)
    with gateway.admission.more(params.n - 1):  # the first sample has its permit
        await Generation(
            gateway,
            served,
            exchange,
            shape,
            [request],
            body=body,
            streams=bool(fields.stream),
            arrival=arrival,
            text_s=seconds,
        ).run()


class ChatShape(Shape):
    """Writes chat.completion objects and their chunks."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    text_open = b'"delta":{"content":"'
    text_close = b'"}'
    _ROLE = b'%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'

    def opening(self) -> bytes:
        return b"".join([self._head + self._ROLE % index + self._tail for index in range(self.num_samples)])

    def logprobs(self, entries: list[TokenText]) -> dict[str, Any]:
        return {"content": chat_logprobs(entries), "refusal": None}

    def choice(self, sample: Sample) -> dict[str, Any]:
        wanted = sample.request.sampling.logprobs is not None
        return {
            "index": sample.index,
            "message": {"role": "assistant", "content": sample.text_stream.text, "refusal": None},
            "logprobs": self.logprobs(sample.logprobs) if wanted else None,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }

    def extras(self, generation: Generation) -> dict[str, Any]:
        prompt = generation.samples[0].prompt_logprobs
        return {} if prompt is None else {"prompt_logprobs": prompt_logprobs(self.tokenizer, prompt)}


def _sampling(fields: ChatBody, info: ModelInfo, tokenizer: Tokenizer) -> SamplingParams:
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
    vocab_size = info.vocab_size or tokenizer.vocab_size
    return sampling_params(fields, max_tokens=max_tokens, logprobs=logprobs, vocab_size=vocab_size)
