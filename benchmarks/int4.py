"""The model that onnxruntime-genai runs: built once with its own builder from our bf16 folder."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.child import ChildError

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.contenders import Model

# Blocks of 32 with a float32 scale: 5 bits a weight. Where the shipped file's head is wider, so is theirs.
_OPTIONS = {"smollm2-135m": ["int4_algo_config=rtn_last"], "gemma-3-270m": ["int4_algo_config=rtn_last"]}


def int4_model(model: Model, python: str, threads: int) -> Path:
    """Its folder; raises ChildError with the builder's last words."""
    folder = peers.peers_root() / "models" / f"{model.name}-int4"
    config = folder / "genai_config.json"
    if not config.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [
            python,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(model.folder),
            "-o",
            str(partial),
        ]
        command += ["-p", "int4", "-e", "cpu", "-c", str(partial.with_suffix(".cache"))]
        options = _OPTIONS.get(model.name, [])
        command += ["--extra_options", *options] if options else []
        built = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        if built.returncode != 0:
            raise ChildError(f"its builder: {(built.stderr.strip().splitlines() or ['no words'])[-1]}")
        partial.rename(folder)
    settings = json.loads(config.read_text())
    settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    config.write_text(json.dumps(settings, indent=1))
    return folder
