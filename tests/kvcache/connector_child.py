"""One side of a connector in a process of its own.

connector_child.py serve LISTEN LIMIT    serves chains up to LIMIT blocks; says its address, then events
connector_child.py fetch ADDRESS COUNT   fetches COUNT blocks, uses none of them; says what arrived
"""

from __future__ import annotations

import sys
import threading

from headrace.kvcache.connector import ConnectorClient, ConnectorServer, SendJob, SendStream
from tests.kvcache.transfers import BLOCK_BYTES, FORMAT, ROOT, Prefill, Sink, job_of


class Telling(Prefill):
    def start(self, job: SendJob, stream: SendStream) -> None:
        print("start", flush=True)
        super().start(job, stream)

    def cancel(self, key: str) -> None:
        print("cancel", flush=True)


def main() -> None:
    role, where, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "serve":
        server = ConnectorServer(
            where, Telling(limit=number), root=ROOT, kv_format=FORMAT, block_bytes=BLOCK_BYTES
        )
        print(server.address, flush=True)
    else:
        client = ConnectorClient(kv_format=FORMAT, block_bytes=BLOCK_BYTES)
        sink = Sink(client, job_of(number, address=where), hold=True).open()
        sink.wait_delivered(1)
        print("delivered", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
