"""The engine in your own process: text in, text out, no server.

    from headrace import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    for output in llm.generate(["The sky is", "2 + 2 ="], SamplingParams(temperature=0, max_tokens=8)):
        print(output.prompt, "->", output.outputs[0].text)

Names of methods and results are vLLM's.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from headrace.core.errors import InvalidRequestError, UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.messages import FinishReason, Output, TokenLogprobs
from headrace.core.packs import explicit_pack
from headrace.core.request import Request, SamplingParams
from headrace.core.signatures import check_signed
from headrace.engine.engine import Engine
from headrace.models.cache import Progress
from headrace.models.resolve import resolve_model
from headrace.text.stream import TextStream
from headrace.text.tokenizer import Tokenizer

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
Message: TypeAlias = "Mapping[str, Any]"
_FIELD_TYPES = {each.name: each.type for each in msgspec.structs.fields(SamplingParams)}


@dataclass(frozen=True)
class Logprob:
    """``rank`` is 1 for the likeliest token; None for an alternative whose rank was not computed."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    """One sample. ``logprobs`` has one dictionary a token: its own entry and the likeliest ones."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass
class RequestOutput:
    """One prompt's samples. ``prompt`` is None where token ids were given; entry 0 of
    ``prompt_logprobs`` is None, as nothing precedes the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True


class LLM:
    """A model loaded into this process. Not thread-safe."""

    def __init__(
        self,
        model: str,
        *,
        chat_template: str | None = None,
        progress: Progress | None = None,
        **knobs: Any,
    ) -> None:
        """``model``: short name, folder, .gguf file or hub id. ``knobs`` are the fields of EngineConfig
        (``dtype``, ``max_model_len``, ``max_num_seqs``, …); ``chat_template`` is a template's text;
        ``progress`` is told (what, done, total) while it loads.

        Raises UsageError for a knob that does not exist or is out of range, PackError for a ``pack`` that no
        trusted key signed, and other StartupErrors.
        """
        self.config = _engine_config(knobs)
        if pack := explicit_pack(self.config.pack):
            check_signed(Path(pack))
        resolved = resolve_model(
            model, dtype=self.config.dtype, quantization=self.config.quantization, progress=progress
        )
        self.model_name = resolved.name
        self.tokenizer = Tokenizer.from_folder(resolved.folder, chat_template)
        self._woken = threading.Event()
        self.engine = Engine(
            self.config,
            resolved.folder,
            revision=resolved.revision,
            progress=None if progress is None else (lambda done, total: progress("loading", done, total)),
            wake=self._woken.set,
        )
        self._ids = itertools.count()

    @property
    def kernels(self) -> str:
        """Which kernels run, and why."""
        return self.engine.kernels

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Of use with a disk tier (``kv_disk_gb``): what memory holds is written there, for a few seconds at
        most. Nothing can be generated afterwards."""
        self.engine.close()

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes one prompt or many: text, token ids, or {"prompt": …} / {"prompt_token_ids": …}.

        One SamplingParams for all or one for each. Results are in the prompts' order; ``use_tqdm`` shows
        a progress bar on a terminal. Raises InvalidRequestError before anything runs.
        """
        listed = _as_prompts(prompts)
        params = _as_params(sampling_params, len(listed))
        jobs = []
        for prompt, sampling in zip(listed, params, strict=True):
            text, token_ids = self._tokens(prompt)
            jobs.append(self._job(text, token_ids, sampling))
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, through the model's chat template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if single else list(messages)
        params = _as_params(sampling_params, len(conversations))
        jobs = []
        for conversation, sampling in zip(conversations, params, strict=True):
            token_ids = self.tokenizer.encode_chat(
                [dict(message) for message in conversation],
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
            )
            jobs.append(self._job(None, token_ids, sampling))
        return self._run(jobs, use_tqdm)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, array[int]]:
        content: Any = prompt
        if isinstance(prompt, Mapping):
            known = {"prompt", "prompt_token_ids"}
            if len(prompt) != 1 or not set(prompt) <= known:
                raise InvalidRequestError(
                    f"a prompt dictionary holds either 'prompt' or 'prompt_token_ids', got {sorted(prompt)}",
                    param="prompts",
                )
            (content,) = prompt.values()
        if isinstance(content, str):
            return content, self.tokenizer.encode(content)
        try:
            return None, array("I", content)
        except (TypeError, OverflowError, ValueError) as error:
            raise InvalidRequestError(
                f"a prompt is text or a list of token ids: {error}", param="prompts"
            ) from error

    def _job(self, text: str | None, token_ids: array[int], sampling: SamplingParams) -> _Job:
        sampling = _checked(sampling)
        request = Request(request_id=f"llm-{next(self._ids)}", prompt=token_ids.tobytes(), sampling=sampling)
        samples = [_Sample(TextStream(self.tokenizer, sampling)) for _ in range(sampling.n)]
        return _Job(request, text, token_ids, samples)

    def _run(self, jobs: list[_Job], show_progress: bool) -> list[RequestOutput]:
        by_id = {job.request.request_id: job for job in jobs}
        try:
            for job in jobs:
                self.engine.add(job.request)
            with _progress_bar(len(jobs), show_progress) as advance:
                while self.engine.has_work:
                    wait_s = self.engine.wait_s()
                    if wait_s != 0.0:  # for blocks from disk
                        self._woken.wait(wait_s)
                    self._woken.clear()
                    result = self.engine.step()
                    for failed in result.failed:
                        raise failed.to_error()
                    for output in result.outputs:
                        self._take(by_id[output.request_id], output, advance)
                    self.engine.take_events()
        finally:
            # after a success they have all ended, and this does nothing
            for request_id in by_id:
                self.engine.abort(request_id)
        return [self._result(job) for job in jobs]

    def _take(self, job: _Job, output: Output, advance: Callable[[], None]) -> None:
        sample = job.samples[output.sample_index]
        delta = sample.stream.push(output.token_ids, output.logprobs, output.finish_reason, output.stop_token)
        sample.text.append(delta.text)
        sample.logprobs += (output.logprobs or [])[: delta.num_tokens]
        if output.sample_index == 0:  # the other samples always find what this one computed
            job.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            job.prompt_logprobs = output.prompt_logprobs
        if delta.needs_abort:
            self.engine.abort(output.request_id, output.sample_index)
        if delta.finish_reason is not None:
            sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
            if all(other.stream.finished for other in job.samples):
                advance()

    def _result(self, job: _Job) -> RequestOutput:
        outputs = []
        for index, sample in enumerate(job.samples):
            wanted = job.request.sampling.logprobs is not None
            outputs.append(
                CompletionOutput(
                    index=index,
                    text="".join(sample.text),
                    token_ids=list(sample.stream.token_ids),
                    cumulative_logprob=sum(e.logprob for e in sample.logprobs) if wanted else None,
                    logprobs=[self._logprobs(entry) for entry in sample.logprobs] if wanted else None,
                    finish_reason=sample.finish_reason,
                    stop_reason=sample.stop_reason,
                )
            )
        prompt_logprobs = job.prompt_logprobs
        return RequestOutput(
            request_id=job.request.request_id,
            prompt=job.text,
            prompt_token_ids=job.token_ids.tolist(),
            outputs=outputs,
            prompt_logprobs=None
            if prompt_logprobs is None
            else [None if entry is None else self._logprobs(entry) for entry in prompt_logprobs],
            num_cached_tokens=job.num_cached_tokens,
        )

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        text = self.tokenizer.token_text
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            found.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
        return found


@dataclass
class _Sample:
    stream: TextStream
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class _Job:
    """A prompt on its way; ``text`` is None where token ids were given."""

    request: Request
    text: str | None
    token_ids: array[int]
    samples: list[_Sample]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0


def _engine_config(knobs: Mapping[str, Any]) -> EngineConfig:
    known = EngineConfig.__struct_fields__
    for name in knobs:
        if name not in known:
            raise UsageError(
                f"LLM() has no argument {name!r}",
                hint=f"the engine's knobs are {', '.join(known)}",
                param=name,
            )
    try:
        return msgspec.convert(dict(knobs), EngineConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"LLM(): {error}") from error


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise InvalidRequestError(
            f"one SamplingParams or a list of them is needed, got {type(params).__name__}",
            param="sampling_params",
        )
    if len(params) != count:
        raise InvalidRequestError(
            f"{count} prompts need one SamplingParams or {count}, got {len(params)}", param="sampling_params"
        )
    return list(params)


def _checked(sampling: Any) -> SamplingParams:
    """Parameters of the right types; ``stop`` may be a string, and it and the ids None, as in vLLM."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequestError(
            f"a SamplingParams is needed, got {type(sampling).__name__}", param="sampling_params"
        )
    fields = msgspec.structs.asdict(sampling)
    if isinstance(fields["stop"], str):
        fields["stop"] = [fields["stop"]]
    for name in ("stop", "stop_token_ids"):
        if fields[name] is None:
            fields[name] = []
    for name, kind in _FIELD_TYPES.items():
        try:
            fields[name] = msgspec.convert(fields[name], kind)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"{name}: {error}", param=name) from error
    return SamplingParams(**fields)


@contextlib.contextmanager
def _progress_bar(total: int, show: bool) -> Iterator[Callable[[], None]]:
    if not (show and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=total)
        yield lambda: progress.advance(task)
