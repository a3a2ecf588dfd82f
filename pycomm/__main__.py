"""The command line: `pycomm` and `python -m pycomm`."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from pycomm.bench.support import packages

MODULES = {  # by command
    "plan": "tuning.planner",
    "tune": "tuning.tune",
    "trace": "observe.trace",
    "top": "observe.top",
    "doctor": "observe.doctor",
}
NEEDS = {"launch": "torch", "plan": "torch"}  # the optional package of a command


def parser() -> argparse.ArgumentParser:
    """The parser of command names; each command parses its own options."""
    main = argparse.ArgumentParser(prog="pycomm", description="Collective communication.")
    commands = main.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="show what is built and what works on this machine")
    info.add_argument(
        "--flight", nargs="+", metavar="FILE", help="show the ranks' last calls from flight records"
    )
    doctor = commands.add_parser("doctor", help="check a machine or a cluster", add_help=False)
    launch = commands.add_parser("launch", help="start a program's ranks", add_help=False)
    tune = commands.add_parser("tune", help="measure algorithm thresholds", add_help=False)
    plan = commands.add_parser("plan", help="predict step times for more ranks", add_help=False)
    demo = commands.add_parser("demo", help="train a model on two processes", add_help=False)
    trace = commands.add_parser("trace", help="merge traces into one timeline", add_help=False)
    top = commands.add_parser("top", help="show running ranks of this host", add_help=False)
    bench = commands.add_parser("bench", help="run a benchmark", add_help=False)
    for command in (doctor, launch, tune, plan, demo, trace, top, bench):
        command.set_defaults(rest=[])
    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name in NEEDS and (why := packages.missing(NEEDS[name])):
        print(f"pycomm: {name} {why}", file=sys.stderr)
        return 2
    if name == "launch":  # its options end where the program's begin
        return _launch(words[1:])
    if name == "bench":
        from pycomm import bench

        return bench.main(words[1:])
    chosen, rest = parser().parse_known_args(words)
    if chosen.command == "info":
        if rest:
            parser().error(f"info: unexpected arguments: {' '.join(rest)}")
        return _info(chosen.flight)
    if chosen.command in MODULES:
        module = importlib.import_module(f"pycomm.{MODULES[chosen.command]}")
        return int(module.main(rest))
    from pycomm import demo

    return demo.main(rest)


def _launch(rest: Sequence[str]) -> int:
    try:
        from pycomm.launch import command

        return command.main(rest)
    except KeyboardInterrupt:  # before torch's agent handles signals, such as in `import torch`
        print("pycomm launch: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT


def _info(flight: Sequence[str] | None) -> int:
    from pycomm._tables import console
    from pycomm.errors import InvalidArgument
    from pycomm.observe import flight_report as records
    from pycomm.observe import info

    try:
        console().print(records.report(flight) if flight else info.report())
    except InvalidArgument as error:  # a file is not a flight record
        print(f"pycomm: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
