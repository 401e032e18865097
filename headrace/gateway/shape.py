"""How what is generated is written: the parts that chats and completions have in common.

An event for plain text is ``before[index] + escaped text + after``: everything but the text is put
together once a request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.gateway.receipt import receipt_of
from headrace.gateway.sampling import include_usage
from headrace.gateway.sse import event, json_value

if TYPE_CHECKING:
    from headrace.gateway.caller import Caller
    from headrace.gateway.generation import Generation, Sample
    from headrace.gateway.schema import Sampling
    from headrace.text.stream import TextDelta, TokenText
    from headrace.text.tokenizer import Tokenizer


class Shape:
    """Writes one response, whole or as events."""

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    text_open: ClassVar[bytes]
    text_close: ClassVar[bytes]

    def __init__(
        self,
        response_id: str,
        model: str,
        fields: Sampling,
        caller: Caller,
        num_samples: int,
        tokenizer: Tokenizer,
    ) -> None:
        """``fields.stream`` false: the whole response is written, and no parts of events are prepared."""
        self.tokenizer = tokenizer
        self.num_samples = num_samples
        self.response_id = response_id
        self._model = model
        self._created = int(time.time())
        self._caller = caller
        self._with_usage = include_usage(fields)
        if not fields.stream:
            return
        tier = b'"service_tier":"%b",' % caller.reported_tier if caller.reported_tier else b""
        self._head = b'data: {"id":"%b","object":"%b","created":%d,"model":%b,%b"choices":[{"index":' % (
            response_id.encode(), self.chunk_kind.encode(), self._created, json_value(model), tier,
        )  # fmt: skip
        self._tail = b'}],"usage":null}\n\n' if self._with_usage else b"}]}\n\n"
        self.before = [self._head + b"%d,%b" % (index, self.text_open) for index in range(num_samples)]
        self.after = self.text_close + b',"logprobs":null,"finish_reason":null' + self._tail

    def opening(self) -> bytes:
        """Events sent before any token."""
        return b""

    def text_event(self, index: int, text: str) -> bytes:
        """The event for plain text of one sample."""
        return self.before[index] + json_value(text)[1:-1] + self.after

    def event(self, sample: Sample, delta: TextDelta) -> bytes:
        """The event for new text of one sample, empty when there is nothing to say."""
        reason = delta.finish_reason
        if reason is None and not delta.logprobs:
            return self.text_event(sample.index, delta.text) if delta.text else b""
        text = json_value(delta.text)[1:-1]
        logprobs = json_value(self.logprobs(delta.logprobs)) if delta.logprobs else b"null"
        finish = b"null"
        if reason is not None:
            finish = b'"%b","stop_reason":%b' % (reason.encode(), json_value(sample.stop_reason))
        return b"".join([
            self.before[sample.index], text, self.text_close, b',"logprobs":', logprobs, b',"finish_reason":',
            finish, self._tail,
        ])  # fmt: skip

    def closing(self, generation: Generation) -> bytes:
        """Events between the last token and DONE."""
        events = b""
        if self._caller.receipt:
            events = self._event_without_choices("receipt", receipt_of(generation))
        if self._with_usage:
            events += self._event_without_choices("usage", self.usage(generation))
        return events

    def _event_without_choices(self, name: str, value: Any) -> bytes:
        return event(json_value({**self._frame(self.chunk_kind), "choices": [], name: value}))

    def response(self, generation: Generation) -> bytes:
        """The whole response of a request that does not stream."""
        result = self._frame(self.whole_kind)
        result["choices"] = [self.choice(sample) for sample in generation.samples]
        result["usage"] = self.usage(generation)
        result.update(self.extras(generation))
        if self._caller.receipt:
            result["receipt"] = receipt_of(generation)
        return json_value(result)

    def logprobs(self, entries: list[TokenText]) -> dict[str, Any]:
        """``choices[].logprobs`` for some tokens."""
        raise AssertionError("every endpoint has its own")

    def choice(self, sample: Sample) -> dict[str, Any]:
        """One finished sample."""
        raise AssertionError("every endpoint has its own")

    def usage(self, generation: Generation) -> dict[str, Any]:
        return generation.usage

    def extras(self, generation: Generation) -> dict[str, Any]:
        """Fields of the whole response beside choices and usage."""
        return {}

    def _frame(self, kind: str) -> dict[str, Any]:
        frame: dict[str, Any] = {
            "id": self.response_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }
        if self._caller.reported_tier:
            frame["service_tier"] = self._caller.reported_tier.decode()
        return frame
