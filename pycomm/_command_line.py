"""The command lines of all commands: their options and texts, and how they end.

The import needs neither torch nor NumPy, so that --help and completion are quick.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pycomm.errors import Error

RESULTS = "where to store the results; a file *.csv has the rows alone"
FIGURES = "print the figures as JSON"
RATES_GBIT = (1.0, 10.0, 100.0)  # of pycomm.plan
RANKS = (2, 8, 64, 512, 4096)


class Parser(argparse.ArgumentParser):
    """Names the nearest word that it knows for one that it does not; keeps the lines of texts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown options itself: the parser above would print its own usage."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message; ends with status 2."""
        wrong = re.search(r"(?:invalid choice: '|unrecognized arguments: )([\w-]+)", message)
        choices = re.findall(r"[\w-]+", message.partition("choose from")[2])
        near = nearest(wrong[1], choices or self._option_string_actions) if wrong else ""
        super().error(f"{message}{near}")


def nearest(word: str, known: Iterable[str]) -> str:
    """ ": did you mean ...?" with the nearest of the known words; "" if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


@dataclass(frozen=True)
class Command:
    """A command of `pycomm`.

    Attributes:
        module: main(options) of this module runs it.
        help: its line in the list of commands.
        text: the text of its own --help.
        options: adds its options to a parser; None: main() parses the words itself.
        needs: the optional package that it needs, or "".
    """

    module: str
    help: str
    text: str = ""
    options: Callable[[argparse.ArgumentParser], object] | None = None
    needs: str = ""


def parser(command: str, text: str | None, plot: str | None = None) -> Parser:
    """The parser of `pycomm COMMAND`; `text` keeps its lines. That of a benchmark has --json and,
    if it draws something, --plot; `plot` is None for others."""
    made = Parser(prog=f"pycomm {command}", description=text)
    if plot is not None:
        made.add_argument("--json", type=Path, help=RESULTS)
    if plot:
        made.add_argument("--plot", type=Path, help=f"where to draw {plot}")
    return made


def numbers(
    kind: type[int] | type[float], fits: Callable[[Any], bool], expected: str
) -> Callable[[str], list[Any]]:
    """The type of an option: numbers with commas between them, each of which fits."""

    def parse(text: str) -> list[Any]:
        try:
            found = [kind(word) for word in text.split(",")]
        except ValueError:  # refused below
            found = []
        if not found or not all(map(fits, found)):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers {expected}")
        return found

    return parse


def number(
    kind: type[int] | type[float], fits: Callable[[Any], bool], expected: str
) -> Callable[[str], Any]:
    """The type of an option: one number that fits."""

    def parse(text: str) -> Any:
        found = numbers(kind, fits, expected)(text)
        if len(found) > 1:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected one number {expected}")
        return found[0]

    return parse


def ending(command: Callable[[], int]) -> int:
    """The exit status of a command that starts ranks: 1 if one failed, 130 after Ctrl-C."""
    from pycomm._tables import console  # imports rich, which --help does not need

    try:
        return command()
    except Error as error:  # RankFailed, or that of run_ranks
        console().print(f"a rank failed\n{error}", style="red")
        return 1
    except KeyboardInterrupt:  # Ctrl-C
        console().print("interrupted")
        return 130


def _info(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--flight", nargs="+", metavar="FILE", help="show the ranks' last calls from flight records"
    )
    to.add_argument("--json", action="store_true", help=FIGURES)


def _doctor(to: argparse.ArgumentParser) -> None:
    to.add_argument("--json", action="store_true", help="print the findings as JSON")


def launch(to: argparse.ArgumentParser) -> None:
    """Adds pycomm's own options to torchrun's."""
    ours = to.add_argument_group("pycomm")
    ours.add_argument("--nproc", dest="nproc_per_node", metavar="N", help="ranks on this host")
    ours.add_argument("--devices", "--gpus", metavar="0,1", help="GPUs to use; one rank on each")
    ours.add_argument(
        "--encrypt", action="store_true", help="encrypt traffic between hosts (docs/launching.md)"
    )
    ours.add_argument(
        "--cpus-per-rank",
        type=int,
        metavar="N",
        help="bind each to N processors; 0: to none (default: an equal share, if there is one)",
    )
    ours.add_argument(
        "--replace",
        type=int,
        default=0,
        metavar="N",
        help="start a new process in place of one that fails, at most N times for each; the "
        "others stay up (docs/launching.md)",
    )
    ours.add_argument(
        "--replace-backend",
        metavar="gloo[,except=PATTERN]",
        help="pycomm's groups in place of those of torch's gloo (docs/replace_gloo.md)",
    )
    ours.add_argument(
        "--spares",
        type=int,
        metavar="K",
        help="start K more processes on this host, which wait in pycomm.init() to take the rank of "
        "one that fails; with --nproc 0 it has no others, and the other hosts need --spares 0",
    )
    ours.add_argument(
        "--min-ranks",
        type=int,
        default=0,
        metavar="M",
        help="continue without ranks that no process can replace, while M are left (default: all)",
    )
    ours.add_argument(
        "--quiet", action="store_true", help="do not print the configuration and the environment"
    )
    key = ours.add_mutually_exclusive_group()
    key.add_argument(
        "--secret-file", metavar="FILE", help="file of mode 0600 with the shared secret"
    )
    key.add_argument(
        "--secret-fd", type=int, metavar="N", help="read the secret from an open descriptor"
    )


def _tune(to: argparse.ArgumentParser) -> None:
    several = number(int, lambda n: n > 1, "above 1")
    to.add_argument("--ranks", type=several, default=4, help="ranks to start (%(default)s)")


def _plan(to: argparse.ArgumentParser) -> None:
    count = number(int, lambda n: 0 < n < 2**31, "above 0")
    to.add_argument("--width", type=count, default=1432, help="width of a layer (%(default)s)")
    to.add_argument("--layers", type=count, default=20, help="(%(default)s: 41 M parameters)")
    to.add_argument("--rows", type=count, default=64, help="rows of a batch (%(default)s)")
    ranks, rates = ",".join(map(str, RANKS)), ",".join(f"{rate:g}" for rate in RATES_GBIT)
    several = numbers(int, lambda n: 1 < n < 2**31, "from 2 to 2147483647")
    positive = numbers(float, lambda n: 1e-6 <= n <= 1e6, "from 1e-6 to 1e6")
    to.add_argument("--ranks", type=several, default=ranks, help="(%(default)s)")
    to.add_argument("--gbit", type=positive, default=rates, help="of a link (%(default)s)")
    to.add_argument("--json", type=Path, help="where to store all figures")


def _trace(to: argparse.ArgumentParser) -> None:
    to.add_argument("folder", type=Path, help="the folder given as PYCOMM_TRACE")
    to.add_argument("--out", type=Path, help="output file (FOLDER/trace.json)")
    to.add_argument("--json", action="store_true", help=f"{FIGURES} in place of the table")


def _top(to: argparse.ArgumentParser) -> None:
    to.add_argument("--once", action="store_true", help="print one table and exit")
    to.add_argument("--svg", metavar="FILE", help="with --once: draw the table to FILE")
    seconds = number(float, lambda s: 0 < s < math.inf, "above 0")
    to.add_argument("--every", type=seconds, default=1.0, metavar="S", help="interval in s (1)")
    to.add_argument("--group", metavar="PATTERN", help='only groups of such names, as "world*"')
    to.add_argument("--program", metavar="TEXT", help="only ranks with TEXT in their command line")
    to.add_argument("--json", action="store_true", help="print a line of JSON for each table")
    to.add_argument(
        "--textfile",
        type=Path,
        metavar="FILE",
        help="write metrics for the textfile collector of Prometheus' node_exporter, and no table",
    )
    to.add_argument(
        "--listen",
        type=number(int, lambda port: 0 <= port < 65536, "from 0 to 65535"),
        metavar="PORT",
        help="serve metrics for Prometheus at http://127.0.0.1:PORT/metrics; 0: a free port",
    )


def _completion(to: argparse.ArgumentParser) -> None:
    to.add_argument("shell", choices=("bash", "zsh", "tcsh"))


COMMANDS = {
    "info": Command(
        *("observe.info", "show what is built and what works on this machine"),
        "Shows versions, transports that work, algorithms and the variables of the environment.",
        _info,
    ),
    "doctor": Command(
        *("observe.doctor", "check a machine or a cluster"),
        """Checks a machine, or a cluster, before a run.

