"""``python -m tests.replica.small_backlog``: a replica that cuts a peer off at 64 KiB of unread output."""

from __future__ import annotations

from functools import partial

import headrace.replica.process as process
from headrace.replica.__main__ import main

if __name__ == "__main__":
    process.ReplicaProcess = partial(process.ReplicaProcess, max_backlog_bytes=64 * 1024)  # type: ignore[misc, assignment]
    raise SystemExit(main())
