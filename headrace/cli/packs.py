"""packs: list, show and verify published kernels, have a running server take one or give it back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli import pack_make
from headrace.cli.control_client import add_port, ask_port, port_of
from headrace.cli.ps import PIPE_WIDTH
from headrace.core.control import PACK_REFUSED, PACK_ROLLED_BACK, Done, Rollback, Rollout
from headrace.core.errors import HeadraceError, PackError
from headrace.core.words import count

if TYPE_CHECKING:
    from headrace.core.packs import PackManifest
    from headrace.optimize.records import RolloutRecord
    from headrace.optimize.registry import Registry

EXAMPLES = """
  headrace packs list
  headrace packs show latest
  headrace packs verify ./folder
  headrace packs make ./kernels ./pack --on smollm2-135m --on gemma-3-270m --on smollm2-135m=int8
  headrace packs rollout 3fa2 --port 8000
  headrace packs rollback --port 8000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"examples:{EXAMPLES}"
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, summary: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        made.set_defaults(act=run)
        made.add_argument(
            "--registry", default="", metavar="URL", help="folder or fsspec URL (default: the user's own)"
        )
        return made

    listed = action("list", "every pack of the registry", _list)
    listed.add_argument("--json", action="store_true", help="print JSON, for programs")
    shown = action("show", "what a pack holds, and the evidence for it", _show)
    checked = action(
        "verify", "check signature, files and evidence, and whether it runs on this machine", _verify
    )
    rolled = action("rollout", "have a running server's replicas take it, a canary first", _rollout)
    for one in (shown, checked, rolled):
        one.add_argument(
            "pack", metavar="PACK", help="the beginning of its id, its name, `latest`, or a folder"
        )
    back = action("rollback", "have a running server's replicas run again what they ran before", _rollback)
    for one in (rolled, back):
        one.add_argument("--model", default="", metavar="NAME", help="which model (default: the only one)")
        one.add_argument("--approver", default="", metavar="WHO", help="who wants it (default: the user)")
        add_port(one)
    made = actions.add_parser(
        "make",
        help="judge kernels that somebody wrote on several models, and sign them as one pack",
        description="Judges kernels on several models: each right, and alone; together on whole workloads. "
        "The pack is signed with this machine's own key. Findings are kept, so that a run that was cut short "
        "goes on.",
        allow_abbrev=False,
    )
    pack_make.add_arguments(made)
    made.set_defaults(act=pack_make.main)
    action("audit", "who published, rolled out and took back what", _audit)


def main(arguments: argparse.Namespace) -> int:
    result: int = arguments.act(arguments)
    return result


def roll_out(
    registry: Registry, pack: str, *, port: int, model: str, approver: str, say: Callable[[str], None]
) -> RolloutRecord:
    """Has the server on ``port`` take the pack with this id, and keeps in the audit log what became of it.

    A refusal and a rollback are records; raises UnavailableError where no server listens, and PackError for
    a pack that does not hold.
    """
    from headrace.optimize.records import RolloutRecord

    folder = registry.fetch(pack)
    steps: list[str] = []

    def progress(line: str) -> None:
        steps.append(line)
        say(line)

    message = Rollout(folder=str(folder.resolve()), approver=approver, model=model)
    outcome: Any = "rolled_out"
    try:
        detail = ask_port(port, message, Done, timeout_s=None, say=progress).line
    except HeadraceError as error:
        if error.code not in (PACK_REFUSED, PACK_ROLLED_BACK):
            raise
        outcome = "rolled_back" if error.code == PACK_ROLLED_BACK else "refused"
        detail = error.message
    registry.record(outcome, pack, approver, f"port {port}: {detail}")
    return RolloutRecord(pack=pack, outcome=outcome, approver=approver, detail=detail, steps=steps)


def _registry(arguments: argparse.Namespace) -> Registry:
    from headrace.optimize.registry import Registry

    return Registry(arguments.registry)


def _found(arguments: argparse.Namespace) -> tuple[Path, PackManifest]:
    """The pack's folder and manifest, checked."""
    from headrace.optimize.packing import verify_pack

    folder = Path(arguments.pack)
    if (folder / "pack.json").exists():
        return folder, verify_pack(folder)
    registry = _registry(arguments)
    folder = registry.fetch(registry.find(arguments.pack).id)
    return folder, verify_pack(folder)


