"""run: answer one prompt offline, without a server, and print the text on stdout."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from headrace.cli.console import Printer
from headrace.cli.flags import add_flags, load_config
from headrace.cli.pack_check import check_pack
from headrace.core.errors import UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.packs import explicit_pack
from headrace.core.request import SamplingParams

SAMPLING_FLAGS = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "n": int,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="short name, folder, .gguf file or hub id")
    parser.add_argument("prompt", nargs="?", default="-", help="the prompt; - or nothing: read stdin")
    parser.add_argument(
        "--raw", action="store_true", help="complete the prompt as it is, without the chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    group = parser.add_argument_group("sampling")
    for name, kind in SAMPLING_FLAGS.items():
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            type=kind,
            default=argparse.SUPPRESS,
            metavar=kind.__name__.upper(),
        )
    add_flags(parser, "engine", EngineConfig)


def main(arguments: argparse.Namespace) -> int:
    flags = vars(arguments)
    engine = load_config(EngineConfig, flags, os.environ, {})
    sampling = {name: flags[name] for name in SAMPLING_FLAGS if name in flags}
    params = SamplingParams(**{"max_tokens": 512, **sampling})
    params.validate()
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not prompt.strip():
        raise UsageError("a prompt is needed, and it is empty", hint='headrace run MODEL "your prompt"')
    if arguments.raw and arguments.system:
        raise UsageError(
            "--system needs the chat template, which --raw leaves out", hint="drop one of the two"
        )

    if pack := explicit_pack(engine.pack):
        check_pack(Path(pack))
    from headrace.llm import LLM

    printer = Printer()
    with printer.progress() as progress:
        llm = LLM(arguments.model, progress=progress, **msgspec.structs.asdict(engine))
    with llm:
        printer.line(llm.kernels)
        if arguments.raw or not llm.tokenizer.has_chat_template:
            results = llm.generate(prompt, params)
        else:
            system = [{"role": "system", "content": arguments.system}] if arguments.system else []
            results = llm.chat([*system, {"role": "user", "content": prompt}], params)
    for output in results[0].outputs:
        print(output.text)
    return 0
