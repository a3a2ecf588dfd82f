"""`pycomm launch`: torch's elastic launcher with a configuration table, log files and worker setup.

It accepts torchrun's options, on one and on several hosts. rank.py runs in the ranks' processes.
"""

from __future__ import annotations

import argparse
import errno
import importlib.machinery
import importlib.util
import io
import logging
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycomm import _command_line
from pycomm import _secret as secret
from pycomm.config import kept_from_replacement
from pycomm.errors import InvalidArgument
from pycomm.launch import failure, folder, local_rendezvous, tables, worker_setup
from pycomm.launch.losses import Replacement, TooFewRanks

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


def parser() -> argparse.ArgumentParser:
    """torchrun's parser with pycomm's options and defaults for one host."""
    from torch.distributed import run

    own = _command_line.COMMANDS["launch"]
    made = _command_line.Parser(
        prog="pycomm launch",
        description=own.text,
        parents=[run.get_args_parser()],
        add_help=False,  # torchrun's parser has it
    )
    _command_line.launch(made)
    made.set_defaults(
        nproc_per_node=os.environ.get("PET_NPROC_PER_NODE"), log_dir=os.environ.get("PET_LOG_DIR")
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Launches and waits; returns the exit status: 0, or that of the rank that failed first."""
    _open_closed_streams()
    options = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # also into pipes: print ranks' lines at once
    if os.environ.get("LOGLEVEL") is None:  # torch's messages on a failure would repeat pycomm's
        for name in ("", ".agent.server.api"):  # the latter gets a level of its own
            logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    with folder.temporary() as errors:
        try:
            config, command = prepared(options, errors)
        except (InvalidArgument, ValueError) as error:
            print(f"pycomm launch: {error}", file=sys.stderr)
            return 2
        return _run(config, command, options)


def _open_closed_streams() -> None:
    """Discards the output to a stream that was closed (`>&-`), as print() does. Otherwise a file
    that is opened later would take its descriptor and receive the output of child processes.
    """
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _run(config: LaunchConfig, command: list[str], options: argparse.Namespace) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from pycomm.launch import agent

    status = 0
    try:
        agent.launch(config, sys.executable, *command)
    except (ChildFailedError, TooFewRanks) as error:
        if isinstance(error, TooFewRanks):
            print(f"pycomm launch: {error}", file=sys.stderr)
        status = _report(error.failures, options.log_dir)
    except InvalidArgument as error:  # the hosts have different options
        print(f"pycomm launch: {error}", file=sys.stderr)
        status = 2
    except RendezvousError as error:
        print(
            f"pycomm launch: rendezvous at {options.rdzv_endpoint} failed, or the launcher there "
            f"ended: {error.__cause__ or error}",
            file=sys.stderr,
        )
        status = 1
    except SignalException as error:
        print(f"pycomm launch: stopped by {error.sigval.name}", file=sys.stderr)
        status = 128 + int(error.sigval)
    return status


def prepared(options: argparse.Namespace, errors: str) -> tuple[LaunchConfig, list[str]]:
    """The configuration of torch's launcher, and a rank's command line without the interpreter.

    Args:
        options: the parsed options.
        errors: a folder for the failure reports of ranks.

    Raises:
        InvalidArgument: the options do not fit together, or exceed this host's resources.
    """
    from torch.distributed import run

    _check_program(options)
    replacement = _replacement(options)
    count, devices, ranks = _ranks(options)
    options.nproc_per_node = str(count + options.spares)
    if options.cpus_per_rank is None:
        options.cpus_per_rank = worker_setup.share_of(count)
    if options.cpus_per_rank < 0:
        raise InvalidArgument(
            f"invalid --cpus-per-rank: got {options.cpus_per_rank}, expected at least 0"
        )
    if options.cpus_per_rank and count:
        worker_setup.cores_of(count - 1, options.cpus_per_rank)
    os.environ.update(worker_setup.threads_for(count or options.spares, options.cpus_per_rank))
    key = _key(options)
    if options.encrypt:
        _encrypt(options, key)
    if options.replace_backend is not None:
        _replace_backend(options.replace_backend)
    if replacement and _several(options) and not key:
        raise InvalidArgument(
            "--replace, --spares and --min-ranks need PYCOMM_SECRET on several hosts, the same on "
            "all of them"
        )
    serves = _choose_rendezvous(options)
    all_ranks = options.tee not in ("0", 0)  # torchrun's option
    options.tee = options.redirects = "0"  # in our logs, not in torch's
    given, options.log_dir = options.log_dir, os.devnull
    config, _, _ = run.config_from_args(options)
    options.log_dir = folder.for_logs(given)
    rows = _rows(options, ranks, devices)
    if replacement:
        rows.append(("replacement", replacement.row()))
    logs = config.logs_specs = tables.Logs(options.log_dir, all_ranks, rows, errors)
    if not key and _several(options):
        where = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
        print(f"pycomm launch: {local_rendezvous.missing_secret_warning(where)}", file=sys.stderr)
    elif not key:
        key = local_rendezvous.new_key()
    logs.variables = {"PYCOMM_SECRET": key} if key else {}
    logs.replacement, logs.quiet = replacement, options.quiet
    logs.serves_rendezvous = serves
    if config.log_line_prefix_template is None:  # torch treats an empty one as unset
        config.role = "" if options.role == "default" else options.role
        config.log_line_prefix_template = "[rank ${rank}] " if all_ranks else "${role_name}"
    return config, _command(options, devices > 0, replacement is not None)


def _check_program(options: argparse.Namespace) -> None:
    """Raises InvalidArgument if there is no such program."""
    program = options.training_script
    if options.no_python:
        found = shutil.which(program) is not None
    elif options.module:
        top = program.partition(".")[0]
        here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])
        found = bool(top) and (here or importlib.util.find_spec(top)) is not None
    else:
        found = os.path.exists(program)
    if not found:
        kind = "command" if options.no_python else "module" if options.module else "file"
        raise InvalidArgument(f"there is no {kind} {program}")


def _replacement(options: argparse.Namespace) -> Replacement | None:
    """How ranks are replaced; None: they are not."""
    for name in ("replace", "spares", "min_ranks"):
        if (getattr(options, name) or 0) < 0:
            raise InvalidArgument(
                f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least 0"
            )
    if not options.replace and options.spares is None and not options.min_ranks:
        return None
    least, _, most = str(options.nnodes).partition(":")
    if most not in ("", least):
        raise InvalidArgument(
            f"--nnodes {options.nnodes}: --replace, --spares and --min-ranks need a fixed number "
            "of hosts"
        )
    if options.max_restarts:
        raise InvalidArgument(
            f"--max-restarts {options.max_restarts} restarts all ranks; --replace, --spares and "
            "--min-ranks replace those that fail: pass one or the other"
        )
    return Replacement(options.replace, options.min_ranks, options.spares or 0)


def _several(options: argparse.Namespace) -> bool:
    """Whether the run may have more than one host."""
    return str(options.nnodes) not in ("1", "1:1")


def _key(options: argparse.Namespace) -> str:
    """The run's key if a secret is given; stretched once here, not in every rank."""
    text = os.environ.get("PYCOMM_SECRET", "")
    if options.secret_file is not None:
        text = secret.read_file(options.secret_file)
    elif options.secret_fd is not None:
        text = secret.read_descriptor(options.secret_fd)
    elif text:
        secret.check(text, "PYCOMM_SECRET")
    return secret.key_of(text) if text else ""


def _ranks(options: argparse.Namespace) -> tuple[int, int, str]:
    """The ranks and the usable GPUs of this host, and a text about the ranks for the table."""
    import torch
    from torch.distributed import run

    options.spares = options.spares or 0
    if options.devices is not None:
        _choose_devices(options)
    devices = torch.cuda.device_count()
    if options.devices is not None and devices < len(options.devices.split(",")):
        raise InvalidArgument(
            f"--devices {options.devices}: CUDA finds {devices} of these; to train on the CPU, "
            "pass --nproc N instead"
        )
    note = ""
    if options.nproc_per_node is None:
        most = max(1, devices - options.spares) if devices else 0
        options.nproc_per_node = str(worker_setup.default_count(most))
        if not devices:
            note = f": one per {worker_setup.CORES_PER_RANK} processors; --nproc N sets it"
    count = run.determine_local_world_size(options.nproc_per_node)
    if not (count > 0 or (count == 0 and options.spares)):
        raise InvalidArgument(
            f"--nproc {count}: expected at least 1, or 0 with --spares on a host of spares"
        )
    if options.spares and 0 < devices < count + options.spares:
        raise InvalidArgument(
            f"--spares {options.spares}: each spare process needs a GPU of its own: {count} ranks "
            f"and {options.spares} spares need {count + options.spares}, got {devices}"
        )
    if shared := worker_setup.shared_devices(count, devices):
        note = f", {shared}"
    return count, devices, f"{count}{note}"


def _choose_devices(options: argparse.Namespace) -> None:
    """--devices: one rank for each; the ranks see only these devices."""
    requested = [one.strip() for one in options.devices.split(",")]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = seen.split(",") if seen else None
    if not all(one.isdigit() for one in requested) or len(set(requested)) != len(requested):
        raise InvalidArgument(
            f"invalid --devices: got {options.devices}, expected distinct numbers with commas"
        )
    if known is not None and not set(requested) <= set(known):
        raise InvalidArgument(f"--devices {options.devices}, but CUDA_VISIBLE_DEVICES is {seen}")
    count = max(1, len(requested) - options.spares)
    if options.nproc_per_node not in (None, str(count)):
        raise InvalidArgument(f"--devices {options.devices} means --nproc {count}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(requested)
    options.nproc_per_node = str(count)


def _encrypt(options: argparse.Namespace, key: str) -> None:
    """--encrypt: passed on to the ranks. On several hosts the user must give a secret."""
    if _several(options) and not key:
        raise InvalidArgument(
            f"--encrypt with --nnodes {options.nnodes} needs PYCOMM_SECRET, the same on all hosts; "
            'to make one: python -c "import secrets; print(secrets.token_hex(32))"'
        )
    os.environ["PYCOMM_ENCRYPT"] = "1"


def _replace_backend(value: str) -> None:
    """--replace-backend: the variable, which ranks and the processes that they start inherit."""
    kept_from_replacement(value, "--replace-backend")
    os.environ["PYCOMM_REPLACE"] = value


def _choose_rendezvous(options: argparse.Namespace) -> bool:
    """Chooses the rendezvous: on one host the loopback address and a free port, on several hosts
    the given endpoint. Returns whether this launcher serves torch's store.
    """
    serves: bool = options.node_rank == 0
    several = _several(options)
    if (
        not several
        and options.rdzv_backend in ("static", "c10d")
        and _is_local(options.rdzv_endpoint)
    ):
        port = options.rdzv_endpoint.rpartition(":")[2] or options.master_port or 0
        options.rdzv_backend = local_rendezvous.register_rendezvous()
        options.rdzv_endpoint = f"{local_rendezvous.LOOPBACK}:{port}"
        options.rdzv_id, options.local_addr = str(uuid.uuid4()), local_rendezvous.LOOPBACK
    elif several and options.rdzv_endpoint and options.rdzv_backend == "static":
        options.rdzv_backend = "c10d"
    if options.rdzv_endpoint and options.rdzv_backend != local_rendezvous.BACKEND:
        own, here = _local_address(options.rdzv_endpoint)
        options.local_addr = options.local_addr or own
        serves = here and (options.rdzv_backend != "c10d" or _is_first(options))
        if options.rdzv_backend == "c10d" and (here or not _own_name_resolves()):
            options.rdzv_conf = ",".join([*filter(None, [options.rdzv_conf]), f"is_host={serves}"])
    given = options.master_addr != "127.0.0.1" or options.master_port is not None
    if options.rdzv_backend == "static" and not given:
        raise InvalidArgument(
            "several hosts need a rendezvous: pass --rdzv-endpoint HOST:PORT to all, one of "
            "them and a free port there (or --master-addr, --master-port and --node-rank)"
        )
    if options.master_port is None:
        options.master_port = 29500
    return serves


def _is_first(options: argparse.Namespace) -> bool:
    """Whether no other launcher on this host has this endpoint: it serves torch's store, and those
    that come later are clients, as torchrun's. It has it as long as `options` exist."""
    options.held = socket.socket(socket.AF_UNIX)
    try:
        options.held.bind(f"\0pycomm-launch-{options.rdzv_endpoint.rpartition(':')[2]}")
    except OSError as error:  # another launcher has it, or a failure, raised again
        options.held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _is_local(endpoint: str) -> bool:
    """Whether a rendezvous endpoint is empty, or HOST:PORT of this host."""
    if not endpoint:
        return True
    return endpoint.rpartition(":")[2].isdigit() and _local_address(endpoint)[1]


def _local_address(endpoint: str) -> tuple[str | None, bool]:
    """The address from which this host reaches the endpoint, and whether the endpoint is this host.
    No packet is sent.
    """
    host = endpoint.rpartition(":")[0].strip("[]") or endpoint
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
            return own, own == address[0]
    except OSError:  # unknown host: torch reports it
        return None, False


def _own_name_resolves() -> bool:
    """Whether this host's name resolves to an address, which torch looks up otherwise."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:  # the host's own name has no address
        return False
    return True


def _command(options: argparse.Namespace, devices: bool, replaces: bool) -> list[str]:
    kind = "command" if options.no_python else "module" if options.module else "script"
    line = ["-u", "-m", "pycomm.launch.rank", f"--parent={os.getpid()}", f"--kind={kind}"]
    line += ["--join-streams"]
    line += [f"--cpus-per-rank={options.cpus_per_rank}"] if options.cpus_per_rank else []
    line += ["--set-device"] if devices and kind != "command" else []
    line += [f"--replace={options.replace}"] if replaces else []
    return [*line, "--", options.training_script, *options.training_script_args]


def _rows(options: argparse.Namespace, ranks: str, devices: int) -> list[tuple[str, str]]:
    """The configuration, for the table."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    bound = f"{options.cpus_per_rank}, bound" if options.cpus_per_rank else "shared by all"
    endpoint = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    return [
        ("program", " ".join([options.training_script, *options.training_script_args])),
        ("hosts", "1" if str(options.nnodes) == "1:1" else str(options.nnodes)),
        ("ranks on this host", ranks),
        ("devices", seen if devices else "none, training on the CPU"),
        ("processors per rank", bound),
        ("log directory", options.log_dir),
        ("rendezvous", f"{endpoint} ({options.rdzv_backend})"),
    ]


def _report(failures: dict[int, Any], log_dir: str) -> int:
    """Prints the first failure with its traceback, then the others; returns the exit status."""
    known: list[failure.Failure] = []
    for rank, one in failures.items():
        reports = failure.read(one.error_file_data)
        known += reports or [failure.of_exit(rank, one.pid, one.exitcode)]
    if not known:  # they are of other hosts
        return 1
    cause = next((f for f in known if f.rank not in failures), None) or failure.first(known)
    print(f"pycomm launch: the first failure was {cause}", file=sys.stderr)
    if cause.trace:
        print(cause.trace, end="", file=sys.stderr)
    for other in known:
        if other.rank != cause.rank:
            print(f"pycomm launch: then {other}", file=sys.stderr)
    print(f"pycomm launch: the ranks' output is in {log_dir}/", file=sys.stderr)
    return cause.status or 1
