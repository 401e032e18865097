"""Every error Headrace raises on purpose.

    HeadraceError                      status  type (OpenAI's word)     exit
    ├── InvalidRequestError               400  invalid_request_error       1
    │   ├── ContextLengthError            400  invalid_request_error       1
    │   ├── UnsupportedFieldError         400  invalid_request_error       1
    │   ├── AuthenticationError           401  authentication_error        1
    │   ├── NotFoundError                 404  not_found_error             1
    │   └── PayloadTooLargeError          413  invalid_request_error       1
    ├── OverloadedError                   429  rate_limit_error            1
    ├── EngineError                       500  server_error                1
    ├── UnavailableError                  503  service_unavailable         1
    └── StartupError                      500  server_error                1
        ├── UsageError                    500  server_error                2
        ├── ModelNotFoundError            500  server_error                1
        ├── UnsupportedModelError         500  server_error                1
        ├── CorruptFileError              500  server_error                1
        ├── InsufficientMemoryError       500  server_error                1
        ├── RecordError                   500  server_error                1
        ├── TimeUpError                   500  server_error                1
        └── PackError                     500  server_error                1
            ├── CompilerMissingError      500  server_error                1
            ├── CompileError              500  server_error                1
            └── NothingCoveredError       500  server_error                1

A message says what was needed and what there was; ``hint`` says what to change. ``param`` names the
request field or the flag at fault, ``code`` is a stable word for programs.
"""

from __future__ import annotations

from typing import ClassVar


class HeadraceError(Exception):
    """Base of all deliberate errors; never raised itself."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param
        self.code = code if code is not None else self.default_code


class InvalidRequestError(HeadraceError):
    """The caller's mistake: repeating the request unchanged cannot succeed."""

    status = 400
    kind = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt plus ``max_tokens``, is longer than the model's context."""

    default_code = "context_length_exceeded"


class UnsupportedFieldError(InvalidRequestError):
    """A field that OpenAI defines and this server does not implement."""

    default_code = "unsupported_field"


class AuthenticationError(InvalidRequestError):
    """No API key, or a wrong one."""

    status = 401
    kind = "authentication_error"
    default_code = "invalid_api_key"


class NotFoundError(InvalidRequestError):
    """No such route or model."""

    status = 404
    kind = "not_found_error"
    default_code = "not_found"


class PayloadTooLargeError(InvalidRequestError):
    """The body is larger than the configured limit."""

    status = 413
    default_code = "payload_too_large"


class OverloadedError(HeadraceError):
    """The system is full and says so at the door; ``retry_after`` is in seconds."""

    status = 429
    kind = "rate_limit_error"
    default_code = "overloaded"

    def __init__(
        self,
        message: str,
        *,
        retry_after: int = 1,
        hint: str | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, param=param, code=code)
        self.retry_after = retry_after


class EngineError(HeadraceError):
    """Our fault: the engine could not finish an admitted request."""

    default_code = "engine_error"


class UnavailableError(HeadraceError):
    """Starting, draining, or without a living replica."""

    status = 503
    kind = "service_unavailable"
    default_code = "unavailable"


class StartupError(HeadraceError):
    """The server cannot start as asked."""


class UsageError(StartupError):
    """A flag, environment variable or configuration key is wrong."""

    default_code = "usage"
    exit_code = 2


class ModelNotFoundError(StartupError):
    """The model's name or path leads to nothing, or to an incomplete folder."""

    default_code = "model_not_found"


class UnsupportedModelError(StartupError):
    """An architecture, tensor type or quantization that cannot be run faithfully."""

    default_code = "unsupported_model"


class CorruptFileError(StartupError):
    """A weights or tokenizer file is truncated, damaged or hostile."""

    default_code = "corrupt_file"


class InsufficientMemoryError(StartupError):
    """Weights plus one request of maximum length do not fit in memory."""

    default_code = "insufficient_memory"


class RecordError(StartupError):
    """A recorded answer that cannot be replayed here: unknown, damaged, or made with other weights or
    kernels."""

    default_code = "record_refused"


class TimeUpError(StartupError):
    """The time that was given is over before there is anything to go on with."""

    default_code = "time_up"


class PackError(StartupError):
    """A pack that cannot be used here: damaged, not trusted, or made for another machine or model."""

    default_code = "pack_refused"


class CompilerMissingError(PackError):
    """No C++ compiler on this machine."""

    default_code = "no_compiler"


class CompileError(PackError):
    """The compiler does not take a kernel's source or flags."""

    default_code = "compile_error"


class NothingCoveredError(PackError):
    """A kernel covers none of a model's weights: their formats or shapes."""
