"""replay: compute a recorded answer again, and say whether it is the same to the bit."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from headrace.cli.console import Printer
from headrace.cli.pack_check import check_pack
from headrace.core.errors import HeadraceError, RecordError, UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.messages import Origin
from headrace.core.packs import NONE
from headrace.core.recording import OTHER_PACK, AnswerRecord, find_record
from headrace.core.routing import UNKNOWN_MODEL_LEN

EXAMPLES = """
  headrace serve smollm2-135m --record ~/answers
  headrace replay chatcmpl-3f2a… --record ~/answers
"""
VARIABLE = "HEADRACE_RECORD"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"exit code 0: the same bits; 1: not, or it cannot be told\nexamples:{EXAMPLES}"
    parser.add_argument("request_id", metavar="REQUEST_ID", help="an answer's `id`, or its x-request-id")
    parser.add_argument(
        "--record",
        metavar="DIR",
        default=os.environ.get(VARIABLE),
        help=f"the folder that `headrace serve --record` wrote [{VARIABLE}]",
    )
    parser.add_argument("--model", metavar="MODEL", help="where the model is now (default: as it was served)")
    parser.add_argument(
        "--pack",
        metavar="DIR",
        help="folder of the pack that it was made with (default: found among those that ship, and in the "
        "registry)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: every core)")


def main(arguments: argparse.Namespace) -> int:
    if not arguments.record:
        raise UsageError("a folder of records is needed", hint="--record DIR, as `headrace serve` was given")
    if arguments.threads is not None and arguments.threads < 1:
        raise UsageError(f"--threads must be at least 1, got {arguments.threads}", param="--threads")
    if arguments.pack == "":
        raise UsageError("--pack needs a folder, got none", hint="leave it out, or name one", param="--pack")
    record = find_record(Path(os.path.expanduser(arguments.record)), arguments.request_id)
    origin = _only_origin(record)
    pack = _pack(origin, arguments.pack)
    printer = Printer()

    from headrace.engine.engine import Engine
    from headrace.engine.replay import check_origin, replay
    from headrace.models.resolve import resolve_model

    config = _settings(record, origin, pack, arguments.threads)
    with printer.progress() as progress:
        resolved = resolve_model(
            arguments.model or record.source,
            dtype=config.dtype,
            quantization=config.quantization,
            progress=progress,
        )
        engine = Engine(
            config,
            resolved.folder,
            revision=resolved.revision,
            progress=lambda done, total: progress("loading", done, total),
        )
    try:
        notes = check_origin(engine, record)
        difference = replay(engine, record)
    finally:
        engine.close()
    for note in notes:
        printer.line(f"note: {note}")
    samples = [sample for request in record.requests for sample in request.samples]
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    plural = "" if len(samples) == 1 else "s"
    what = f"{record.id}: {num_tokens} tokens of {len(samples)} sample{plural}"
    if difference is None:
        print(f"same bits: {what}")
        return 0
    print(f"differs: {what}\nfirst at {difference}")
    return 1


def _only_origin(record: AnswerRecord) -> Origin:
    """What computed the record. Raises RecordError where that is more than one thing."""
    origins = record.origins
    if not origins:
        raise RecordError(f"{record.id} does not say what computed it")
    if len({(origin.revision, origin.form, origin.pack) for origin in origins}) > 1:
        packs = " and ".join(origin.pack[:12] or "stock operators" for origin in origins)
        raise RecordError(
            f"{record.id} was computed by more than one set of kernels ({packs}), exchanged under it",
            code=OTHER_PACK,
        )
    return origins[0]


def _settings(record: AnswerRecord, origin: Origin, pack: str, threads: int | None) -> EngineConfig:
    """Those of an engine that computes the record again. Raises RecordError for one that no engine has."""
    fields = {
        "dtype": origin.dtype,
        "quantization": origin.quantization,
        "pack": pack,
        "max_model_len": None if record.max_model_len in (0, UNKNOWN_MODEL_LEN) else record.max_model_len,
        "max_num_seqs": max(len(request.samples) for request in record.requests),
        "threads": threads,
    }
    try:
        return msgspec.convert(fields, EngineConfig)
    except msgspec.ValidationError as error:
        raise RecordError(
            f"{record.id} was made with settings that this version does not have: {error}",
            hint="replay it with the version that wrote it",
        ) from None


def _pack(origin: Origin, folder: str | None) -> str:
    """The setting with which an engine runs the record's kernels. Raises RecordError, or PackError for a
    folder that is not trusted."""
    if folder is not None:
        found = check_pack(Path(folder))
        if found != origin.pack:
            made_with = f"pack {origin.pack[:12]}" if origin.pack else "stock operators"
            raise RecordError(
                f"the record was made with {made_with}, {folder} is pack {found[:12]}", code=OTHER_PACK
            )
        return folder
    if not origin.pack:
        return NONE
    # imported here because they need torch, or a library of their own
    from headrace.kernels.native.shipped import find_shipped, shipped_folder
    from headrace.optimize.registry import Registry

    for pack in find_shipped(shipped_folder())[0]:
        if pack.pack_id == origin.pack:
            return str(pack.folder)
    try:
        return str(Registry().fetch(origin.pack))
    except HeadraceError as error:
        raise RecordError(
            f"the record was made with pack {origin.pack[:12]}, which does not ship; in the registry: "
            f"{error.message}",
            hint="name its folder: --pack",
            code=OTHER_PACK,
        ) from error
