"""`headrace --help` answers at once: it must not load torch."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from headrace.cli.main import main
try:
    main({argv!r})
except SystemExit as leave:
    assert not leave.code, leave.code
heavy = {{"torch", "transformers", "tokenizers", "httptools", "zmq"}} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_and_version_import_nothing_heavy() -> None:
    helps = [[command, "--help"] for command in ("serve", "run", "profile")]
    for argv in (["--help"], ["--version"], *helps, ["collect-env"]):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(argv=argv)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
