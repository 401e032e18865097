"""`headrace packs make`: kernels that somebody wrote, judged on several models, become one signed pack."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import UsageError
from headrace.core.words import count

if TYPE_CHECKING:
    from headrace.core.packs import KernelEntry
    from headrace.models.config import DecoderConfig
    from headrace.optimize.records import Target
    from headrace.optimize.whole_pack import Model

FORMS = {"int8": "int8", "bf16": "none"}
"""What may stand behind a model's name, and the --quantization that it means."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sources", metavar="SOURCES", help="C++ files and kernels.json, a list of the kernels that they are")
    add("out", metavar="OUT", help="the pack's folder, which must not exist or be empty")
    add(
        "--on",
        action="append",
        required=True,
        metavar="MODEL",
        help="a model to judge it on, as `headrace serve` takes it; MODEL=int8: with its weights rounded to "
        "8 bits, MODEL=bf16: not in the file's blocks. Give several: a pack for any model needs three that "
        "differ",
    )
    add(
        "--workload",
        action="append",
        metavar="W",
        help="decode, prefill or chat; the first decides [decode, then prefill]",
    )
    add("--kernels", default="", metavar="FILE", help="instead of SOURCES/kernels.json")
    add("--name", default="", metavar="NAME", help="the pack's name [SOURCES']")
    add("--author", default="", metavar="WHO", help="who wrote the kernels (default: the user)")
    add(
        "--features",
        default="",
        metavar="LIST",
        help="what a CPU must have, words of /proc/cpuinfo with commas [what this one has of those that "
        "kernels are written for]. Where AVX-512 is left out, torch's operators are measured without it",
    )
    add("--one-model", action="store_true", help="for models of the first one's shape alone")
    add("--threads", type=int, default=0, metavar="N", help="threads [every core]")
    add("--quick", action="store_true", help="fewer calls and shorter timing")


def main(arguments: argparse.Namespace) -> int:
    from headrace.core.packs import PackConditions
    from headrace.kernels.native.build import cpu_features
    from headrace.models.config import DecoderShape
    from headrace.optimize.judge.lesser_cpu import check_flags_for
    from headrace.optimize.judge.options import JudgeOptions
    from headrace.optimize.keys import Keys
    from headrace.optimize.packing import make_pack
    from headrace.optimize.publishing import RELEVANT_FEATURES
    from headrace.optimize.registry import current_user
    from headrace.optimize.whole_pack import judge_pack, read_entries, split_candidates

    sources, out = Path(arguments.sources), Path(arguments.out)
    entries = read_entries(sources, arguments.kernels)
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty", hint="name another folder, or remove it")
    options = JudgeOptions.quick() if arguments.quick else JudgeOptions()
    if arguments.threads:
        options = options.with_threads(arguments.threads)
    workloads = arguments.workload or ["decode", "prefill"]
    features = arguments.features.split(",") if arguments.features else sorted(cpu_features())
    if not arguments.features:
        features = [name for name in RELEVANT_FEATURES if name in features]
    check_flags_for(features, entries)
    options = options.for_cpu(features)
    models = [_model(word, entries, workloads) for word in arguments.on]
    shapes = DecoderShape.of(_config(_split(arguments.on[0])[0])[1]).as_dict()
    name = arguments.name or sources.resolve().name
    with tempfile.TemporaryDirectory(prefix="headrace-pack-") as scratch:
        candidates = split_candidates(sources, entries, Path(scratch))
        winners = judge_pack(
            candidates,
            entries,
            models,
            author=arguments.author or current_user(),
            options=options,
            say=lambda line: print(line, flush=True),
        )
        out.mkdir(parents=True, exist_ok=True)
        identity = make_pack(
            out,
            *winners,
            name=name,
            conditions=PackConditions(cpu_features=features, shapes=shapes if arguments.one_model else {}),
            round_id=f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}",
            keys=Keys(),
        )
    print(
        f"{identity[:12]} in {out}: {count(len(entries), 'kernel')}, judged on {count(len(models), 'model')}"
    )
    return 0


def _config(model: str, quantization: str = "none") -> tuple[Path, DecoderConfig]:
    from headrace.models.families import covers, read_config
    from headrace.models.fields import read_json
    from headrace.models.resolve import resolve_model

    folder = resolve_model(model, quantization=quantization).folder
    raw = read_json(folder / "config.json")
    if not covers(raw):
        raise UsageError(f"{model}: {raw.get('model_type')!r} runs on Transformers' definition")
    return folder, read_config(raw)


def _split(word: str) -> tuple[str, str]:
    """A model and the ``quantization`` that it is judged with."""
    model, _, form = word.rpartition("=")
    return (model, FORMS[form]) if model and form in FORMS else (word, "auto")


def _model(word: str, entries: Sequence[KernelEntry], names: Sequence[str]) -> Model:
    """One ``--on``: its targets, and its workloads."""
    from headrace.optimize.profile.workloads import load_workload
    from headrace.optimize.targets import whole_target
    from headrace.optimize.whole_pack import Model

    model, quantization = _split(word)
    folder, config = _config(model, quantization)
    longest = config.max_position_embeddings
    layer, head = (["q8_0"], ["q8_0"]) if quantization == "int8" else _formats(folder)
    readable = {format for entry in entries for format in entry.weight_formats}
    if unread := sorted({*layer, *head} - readable):
        raise UsageError(f"{model} has weights in {', '.join(unread)}, which none of the kernels reads")

    def target(entry: KernelEntry) -> Target:
        formats = {"logits_head": head, "rms_norm": []}.get(entry.op, layer)
        return whole_target(entry.op, model, config, formats=formats, quantization=quantization)

    return Model(
        [target(entry) for entry in entries],
        [load_workload(name, config.vocab_size, max_len=longest) for name in names],
    )


def _formats(folder: Path) -> tuple[list[str], list[str]]:
    """Those of the layers' matrices and of the head, where they are blocks: what most have first, what leads
    down last."""
    from headrace.models.weights import Checkpoint

    checkpoint = Checkpoint(folder)
    layers, down, head = Counter[str](), Counter[str](), list[str]()
    for name in checkpoint.shapes:
        if not checkpoint.holds_blocks(name):
            continue
        found = checkpoint.formats(name)
        if "lm_head" in name or ("embed_tokens" in name and not head):
            head = found[:1]
        elif "embed_tokens" not in name:
            (down if "down_proj" in name else layers).update(found)
    order = [name for name, _ in layers.most_common()]
    if down:
        last = down.most_common(1)[0][0]
        order = [name for name in order if name != last] + [last]
    return order, head