def _list(arguments: argparse.Namespace) -> int:
    import msgspec

    packs = _registry(arguments).packs()
    if arguments.json:
        rows = [{"id": one.id, **msgspec.to_builtins(one.manifest)} for one in packs]
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
        return 0
    header = ("pack", "name", "created", "author", "kernels", "gain")
    rows_ = [
        (
            one.id[:12],
            one.manifest.name,
            one.manifest.created[:16].replace("T", " "),
            one.manifest.author,
            ", ".join(entry.op for entry in one.manifest.kernels),
            one.manifest.summary,
        )
        for one in packs
    ]
    print_table(header, rows_, empty="no packs")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from headrace.optimize.journal import measurement_line
    from headrace.optimize.packing import pack_id, read_evidence

    folder, manifest = _found(arguments)
    conditions = manifest.conditions
    lines = [
        f"pack      {pack_id(folder)}",
        f"name      {manifest.name}, {manifest.licence}, {manifest.created}",
        f"author    {manifest.author}, round {manifest.round_id}",
        f"builds on {manifest.builds_on or 'stock operators'}",
        f"runs on   {conditions.device} with {' '.join(conditions.cpu_features) or 'any features'}",
        f"weights   {conditions.dtype}",
        f"shapes    {', '.join(f'{name} {value}' for name, value in conditions.shapes.items()) or 'any'}",
        f"gain      {manifest.summary}",
        f"folder    {folder}",
    ]
    for entry in manifest.kernels:
        rows = f"up to {count(entry.max_rows, 'row')}" if entry.max_rows else "any number of rows"
        says = ", the same bits in any batch" if entry.batch_invariant else ""
        lines += [
            "",
            f"{entry.op}: {', '.join(entry.phases)}, {rows}{says}, {entry.source}",
            f"  reads    {', '.join(entry.weight_formats)}",
        ]
        for one in read_evidence(folder, entry):
            target, verdict = one.target, one.verdict
            lines += [
                f"  on       {target.model}, {', '.join(dict.fromkeys(target.formats))}, {target.phase}",
                f"  why      {target.why}",
                f"  right    {verdict.detail or verdict.reason}, held by {verdict.sandbox}",
                f"  measured {measurement_line(one.measurement)}",
            ]
    print("\n".join(lines))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from headrace.kernels.native.build import cpu_features
    from headrace.optimize.packing import pack_id, read_evidence

    folder, manifest = _found(arguments)
    evidence = sum(len(read_evidence(folder, entry)) for entry in manifest.kernels)
    kernels = f"evidence of {count(len(manifest.kernels), 'kernel')}, {count(evidence, 'judgement')}"
    print(f"{pack_id(folder)[:12]} holds: signature, {count(len(manifest.files), 'file')}, {kernels}")
    missing = sorted(set(manifest.conditions.cpu_features) - cpu_features())
    if missing:
        print(f"it does not run on this machine, which lacks {', '.join(missing)}")
    return 0


def _rollout(arguments: argparse.Namespace) -> int:
    from headrace.optimize.packing import pack_id
    from headrace.optimize.registry import current_user

    registry = _registry(arguments)
    folder, _ = _found(arguments)
    identity = pack_id(folder)
    if folder == Path(arguments.pack):  # of a folder: the server gets what the registry keeps
        registry.publish(folder, approver=arguments.approver or current_user())
    record = roll_out(
        registry,
        identity,
        port=port_of(arguments),
        model=arguments.model,
        approver=arguments.approver or current_user(),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if record.outcome != "rolled_out":
        raise PackError(f"{record.outcome.replace('_', ' ')}: {record.detail}")
    print(record.detail)
    return 0


def _rollback(arguments: argparse.Namespace) -> int:
    from headrace.optimize.registry import current_user

    registry, approver = _registry(arguments), arguments.approver or current_user()
    port = port_of(arguments)
    message = Rollback(approver=approver, model=arguments.model)
    done = ask_port(port, message, Done, timeout_s=None)
    registry.record("rolled_back", "", approver, f"port {port}: {done.line}")
    print(done.line)
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    rows = [
        (
            event.at.replace("T", " "),
            event.action.replace("_", " "),
            event.pack[:12],
            event.approver,
            event.detail,
        )
        for event in _registry(arguments).audit()
    ]
    print_table(("at", "what", "pack", "approver", ""), rows, empty="nothing yet")
    return 0


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """On stdout; not folded where it is piped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    if not rows:
        console.print(empty)
        return
    table = Table(*header, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    console.print(table)
