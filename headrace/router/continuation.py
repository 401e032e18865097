"""What is left of a request whose replica has gone: pure functions of it, its output so far and its model."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from msgspec.structs import replace

from headrace.core.identity import ID_BYTES, block_identities
from headrace.core.messages import Output
from headrace.core.request import Request
from headrace.core.routing import ModelInfo


def continued(
    request: Request, samples: Mapping[int, array[int]], info: ModelInfo | None, *, has_begun: bool
) -> list[Request]:
    """One request for each open sample, its output so far behind the prompt.

    ``has_begun``: a token of some sample came, and the prompt's log-probabilities with it.
    """
    prompt_logprobs = None if has_begun else request.sampling.prompt_logprobs
    sampling = replace(request.sampling, n=1, prompt_logprobs=prompt_logprobs)
    return [
        replace(
            request,
            sampling=sampling,
            sample_index=index,
            prompt=request.prompt + output.tobytes(),
            num_output_tokens=request.num_output_tokens + len(output),
            block_ids=block_ids_with(request, output, info),
        )
        for index, output in samples.items()
    ]


def block_ids_with(request: Request, output: array[int], info: ModelInfo | None) -> bytes:
    """Packed identities of the full blocks of prompt and output: the chain of the prompt's goes on."""
    known = request.block_ids
    if not output or info is None:
        return known
    more = block_identities(
        known[-ID_BYTES:] or info.root_identity,
        request.prompt + output.tobytes(),
        info.block_size,
        start_block=len(known) // ID_BYTES,
    )
    return known + b"".join(more)


def end_of(request: Request, index: int, output: array[int], info: ModelInfo | None) -> Output | None:
    """The end of a sample that has all its tokens already; None if there is more to come.

    Our engine tells the end with the last token. Those of others say it a message later, which may be lost.
    """
    if not output:
        return None
    sampling = request.sampling
    length = request.num_output_tokens + len(output)
    last = output[-1]
    stops = last in sampling.stop_token_ids or (
        info is not None and last in info.eos_token_ids and not sampling.ignore_eos
    )
    if stops and length >= sampling.min_tokens:
        return Output(request.request_id, index, [], "stop", last)
    is_long = sampling.max_tokens is not None and length >= sampling.max_tokens
    if info is not None:
        is_long |= len(request.prompt) // 4 + len(output) >= info.max_model_len
    return Output(request.request_id, index, [], "length") if is_long else None
