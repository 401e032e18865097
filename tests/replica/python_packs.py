"""``python -m tests.replica.python_packs``: a replica whose packs have kernels of Python."""

from __future__ import annotations

import sys

from headrace.engine import engine
from headrace.replica.__main__ import main
from tests.engine import packs

if __name__ == "__main__":
    engine.load_native_pack = packs.load
    sys.exit(main())
