"""From text to tokens: template, tokenizer and block identities, on or off the event loop.

Short bodies are worked on in the loop, where a hand-over to a thread would cost more than the work. Long
ones go to a worker thread, so that other streams' tokens keep flowing: the tokenizer releases the
interpreter there, and the rest is short steps that the loop can get in between.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from headrace.core.errors import ContextLengthError, InvalidRequestError, UnsupportedFieldError
from headrace.core.identity import block_identities
from headrace.gateway.errors import decode_error
from headrace.gateway.schema import ChatBody, ChatMessage, Part, TokenizeBody
from headrace.gateway.sse import EscapedTokens

if TYPE_CHECKING:
    from headrace.core.routing import ModelInfo
    from headrace.text.tokenizer import Tokenizer

INLINE_BYTES = 16 * 1024
CHECKED_CHARS = 64 * 1024
NUM_WORKERS = 2
ROLES = ("system", "developer", "user", "assistant")

Result = TypeVar("Result")


class TextPool:
    """Where text work runs: here, or in worker threads that all models share.

    ``inline``: whether every chat template renders in this process; if not, each waits for a child.
    """

    def __init__(self, *, inline: bool = True) -> None:
        self._inline_bytes = INLINE_BYTES if inline else -1
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="headrace-text")

    def close(self) -> None:
        """Lets go of the worker threads; work in progress is not waited for."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def run(self, num_bytes: int, work: Callable[[], Result]) -> tuple[Result, float]:
        """The result of text work on a body of ``num_bytes``, and the seconds it took, waiting included."""
        start = time.perf_counter()
        result = work() if num_bytes <= self._inline_bytes else await self.off_loop(work)
        return result, time.perf_counter() - start

    async def off_loop(self, work: Callable[[], Result]) -> Result:
        """The result of long work, done in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)


class Prompts:
    """Turns bodies into prompts with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._escaped = {skip: EscapedTokens(tokenizer, skip) for skip in (False, True)}

    def escaped(self, skip_special_tokens: bool) -> EscapedTokens:
        """Tokens as they stand in a JSON string."""
        return self._escaped[skip_special_tokens]

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: no prompt has fewer tokens than its characters divided by this."""
        tokenizer = self.tokenizer
        return max([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]) or 1

    def chat(self, body: ChatBody | TokenizeBody, max_model_len: int) -> array[int]:
        """Token ids of a conversation, as its template renders it."""
        messages, num_chars = plain_messages(body.messages or [])
        self.check_length(num_chars, max_model_len)
        continue_final = bool(body.continue_final_message)
        add_prompt = not continue_final if body.add_generation_prompt is None else body.add_generation_prompt
        if continue_final and add_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        if continue_final and messages[-1]["role"] != "assistant":
            raise InvalidRequestError(
                f"continue_final_message needs a last message of the assistant, got {messages[-1]['role']}",
                param="continue_final_message",
            )
        return self.tokenizer.encode_chat(
            messages,
            add_generation_prompt=add_prompt,
            continue_final_message=continue_final,
            template_kwargs=template_kwargs(body.chat_template_kwargs),
        )

    def text(self, text: str, max_model_len: int, add_special_tokens: bool = True) -> array[int]:
        """Token ids of plain text."""
        self.check_length(len(text), max_model_len)
        return self.tokenizer.encode(text, add_special_tokens)

    def check_length(self, num_chars: int, max_model_len: int) -> None:
        """Raises ContextLengthError for text that is too long whatever its tokens: before tokenizing it."""
        if num_chars <= CHECKED_CHARS:
            return
        least = num_chars // self.longest_token
        if least > max_model_len:
            raise ContextLengthError(
                f"the prompt has at least {least} tokens ({num_chars} characters), the model's context is"
                f" {max_model_len}",
                hint="Shorten the prompt.",
                param="messages",
            )


def identities(token_ids: array[int], info: ModelInfo) -> bytes:
    """Concatenated identities of a prompt's full blocks, as a Request carries them."""
    return b"".join(block_identities(info.root_identity, token_ids, info.block_size))