Alone it checks this machine. Started on every host by a launcher
(`pycomm launch ... -m pycomm doctor`) it also forms a group, compares the hosts and measures links:
between two ranks of each host, and between the hosts. Exits with 1 if a check failed: then calls
would fail too. A warning means that something is slow, or that a part cannot be used.""",
        _doctor,
    ),
    "launch": Command(
        *("launch.command", "start a program's ranks"),
        """Starts one process per device, or --nproc processes, on each host.

torchrun's options work as well, such as --nnodes, --rdzv-endpoint, --max-restarts, --log-dir,
--tee, -m and --no-python: `torchrun --help`.""",
        launch,
        "torch",
    ),
    "tune": Command(
        *("tuning.tune", "measure algorithm thresholds"),
        """Measures at which sizes to switch algorithms, and stores the thresholds.

Alone it starts ranks on this machine, connected by tcp. Started on every host by a launcher
(`pycomm launch ... -m pycomm tune`) it measures the real network, and rank 0's machine stores the
result: rank 0's thresholds apply to the whole group. It takes seconds.

Measure with the number of ranks of later runs, or with 4: for 3 to 8 ranks the threshold of
`direct` is about the same. For 2 ranks both algorithms send the same amount and it is higher.""",
        _tune,
    ),
    "plan": Command(
        *("tuning.planner", "predict step times for more ranks"),
        """Predicts the time of a training step for other ranks and links.

Measures a step of a multilayer perceptron and the compression kernels on this process alone. The
sent bytes are computed and divided by the link's bandwidth. The model assumes no overlap of
communication with the backward pass and a latency of 0.1 ms per call: it suits large gradients.
*take* is the fastest method, or - if dense gradients take less than 2 % longer.""",
        _plan,
        "torch",
    ),
    "demo": Command("demo", "train a model on two processes"),
    "trace": Command(
        *("observe.trace", "merge traces into one timeline"),
        """Merges the ranks' traces into one timeline for a trace viewer, with a table of waits.

PYCOMM_TRACE names the folder for the traces of each rank. Ranks of one host share a clock. Clocks
of different hosts are aligned by the calls: no rank completes an all_reduce before every rank has
begun it, so each call bounds the difference of two clocks from both sides.""",
        _trace,
    ),
    "top": Command(
        *("observe.top", "show running ranks of this host"),
        """Shows what the ranks of this host do, and refreshes.

Reads the flight recorder in each rank's memory: the ranks are not involved or slowed down, and
stopped ranks are shown as well. Ranks of other users are not shown.""",
        _top,
    ),
    "bench": Command("bench", "run a benchmark"),
    "completion": Command(
        *("", "print the completion of a shell"),
        'Prints the completion of a shell: add `eval "$(pycomm completion bash)"` to ~/.bashrc.',
        _completion,
        "shtab",
    ),
}
