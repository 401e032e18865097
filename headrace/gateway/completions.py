"""POST /v1/completions: prompts as text or token ids, one or many."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.core.errors import InvalidRequestError, UnsupportedFieldError
from headrace.core.request import MAX_LOGPROBS, SamplingParams
from headrace.core.routing import ModelInfo
from headrace.gateway.caller import caller_of
from headrace.gateway.errors import decode_error
from headrace.gateway.fields import check_token_list, completion_reader
from headrace.gateway.generation import Generation, Sample
from headrace.gateway.logprobs import completion_logprobs, prompt_logprobs
from headrace.gateway.passthrough import pass_through
from headrace.gateway.prompts import Prompts, check_context, identities
from headrace.gateway.requests import engine_request, note
from headrace.gateway.sampling import new_seed, sampling_params
from headrace.gateway.schema import CompletionBody, TokenId
from headrace.gateway.shape import Shape
from headrace.text.stream import TokenText, describe_prompt

if TYPE_CHECKING:
    from headrace.gateway.caller import Caller
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.state import Gateway
    from headrace.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
_reader = completion_reader()
_prompt = msgspec.json.Decoder(str | list[str | TokenId | list[TokenId]] | None)


class Prompt(NamedTuple):
    """One prompt; ``text`` only where an echo needs it."""

    token_ids: array[int]
    block_ids: bytes
    text: str


async def completions(gateway: Gateway, exchange: Exchange, body: bytes, arrival: float) -> None:
    """Answers one completion request."""
    served = await gateway.model_of(body)
    if served.text_only:
        await pass_through(gateway, served, exchange, body, arrival)
        return
    info = gateway.require(served)
    texts = served.prompts
    assert texts is not None

    def work() -> tuple[CompletionBody, list[str], list[Prompt], SamplingParams]:
        fields, ignored = _reader.read(body)
        gateway.model(fields.model)
        params = _sampling(fields, info.vocab_size or texts.tokenizer.vocab_size)
        return fields, ignored, _prompts(gateway, texts, fields, params, info), params

    (fields, ignored, prompts, params), seconds = await gateway.texts.run(len(body), work)
    served.metrics.text.observe(seconds)
    note(gateway, exchange, ignored, seconds)
    if exchange.disconnected:
        return
    caller = caller_of(exchange, fields)
    response_id = f"cmpl-{exchange.new_id()}"
    requests = []
    for index, prompt in enumerate(prompts):
        own = params
        if index and fields.seed is None:
            own = msgspec.structs.replace(params, seed=new_seed())
        request_id = f"{response_id}-{index}" if index else response_id
        requests.append(
            engine_request(
                request_id,
                served,
                info,
                prompt.token_ids,
                prompt.block_ids,
                own,
                caller,
                record=gateway.recorder is not None,
            )
        )
    name = fields.model or served.names[0]
    shape = CompletionShape(response_id, name, fields, caller, params.n, texts.tokenizer, prompts)
    with gateway.admission.more(shape.num_samples - 1):  # the first sample has its permit
        await Generation(
            gateway,
            served,
            exchange,
            shape,
            requests,
            body=body,
            streams=bool(fields.stream),
            arrival=arrival,
            text_s=seconds,
            text_offsets=[len(prompt.text) for prompt in prompts],
        ).run()


class CompletionShape(Shape):
    """Writes text_completion objects; whole and streamed ones look alike."""

    whole_kind = chunk_kind = "text_completion"
    text_open = b'"text":"'
    text_close = b'"'

    def __init__(
        self,
        response_id: str,
        model: str,
        fields: CompletionBody,
        caller: Caller,
        n: int,
        tokenizer: Tokenizer,
        prompts: list[Prompt],
    ) -> None:
        super().__init__(response_id, model, fields, caller, len(prompts) * n, tokenizer)
        self._echo = bool(fields.echo)
        self._echo_only = self._echo and fields.max_tokens == 0
        self._prompts = prompts
        self._wanted = fields.logprobs
        self._show_prompt_logprobs = fields.prompt_logprobs is not None
        self._n = n

    def opening(self) -> bytes:
        if not self._echo:
            return b""
        return b"".join([
            self.text_event(index, self._prompts[index // self._n].text)
            for index in range(self.num_samples)
        ])  # fmt: skip

    def logprobs(self, entries: list[TokenText]) -> dict[str, Any]:
        return completion_logprobs(entries, self._wanted or 0)

    def usage(self, generation: Generation) -> dict[str, Any]:
        usage = generation.usage
        if self._echo_only:
            usage["completion_tokens"] = 0
            usage["total_tokens"] = usage["prompt_tokens"]
        return usage

    def choice(self, sample: Sample) -> dict[str, Any]:
        text = sample.text_stream.text
        entries = sample.logprobs
        if self._echo:
            token_ids, _, prompt_text = self._prompts[sample.index // self._n]
            if self._echo_only:
                text, entries = "", []
            text = prompt_text + text
            if self._wanted is not None:
                of_prompt = sample.prompt_logprobs or [None] * len(token_ids)
                entries = describe_prompt(self.tokenizer, token_ids, of_prompt) + entries
        choice: dict[str, Any] = {
            "index": sample.index,
            "text": text,
            "logprobs": None,
            "finish_reason": "length" if self._echo_only else sample.finish_reason,
            "stop_reason": None if self._echo_only else sample.stop_reason,
        }
        if self._wanted is not None:
            choice["logprobs"] = self.logprobs(entries)
        if self._show_prompt_logprobs and sample.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, sample.prompt_logprobs)
        return choice


def _sampling(fields: CompletionBody, vocab_size: int) -> SamplingParams:
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
    return sampling_params(fields, max_tokens=max_tokens, logprobs=fields.logprobs, vocab_size=vocab_size)


def _prompts(
    gateway: Gateway, texts: Prompts, fields: CompletionBody, params: SamplingParams, info: ModelInfo
) -> list[Prompt]:
    limit = info.max_model_len
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
        result.append(_one_prompt(texts, fields, item, params, info))
    return result


def _one_prompt(
    texts: Prompts, fields: CompletionBody, item: Any, params: SamplingParams, info: ModelInfo
) -> Prompt:
    limit = info.max_model_len
    if isinstance(item, str):
        special = True if fields.add_special_tokens is None else fields.add_special_tokens
        token_ids = texts.text(item, limit, special)
        text = item
    else:
        wrong = next((one for one in item if not isinstance(one, int)), None)
        if wrong is not None:
            raise InvalidRequestError("prompt mixes text and token ids", param="prompt")
        largest = max(item, default=0)
        vocab_size = info.vocab_size or texts.tokenizer.vocab_size
        if largest >= vocab_size:
            raise InvalidRequestError(
                f"prompt holds the token id {largest}, the vocabulary has {vocab_size}", param="prompt"
            )
        token_ids = array("I", item)
        text = texts.tokenizer.decode(item, skip_special_tokens=False) if fields.echo else ""
    check_context(len(token_ids), params.max_tokens, limit, "prompt")
    return Prompt(token_ids, identities(token_ids, info), text if fields.echo else "")
