"""The process of a rank under `pycomm launch`: sets up the worker, then runs the user's program.

`python -m pycomm.launch.rank [options] script args`; command.py builds this command line.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import importlib.machinery
import io
import os
import pkgutil
import runpy
import shutil
import signal
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycomm import default_group
from pycomm.launch import failure, worker_setup


def parser() -> argparse.ArgumentParser:
    """The options that the launcher passes to a rank."""
    options = argparse.ArgumentParser(prog="pycomm.launch.rank")
    options.add_argument("--parent", type=int, required=True)
    options.add_argument("--cpus-per-rank", type=int)
    options.add_argument("--set-device", action="store_true")
    options.add_argument("--join-streams", action="store_true")
    options.add_argument("--replace", type=int)
    options.add_argument("--kind", choices=("script", "module", "command"), required=True)
    options.add_argument("program")
    options.add_argument("rest", nargs=argparse.REMAINDER)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; writes a failure report for the launcher."""
    options = parser().parse_args(argv)
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is not signal.SIG_IGN:  # ends the process silently until the program begins
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # agent.py blocked it
    if options.replace is not None:
        _supervise(options.parent, options.replace, _replaceable(argv or sys.argv[1:]))
    env = os.environ
    if options.join_streams:  # one log for both, in order
        os.dup2(1, 2)
    env.update(
        worker_setup.variables(
            *(int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        )
    )
    local_rank = int(env["LOCAL_RANK"])
    spare = local_rank >= int(env["LOCAL_WORLD_SIZE"])  # uses any processor
    cpus = None if spare else options.cpus_per_rank
    worker_setup.setup_worker(options.parent, local_rank, cpus, options.set_device)
    try:
        if options.kind == "command":
            _supervise(options.parent, -1, [options.program, *options.rest])
        signal.signal(signal.SIGINT, on_interrupt)
        sys.argv = [options.program, *options.rest]
        _run(options.program, options.kind == "module")
    except SystemExit as error:
        if error.code not in (None, 0):
            _failed(error)
        raise
    except BaseException as error:  # of any kind: reported
        trace = _failed(error)
        if isinstance(error, KeyboardInterrupt) and _in_import(error):
            trace = f"rank {env['RANK']} was interrupted while it imported modules\n"
        sys.stderr.write(trace)
        sys.exit(1)


def _run(program: str, is_module: bool) -> None:
    """Runs the program as python does: it is `__main__` until the process ends, also for threads
    that outlive its last line and for objects that child processes send.
    """
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing's other name of it
        sys.modules["__mp_main__"] = main
    as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what python -m calls
    safe = getattr(sys.flags, "safe_path", False)  # else sys.path begins with this folder, by -m
    if is_module:
        as_main(program)
    elif pkgutil.get_importer(program) is not None:  # a folder or an archive with a __main__.py
        sys.path[: 0 if safe else 1] = [program]
        as_main("__main__", alter_argv=False)
    else:
        if not safe:
            sys.path[0] = os.path.dirname(os.path.realpath(program))
        path = os.path.abspath(program)
        main.__dict__.update(__builtins__=builtins, __file__=path, __cached__=None)
        compiled = path.endswith(".pyc")
        machinery = importlib.machinery
        kind = machinery.SourcelessFileLoader if compiled else machinery.SourceFileLoader
        main.__loader__ = kind("__main__", path)
        if compiled:
            code = main.__loader__.get_code("__main__")
        else:
            with io.open_code(path) as file:  # the loader would write a .pyc
                code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def _replaceable(given: Sequence[str]) -> list[str]:
    """The command line of a rank whose launcher is this process, from that of this process."""
    end = given.index("--")  # of its own options
    own = [word for word in given[:end] if not word.startswith(("--parent=", "--replace="))]
    line = [sys.executable, "-u", "-m", "pycomm.launch.rank", f"--parent={os.getpid()}"]
    return [*line, *own, *given[end:]]


def _supervise(launcher: int, replacements: int, command: list[str]) -> None:
    """Replaces this process by the supervisor of a command; does not return."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} not found or not executable")
    script = str(Path(__file__).with_name("supervisor.py"))
    os.execv(
        sys.executable,
        [sys.executable, "-I", "-S", script, str(launcher), str(replacements), *command],
    )


def _in_import(error: BaseException) -> bool:
    """Whether the program was importing a module, so that its traceback shows that module's."""
    frames = traceback.walk_tb(error.__traceback__)
    return [frame.f_code.co_name for frame, _ in frames].count("<module>") > 1


def _failed(error: BaseException) -> str:
    """Reports the failure to this host's launcher, to the other hosts and to ranks that wait for
    this one; returns the traceback.
    """
    env = os.environ
    mine = failure.of_error(int(env["RANK"]), error)
    file = env.get("TORCHELASTIC_ERROR_FILE")
    if file:
        failure.write(file, mine, None)
    if "PYCOMM_ELASTIC_FILE" in env:  # the others replace it: they see that it leaves the group
        return mine.trace or traceback.format_exc()
    with contextlib.suppress(Exception):  # there is no group, or it is broken already
        default_group.default().abort(f"rank {mine.rank} failed with {mine.kind}: {mine.text}")
    # Last: a store that does not answer or has invalid content must not delay the above.
    if env["WORLD_SIZE"] != env["LOCAL_WORLD_SIZE"]:
        cause = failure.post(mine, env["MASTER_ADDR"], int(env["MASTER_PORT"]))
        if file and cause:
            failure.write(file, mine, cause)
    return mine.trace or traceback.format_exc()


if __name__ == "__main__":
    main()
