"""The command line: `pycomm` and `python -m pycomm`. Its import is quick: see _command_line.py."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm import bench
from pycomm._command_line import COMMANDS, Parser
from pycomm.bench.support import packages
from pycomm.errors import Error


class _Version(argparse.Action):
    """Reads the version only if it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import pycomm

        print(f"pycomm {pycomm.__version__}")
        parser.exit()


def parser(torchrun: Sequence[Any] = ()) -> Parser:
    """The parser of all commands, but the options of benchmarks and of the demo. `torchrun`: its
    own parser, whose options launch accepts."""
    main = Parser(prog="pycomm", description="Collective communication.")
    main.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = main.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        parents = torchrun if name == "launch" else ()
        own: Parser = commands.add_parser(
            name,
            help=command.help,
            description=command.text,
            parents=parents,
            add_help=not parents,  # which have it
        )
        if name == "bench":
            own.add_argument("benchmark", choices=list(bench.BENCHMARKS))
        if name == "launch":
            own.usage = "pycomm launch [options] [torchrun's options] PROGRAM [its arguments]"
        if command.options is not None:
            command.options(own)
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name in ("bench", "demo"):
        return int(importlib.import_module(f"pycomm.{name}").main(rest))
    # The options of launch end where the program's begin.
    whole = name != "launch" or rest[:1] in (["-h"], ["--help"])
    options = parser().parse_args(words) if whole else argparse.Namespace(command=name)
    command = COMMANDS[options.command]
    if command.needs and (why := packages.missing(command.needs)):
        print(f"pycomm: {name} {why}", file=sys.stderr)
        return 2
    if name == "completion":
        return _complete(options.shell)
    return _run(name, options) if whole else _launch(rest)


def _run(name: str, options: argparse.Namespace) -> int:
    try:
        return int(importlib.import_module(f"pycomm.{COMMANDS[name].module}").main(options))
    except (Error, OSError) as error:  # of the input, or of a file
        print(f"pycomm {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # Ctrl-C
        return 128 + signal.SIGINT


def _launch(rest: Sequence[str]) -> int:
    try:
        from pycomm.launch import command

        return command.main(rest)
    except KeyboardInterrupt:  # before torch's agent handles signals, such as in `import torch`
        print("pycomm launch: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _complete(shell: str) -> int:
    """Prints the completion of a shell, with torchrun's options if torch is installed."""
    import shtab

    torchrun = []
    if not packages.missing("torch"):
        torchrun = [importlib.import_module("torch.distributed.run").get_args_parser()]
    whole = parser(torchrun)
    (commands,) = (one for one in whole._actions if isinstance(one, argparse._SubParsersAction))
    for own in commands.choices.values():
        for option in own._actions:
            if option.type is Path or "FILE" in (option.metavar, option.dest.upper()):
                vars(option)["complete"] = shtab.FILE
            if option.dest == "training_script":
                vars(option)["complete"] = shtab.FILE
    print(shtab.complete(whole, shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
