"""`pycomm info`: what is built and what works on this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from typing import Any

import numpy as np

from pycomm import _c10d, _core, collectives, config, errors, testing
from pycomm._core_api import devices, nccl
from pycomm._tables import Table, console
from pycomm.observe import flight_report

PROBE_S = 5.0


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    shown: Any
    if options.flight:
        shown = (flight_report.facts if options.json else flight_report.report)(options.flight)
    else:
        shown = facts() if options.json else report()
    if options.json:
        print(json.dumps(shown))
    else:
        console().print(shown)
    return 0


def facts() -> dict[str, dict[str, str]]:
    """By section: names and their states. A variable that is not set is ""."""
    return {
        "built": _built(),
        "transports": {name: _viable(name) for name in config.TRANSPORTS},
        "collectives": {
            "dtypes": " ".join(_core.DTYPES),
            "reductions": " ".join(_core.REDUCE_OPS),
            "algorithms": " ".join(collectives.algorithms()),
        },
        "environment": {name: value for name, value, _ in config.described()},
    }


def report() -> Table:
    """The facts as a table, with the meaning of each variable."""
    shown = Table({"part": "", "state": ""}, headings=False)
    for title, rows in facts().items():
        shown.add(title, "")
        for name, text in rows.items():
            meaning = config.VARIABLES.get(name)
            shown.add(f"  {name}", f"{text or '-':<10} {meaning}" if meaning else text)
    return shown


def _built() -> dict[str, str]:
    return {
        "pycomm": version("pycomm-collectives"),
        "python": f"{platform.python_version()}, numpy {np.__version__}",
        "_core": f"g++ {_core.compiler}",
        "_c10d": _torch_backend(),
        "_cuda": "built" if devices.has_cuda_module() else "not built",
        "nccl": nccl.described(),
    }


def version(distribution: str) -> str:
    """The version of an installed distribution, or "not installed"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # shown in the table
        return "not installed"


def _torch_backend() -> str:
    """For which versions of torch the backend is built, and the installed version."""
    built = ", ".join(f"{major}.{minor}" for major, minor in _c10d.versions())
    return f"built for torch {built or 'no version'} (torch {version('torch')})"


def _viable(transport: str) -> str:
    why = why_not(transport)
    return f"no: {why}" if why else "yes"


def why_not(transport: str) -> str:
    """Why two ranks cannot communicate with this transport here, or "". Runs two ranks."""
    try:
        testing.run_ranks(2, _hello, transport=transport, timeout_s=PROBE_S)
    except errors.Error as error:  # shown in a table
        return str(error)
    return ""


def _hello(group: object) -> None:
    collectives.all_reduce(np.ones(1, np.float32))
