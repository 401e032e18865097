"""What a request's prompt must be so that it can be scheduled, and the identities of its blocks."""

from __future__ import annotations

from array import array

from headrace.core.errors import ContextLengthError, InvalidRequestError
from headrace.core.identity import ID_BYTES, block_identities, split_identities
from headrace.core.request import Request


def max_length(request: Request, length: int, *, context: int, capacity: int) -> int:
    """Prompt plus output at which a request ends, for a prompt of ``length`` tokens.

    ``context`` is the longest sequence, ``capacity`` what the KV cache holds, in tokens. Raises
    InvalidRequestError or ContextLengthError if the request cannot be served.
    """
    sampling = request.sampling
    if length == 0:
        raise InvalidRequestError("the prompt must hold at least one token, got none", param="prompt")
    limit = length - 1 if sampling.n == 1 else 0  # output belongs to one sample
    if not 0 <= request.num_output_tokens <= limit:
        raise InvalidRequestError(
            f"num_output_tokens must be in [0, {limit}] for a prompt of {length} tokens and n = "
            f"{sampling.n}, got {request.num_output_tokens}",
            param="num_output_tokens",
        )
    if length >= context:
        raise ContextLengthError(
            f"the prompt has {length} tokens; the context holds {context}, of which at least one is "
            "for output",
            hint="shorten the prompt, or raise --max-model-len if the model allows it",
            param="prompt",
        )
    longest = context
    if sampling.max_tokens is not None:
        longest = min(context, length - request.num_output_tokens + sampling.max_tokens)
    if longest <= length:
        raise InvalidRequestError(
            f"max_tokens is {sampling.max_tokens}, and {request.num_output_tokens} output tokens are in "
            "the prompt already: nothing is left to generate",
            param="max_tokens",
        )
    if longest - 1 > capacity:  # the last token is sampled but never computed
        raise ContextLengthError(
            f"prompt and output may reach {longest} tokens; the KV cache holds {capacity}",
            hint="lower max_tokens, or raise --kv-cache-gib",
            param="max_tokens",
        )
    return longest


def prompt_identities(request: Request, tokens: array[int], root: bytes, block_size: int) -> list[bytes]:
    """The chain of the prompt's full blocks; what the request brought is completed, not recomputed.

    Raises InvalidRequestError if it brought what cannot be."""
    full = len(tokens) // block_size
    if len(request.block_ids) % ID_BYTES or len(request.block_ids) > full * ID_BYTES:
        raise InvalidRequestError(
            f"block_ids must hold {ID_BYTES} bytes for each of at most {full} full blocks of "
            f"{block_size} tokens, got {len(request.block_ids)} bytes",
            param="block_ids",
        )
    block_ids = split_identities(request.block_ids)
    if len(block_ids) < full:
        parent = block_ids[-1] if block_ids else root
        block_ids += block_identities(parent, tokens, block_size, start_block=len(block_ids))
    return block_ids
