"""POST /v1/completions: prompts as text or token ids, one or many."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.core.errors import InvalidRequestError, UnsupportedFieldError
from headrace.core.messages import Hello
from headrace.core.request import MAX_LOGPROBS, Request, SamplingParams
from headrace.gateway.errors import decode_error
from headrace.gateway.fields import check_token_list, completion_reader
from headrace.gateway.generation import Generation, Sample
from headrace.gateway.logprobs import completion_logprobs, prompt_logprobs
from headrace.gateway.prompts import check_context, identities
from headrace.gateway.sampling import include_usage, new_seed, sampling_params
from headrace.gateway.schema import CompletionBody, TokenId
from headrace.gateway.sse import json_value, usage_event
from headrace.text.stream import TextDelta, describe_prompt

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.state import Gateway

DEFAULT_MAX_TOKENS = 16
_reader = completion_reader()
_prompt = msgspec.json.Decoder(str | list[str | TokenId | list[TokenId]] | None)
_ids = msgspec.json.Decoder(list[TokenId])
Prompt = tuple["array[int]", bytes, str]
"""Token ids, identities, and the text where an echo needs it."""


async def completions(gateway: Gateway, exchange: Exchange, body: bytes, arrival: float) -> None:
    """Answers one completion request."""
    hello = gateway.require_replica()
    exchange.watch()

    def work() -> tuple[CompletionBody, list[str], list[Prompt], SamplingParams]:
        fields, ignored = _reader.read(body)
        gateway.check_model(fields.model)
        params = _sampling(fields, hello)
        return fields, ignored, _prompts(gateway, fields, params, hello), params

    (fields, ignored, prompts, params), seconds = await gateway.prompts.run(len(body), work)
    exchange.note(gateway.metrics, ignored, seconds)
    if exchange.disconnected:
        return
    with gateway.admission.more(len(prompts) * params.n - 1):  # the first sample has its permit
        await _generate(gateway, exchange, fields, prompts, params, hello, arrival)


async def _generate(
    gateway: Gateway,
    exchange: Exchange,
    fields: CompletionBody,
    prompts: list[Prompt],
    params: SamplingParams,
    hello: Hello,
    arrival: float,
) -> None:
    response_id = f"cmpl-{exchange.new_id()}"
    same_replica = gateway.client.hello is hello
    requests = []
    for index, (token_ids, block_ids, _) in enumerate(prompts):
        own = params
        if index and fields.seed is None:
            own = msgspec.structs.replace(params, seed=new_seed())
        requests.append(Request(
            request_id=f"{response_id}-{index}" if index else response_id,
            prompt=token_ids.tobytes(),
            sampling=own,
            block_ids=block_ids if same_replica else b"",
            model=hello.model,
        ))  # fmt: skip
    shape = CompletionShape(gateway, response_id, gateway.check_model(fields.model), fields, prompts)
    generation = Generation(
        gateway.client,
        gateway.prompts,
        gateway.metrics,
        requests,
        arrival=arrival,
        max_backlog_bytes=gateway.max_backlog_bytes,
        text_offsets=[len(text) for _, _, text in prompts],
    )
    if fields.stream:
        await generation.stream_events(exchange, shape)
    else:
        await generation.respond(exchange, shape)


class CompletionShape:
    """Writes text_completion objects; whole and streamed ones look alike."""

    def __init__(
        self, gateway: Gateway, response_id: str, model: str, fields: CompletionBody, prompts: list[Prompt]
    ) -> None:
        self._tokenizer = gateway.tokenizer
        self._id = response_id
        self._model = model
        self._created = int(time.time())
        self._usage = include_usage(fields)
        self._echo = bool(fields.echo)
        self._echo_only = self._echo and fields.max_tokens == 0
        self._prompts = prompts
        self._wanted = fields.logprobs
        self._show_prompt_logprobs = fields.prompt_logprobs is not None
        self._n = fields.n or 1
        chunk = b'data: {"id":"%b","object":"text_completion","created":%d,"model":%b,"choices":['
        self._head = chunk % (response_id.encode(), self._created, json_value(model))
        self._tail = b"}]" + (b',"usage":null}\n\n' if self._usage else b"}\n\n")

    def opening(self) -> bytes:
        if not self._echo:
            return b""
        return b"".join([
            self._chunk(index, self._prompts[index // self._n][2], b"null", b"null")
            for index in range(len(self._prompts) * self._n)
        ])  # fmt: skip

    def event(self, sample: Sample, delta: TextDelta) -> bytes:
        reason = delta.finish_reason
        if reason is None and not delta.text and not delta.logprobs:
            return b""
        logprobs = b"null"
        if delta.logprobs:
            logprobs = json_value(completion_logprobs(delta.logprobs, self._wanted or 0))
        finish = b"null"
        if reason is not None:
            finish = b'"%b","stop_reason":%b' % (reason.encode(), json_value(sample.stop_reason))
        return self._chunk(sample.index, delta.text, logprobs, finish)

    def closing(self, generation: Generation) -> bytes:
        if not self._usage:
            return b""
        return usage_event(self._id, "text_completion", self._created, self._model, generation.usage)

    def response(self, generation: Generation) -> bytes:
        usage = generation.usage
        if self._echo_only:
            usage["completion_tokens"] = 0
            usage["total_tokens"] = usage["prompt_tokens"]
        return json_value({
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(sample) for sample in generation.samples],
            "usage": usage,
        })  # fmt: skip

    def _chunk(self, index: int, text: str, logprobs: bytes, finish: bytes) -> bytes:
        return b"".join([
            self._head, b'{"index":%d,"text":' % index, json_value(text), b',"logprobs":', logprobs,
            b',"finish_reason":', finish, self._tail,
        ])  # fmt: skip

    def _choice(self, sample: Sample) -> dict[str, Any]:
        text = sample.text_stream.text
        entries = sample.logprobs
        if self._echo:
            token_ids, _, prompt_text = self._prompts[sample.index // self._n]
            if self._echo_only:
                text, entries = "", []
            text = prompt_text + text
            if self._wanted is not None:
                of_prompt = sample.prompt_logprobs or [None] * len(token_ids)
                entries = describe_prompt(self._tokenizer, token_ids, of_prompt) + entries
        choice: dict[str, Any] = {
            "index": sample.index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self._echo_only else sample.finish_reason,
            "stop_reason": None if self._echo_only else sample.stop_reason,
        }
        if self._wanted is not None:
            choice["logprobs"] = completion_logprobs(entries, self._wanted)
        if self._show_prompt_logprobs and sample.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, sample.prompt_logprobs)
        return choice


def _sampling(fields: CompletionBody, hello: Hello) -> SamplingParams:
    """Sampling parameters; an echo without new tokens still computes one, which is not shown."""
    best_of = fields.best_of
    if best_of is not None and best_of != (fields.n or 1):
        if best_of < (fields.n or 1):
            raise InvalidRequestError(f"best_of must be at least n, got {best_of}", param="best_of")
        raise UnsupportedFieldError("best_of above n is not supported by this server", param="best_of")
    if fields.logprobs is not None and not 0 <= fields.logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"logprobs must be in [0, {MAX_LOGPROBS}], got {fields.logprobs}", param="logprobs"
        )
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    if fields.echo:
        if fields.stream and (fields.logprobs is not None or max_tokens == 0):
            raise InvalidRequestError(
                "echo with logprobs, or with max_tokens 0, needs stream: false", param="echo"
            )
        if max_tokens == 0:
            max_tokens = 1
        if fields.logprobs is not None:
            wanted = max(fields.logprobs, fields.prompt_logprobs or 0)
            fields = msgspec.structs.replace(fields, prompt_logprobs=wanted)
    return sampling_params(
        fields, max_tokens=max_tokens, logprobs=fields.logprobs, vocab_size=hello.vocab_size
    )


def _prompts(gateway: Gateway, fields: CompletionBody, params: SamplingParams, hello: Hello) -> list[Prompt]:
    limit = hello.max_model_len
    check_token_list(fields.prompt, "prompt", limit * gateway.admission.limit)
    encoded = bytes(fields.prompt)
    try:
        prompt = _prompt.decode(encoded)
    except (msgspec.DecodeError, RecursionError) as error:
        problem = decode_error(error, encoded)
        raise InvalidRequestError(
            f"prompt: {problem.message}",
            hint="It is text, a list of token ids, or a list of either.",
            param="prompt",
            code=problem.code,
        ) from None
    if prompt is None or prompt == []:
        raise InvalidRequestError("prompt is empty, text or token ids are needed", param="prompt")
    items: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    gateway.admission.check(len(items), params.n)
    kind = type(items[0])
    result = []
    for item in items:
        if type(item) is not kind:
            raise InvalidRequestError("prompt mixes text and token ids", param="prompt")
        result.append(_one_prompt(gateway, fields, item, params, hello))
    return result


def _one_prompt(
    gateway: Gateway, fields: CompletionBody, item: Any, params: SamplingParams, hello: Hello
) -> Prompt:
    limit = hello.max_model_len
    if isinstance(item, str):
        special = True if fields.add_special_tokens is None else fields.add_special_tokens
        token_ids = gateway.prompts.text(item, limit, special)
        text = item
    else:
        wrong = next((one for one in item if not isinstance(one, int)), None)
        if wrong is not None:
            raise InvalidRequestError("prompt mixes text and token ids", param="prompt")
        largest = max(item, default=0)
        if largest >= hello.vocab_size:
            raise InvalidRequestError(
                f"prompt holds the token id {largest}, the vocabulary has {hello.vocab_size}", param="prompt"
            )
        token_ids = array("I", item)
        text = gateway.tokenizer.decode(item, skip_special_tokens=False) if fields.echo else ""
    check_context(len(token_ids), params.max_tokens, limit, "prompt")
    return token_ids, identities(token_ids, hello), text if fields.echo else ""
