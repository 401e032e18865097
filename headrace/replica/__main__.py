"""``python -m headrace.replica``: one JSON line in, one JSON line out for each stage, then a socket."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path

from headrace.core.errors import EngineError, HeadraceError
from headrace.core.launch import ReplicaSpec
from headrace.core.logs import set_up_logging
from headrace.core.process import StartReporter, bind_unix, read_spec


def main() -> int:
    """Returns the process's exit code."""
    report = StartReporter()
    try:
        spec = read_spec(ReplicaSpec)
        set_up_logging(spec.logs)
        listener = bind_unix(Path(spec.socket))
        # Only now, as it imports torch: mistakes above are reported at once.
        from headrace.engine.engine import Engine
        from headrace.replica.block_server import BlockServer
        from headrace.replica.process import ReplicaProcess
        from headrace.replica.waker import Waker

        waker = Waker()
        engine = Engine(
            spec.engine,
            Path(spec.folder),
            revision=spec.revision,
            share=spec.share,
            progress=report.loading,
            wake=waker.wake,
        )
        try:
            block_server = BlockServer(spec.kv_listen, engine) if spec.kv_listen else None
        except BaseException:
            engine.close()  # its threads would keep the process
            raise
    except HeadraceError as error:
        report.error(error)
        return error.exit_code
    except Exception as error:
        logging.getLogger("headrace.replica").exception("loading failed")
        report.error(EngineError(f"loading failed: {type(error).__name__}: {error}"))
        return 1
    # What was loaded lives as long as the process: keep the garbage collector away from it.
    gc.collect()
    gc.freeze()
    process = ReplicaProcess(spec, engine, listener, waker=waker, block_server=block_server)
    process.listen()
    report.ready()
    process.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