def check_context(num_prompt: int, max_tokens: int | None, max_model_len: int, param: str) -> None:
    """Raises ContextLengthError unless prompt and output fit in the model's context."""
    if num_prompt == 0:
        raise InvalidRequestError("the prompt has no tokens, at least one is needed", param=param)
    if num_prompt >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, the model's context is {max_model_len}, of which at least"
            " one is needed for the output",
            hint=f"Shorten the prompt to {max_model_len - 1} tokens or fewer.",
            param=param,
        )
    if max_tokens is not None and num_prompt + max_tokens > max_model_len:
        total = num_prompt + max_tokens
        raise ContextLengthError(
            f"the prompt's {num_prompt} tokens and max_tokens={max_tokens} are {total} tokens,"
            f" the model's context is {max_model_len}",
            hint=f"Lower max_tokens to {max_model_len - num_prompt}, or shorten the prompt.",
            param="max_tokens",
        )


def plain_messages(messages: list[ChatMessage]) -> tuple[list[dict[str, Any]], int]:
    """Messages as the template takes them, their content one string, and the number of characters."""
    if not messages:
        raise InvalidRequestError("messages is empty, at least one message is needed", param="messages")
    result: list[dict[str, Any]] = []
    num_chars = 0
    for index, message in enumerate(messages):
        role = message.role
        if role not in ROLES:
            raise _bad_role(index, role)
        for name in ("tool_calls", "function_call", "audio"):
            raw = getattr(message, name)
            if raw is not msgspec.UNSET and bytes(memoryview(raw)[:64]) not in (b"null", b"[]"):
                raise _unsupported(f"messages[{index}].{name}")
        content = message.content
        if isinstance(content, list):
            content = "\n".join([_part_text(part, f"messages[{index}].content") for part in content])
        elif content is None:
            raise InvalidRequestError(
                f"messages[{index}].content is missing: a string or a list of text parts is needed",
                param=f"messages[{index}].content",
            )
        num_chars += len(content)
        plain: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
        if message.name is not None:
            plain["name"] = message.name
        if message.reasoning_content is not None:
            plain["reasoning_content"] = message.reasoning_content
        result.append(plain)
    return result, num_chars


def template_kwargs(raw: msgspec.Raw | msgspec.UnsetType) -> dict[str, Any] | None:
    """The decoded ``chat_template_kwargs``, None when there are none."""
    if isinstance(raw, msgspec.UnsetType):
        return None
    encoded = bytes(raw)
    try:
        return msgspec.json.decode(encoded, type=dict[str, Any] | None)
    except (msgspec.DecodeError, RecursionError) as error:
        problem = decode_error(error, encoded)
        raise InvalidRequestError(
            f"chat_template_kwargs: {problem.message}", param="chat_template_kwargs", code=problem.code
        ) from None


def _part_text(part: Part, where: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "text":
        raise InvalidRequestError(f"{where}: a text part needs text", param=where)
    if part.type in ("image_url", "input_audio", "file", "refusal", "video_url", "audio_url", "input_image"):
        raise _unsupported(where, f"a part of type {part.type}")
    raise InvalidRequestError(f"{where}: unknown part type {part.type[:40]!r}, 'text' is known", param=where)


def _bad_role(index: int, role: str) -> InvalidRequestError:
    where = f"messages[{index}].role"
    if role in ("tool", "function"):
        return _unsupported(where, f"the role {role}")
    return InvalidRequestError(f"{where} must be one of {', '.join(ROLES)}; got {role[:40]!r}", param=where)


def _unsupported(where: str, what: str | None = None) -> UnsupportedFieldError:
    named = where if what is None else f"{where}: {what}"
    return UnsupportedFieldError(f"{named} is not supported by this server", param=where)
