"""Child processes that speak the protocol of ours and do as a test says, without a model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

CHILD = """#!{python}
import json, os, signal, sys
spec = json.loads(sys.stdin.readline())
def say(**event): print(json.dumps(event), flush=True)
{body}
"""
READY = """
say(event="loading", done=1, total=2)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
say(event="ready")
sys.stdin.read()
"""
# A stand-in for a replica: greets everybody, ends on SIGTERM or with its parent; its share of the machine
# is what it calls its device. A file in the model's folder may name those that refuse to start, another one
# those whose blocks have a format of their own.
REPLICA = """
sys.path.insert(0, {root!r})
import selectors, socket, time
from pathlib import Path
from headrace.core.messages import Hello
from headrace.core.wire import encode_frame
trouble = Path(spec["folder"]) / "trouble"
if trouble.exists():
    words = trouble.read_text()
    if spec["replica_id"] in words.split():
        say(event="error", kind="InsufficientMemoryError", message="needs 9 GiB", hint="lower it")
        sys.exit(1)
odd = Path(spec["folder"], "odd").read_text().split() if Path(spec["folder"], "odd").exists() else []
listener = socket.socket(socket.AF_UNIX)
Path(spec["socket"]).unlink(missing_ok=True)
listener.bind(spec["socket"])
listener.listen()
def end(*_):
    os.unlink(spec["socket"])
    os._exit(0)
signal.signal(signal.SIGTERM, end)
hello = Hello(replica_id=spec["replica_id"], pid=os.getpid(), model=spec["model"], model_revision="1",
    role=spec.get("role", "unified"), device=json.dumps(spec["share"]), dtype="float32", vocab_size=9,
    max_model_len=9, max_num_seqs=9, block_size=9, num_blocks=9, root_identity=b"", eos_token_ids=[],
    load_seconds=0.0, weights_bytes=0, kv_bytes=0, notes=[spec.get("kv_listen", "")], instance="i",
    kv_format="odd" if spec["replica_id"] in odd else "even")
say(event="loading", done=2, total=2)
say(event="ready")
selector = selectors.DefaultSelector()
selector.register(listener, selectors.EVENT_READ)
selector.register(0, selectors.EVENT_READ)
peers = []
while True:
    for key, _ in selector.select():
        if key.fileobj is listener:
            peers.append(listener.accept()[0])
            peers[-1].sendall(encode_frame(hello))
        elif not os.read(0, 100):
            end()
"""


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """From here on, what the fleet starts runs ``body`` instead of Python's module."""
    child = directory / "child"
    child.write_text(CHILD.format(python=sys.executable, body=body))
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))


def install_replica(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, replicas are stand-ins."""
    install(directory, monkeypatch, REPLICA.replace("{root!r}", repr(str(Path(__file__).parents[2]))))


def exists(pid: int) -> bool:
    """Whether a process of that pid runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# A replica as it is, but for its packs: their kernels are Python (tests.engine.packs).
PYTHON_PACKS = """#!{python}
import sys
sys.path.insert(0, {root!r})
from headrace.engine import engine
from tests.engine import packs
engine.load_native_pack = packs.load
from headrace.replica.__main__ import main
sys.exit(main())
"""


def install_python_packs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, replicas take packs whose kernels are Python."""
    child = directory / "child"
    child.write_text(PYTHON_PACKS.format(python=sys.executable, root=str(Path(__file__).parents[2])))
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
