"""What one gateway's handlers share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.core.errors import NotFoundError, UnavailableError
from headrace.core.knobs import GatewayConfig
from headrace.core.messages import Hello, Stats
from headrace.gateway.admission import Admission
from headrace.gateway.auth import Keys
from headrace.gateway.metrics import Metrics
from headrace.gateway.prompts import Prompts

if TYPE_CHECKING:
    from headrace.router.replica_client import ReplicaClient
    from headrace.text.tokenizer import Tokenizer

MEGABYTE = 1024 * 1024


class Gateway:
    """The tokenizer, the replica's client, limits and counters behind the routes.

    ``model_name`` is what was loaded, ``served_names`` what callers may ask for; the first is reported.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        tokenizer: Tokenizer,
        client: ReplicaClient,
        model_name: str,
        served_names: Sequence[str],
        log: logging.Logger,
    ) -> None:
        self.tokenizer = tokenizer
        self.client = client
        self.model_name = model_name
        self.served_names = list(served_names) or [model_name]
        self.log = log
        self.keys = Keys(config.api_key)
        self.admission = Admission(config.max_concurrent_requests)
        self.metrics = Metrics(self.served_names[0], self._stats, lambda: self.admission.in_use)
        self.prompts = Prompts(tokenizer, self.metrics)
        self.max_body_bytes = int(config.max_body_mb * MEGABYTE)
        self.max_backlog_bytes = int(config.max_response_backlog_mb * MEGABYTE)
        self.draining = False

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens; 0 as long as no replica has said it."""
        hello = self.client.hello
        return hello.max_model_len if hello is not None else 0

    def require_replica(self) -> Hello:
        """The replica's greeting; UnavailableError while none is connected or the gateway stops."""
        if self.draining:
            raise UnavailableError("the server is shutting down", code="shutting_down")
        hello = self.client.hello
        if hello is None or not self.client.alive:
            what = "still loading the model" if hello is None else "being restarted"
            raise UnavailableError(f"no replica is ready: it is {what}", hint="Try again soon; see /ready.")
        return hello

    def check_model(self, name: str | None) -> str:
        """The name to report; NotFoundError for a model that is not served. None means the served one."""
        if name is None:
            return self.served_names[0]
        if name not in self.served_names:
            raise NotFoundError(
                f"the model {name[:200]!r} is not served here; served: {', '.join(self.served_names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def close(self) -> None:
        self.prompts.close()

    def _stats(self) -> Stats:
        return self.client.stats
