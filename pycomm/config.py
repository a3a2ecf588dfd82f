"""The configuration from the environment: the only module of the package that reads it.

Understands pycomm's own variables and those of torchrun, Paddle, Open MPI, MPICH (and others with
its mpiexec, such as Intel MPI) and Slurm (srun). Without any of them the process is a group of
size 1. `pycomm info` lists the variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm import _secret as secrets
from pycomm._arguments import integer, plain_text, shown
from pycomm.errors import InvalidArgument

TRANSPORTS = ("local", "shm", "tcp")
LOG_LEVELS = ("warning", "info", "debug")
# Set by pycomm's launchers for their ranks, not by users: the port of pycomm's store on rank 0.
STORE_PORT = "PYCOMM_STORE_PORT"
# The file of an elastic group; and "1" in a process that joins one.
ELASTIC_FILE, ELASTIC_JOINS = "PYCOMM_ELASTIC_FILE", "PYCOMM_ELASTIC_JOINS"

VARIABLES = {
    "PYCOMM_RANK": "rank of this process, 0 to size - 1",
    "PYCOMM_SIZE": "number of processes",
    "PYCOMM_LOCAL_RANK": "rank among the processes of this host",
    "PYCOMM_LOCAL_SIZE": "number of processes on this host",
    "PYCOMM_SECRET": f"the run's shared secret: {secrets.MIN_CHARACTERS} characters or more",
    "PYCOMM_ENCRYPT": "1: encrypt traffic between hosts; needs PYCOMM_SECRET; default 0",
    "PYCOMM_TRANSPORT": "shm or tcp: use this one only; default: the best for each pair of ranks",
    "PYCOMM_LOG": "info: log the group's configuration; debug: more; default warning",
    "PYCOMM_REPLACE": "gloo: pycomm's groups in place of torch's; gloo,except=PATTERN: but those",
    "PYCOMM_FLIGHT_RECORD": "path of flight records, written when the group breaks",
    "PYCOMM_TRACE": "folder for traces of all calls, for `pycomm trace`",
    "GLOO_SOCKET_IFNAME": "interface, address or prefix for tcp on this host; default: detected",
}


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher for rank, size, local rank and local size; "" if it has
    none."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# The first launcher whose variables are set is used. MPI precedes Slurm: mpiexec in a Slurm job
# passes Slurm's variables on, while srun may set PMI_RANK but not MPI_LOCALRANKID. Slurm means
# srun: a batch script, which is one process, has no SLURM_STEP_NUM_TASKS.
LAUNCHERS = (
    Launcher("pycomm", "PYCOMM_RANK", "PYCOMM_SIZE", "PYCOMM_LOCAL_RANK", "PYCOMM_LOCAL_SIZE"),
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher("paddle", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_RANK_IN_NODE", ""),
    Launcher(
        "openmpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)


# Of launchers that are not read: the number of processes, or of hosts.
SIZES = (
    *("FLUX_JOB_SIZE", "HOROVOD_SIZE", "MV2_COMM_WORLD_SIZE", "PALS_SIZE", "PMI_SIZE"),
    "PET_NNODES",
)


@dataclass(frozen=True)
class Config:
    """The configuration of one process. Unset strings are empty, unset ports are 0.

    Attributes:
        launcher: the launcher whose variables gave the rank; "" for a single process.
        rank, size: this process's rank and the number of processes.
        local_rank, local_size: the same on this host; None if the launcher does not set them.
        master_host, master_port: rank 0's address for the rendezvous.
        agent_store: a launcher (torchrun) already serves torch's TCPStore at this address.
        encrypt: encrypt traffic between hosts.
        store_port: port of pycomm's own store on rank 0, if pycomm's launcher reserved one.
        secret: the run's key: 64 hexadecimal digits; other texts are stretched to one.
        address: the address of this host for tcp: an interface, an address or a prefix, or several
            separated by commas, of which the first that the host has is used; "": the best.
        transport: the only transport to use, or "" for the best for each pair.
        log: one of LOG_LEVELS.
        elastic: the file of an elastic group; "": the group is not elastic.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    master_host: str = ""
    master_port: int = 0
    agent_store: bool = False
    store_port: int = 0
    secret: str = ""
    encrypt: bool = False
    address: str = ""
    transport: str = ""
    log: str = "warning"
    elastic: str = ""


@dataclass(frozen=True)
class Place:
    """A rank that a program gives itself, in place of a launcher."""

    rank: int
    size: int
    host: str = ""  # of rank 0
    port: int = 0

    @classmethod
    def of(cls, rank: int | None, size: int | None, master: str | None) -> Place | None:
        """The place of init()'s arguments; None without them.

        Raises:
            InvalidArgument: they do not fit together.
        """
        if rank is None and size is None and master is None:
            return None
        if rank is None or size is None:
            given = f"rank={shown(rank)}, size={shown(size)}"
            raise InvalidArgument(f"{given}: expected both, with 0 <= rank < size")
        rank, size = integer("rank", rank), integer("size", size, 1, 2**31 - 1)
        if not 0 <= rank < size:
            raise InvalidArgument(f"rank={rank}, size={size}: expected both, with 0 <= rank < size")
        if master is not None:
            plain_text("master", master)
        host, _, port = (master or "").rpartition(":")
        if (master or size > 1) and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise InvalidArgument(
                f"invalid master: got {master!r}, expected rank 0's host and a free port there, "
                "such as 10.0.0.1:29500"
            )
        return cls(rank, size, _without_brackets(host), int(port or 0))


def environment(
    values: Mapping[str, str] | None = None, secret: str | None = None, place: Place | None = None
) -> Config:
    """The configuration in `values` (os.environ if None); `secret` and `place` take precedence.

    In a run of several ranks it removes PYCOMM_SECRET from os.environ: see take_secret().

    Raises:
        InvalidArgument: a value is invalid; the text names the variable.
    """
    env = os.environ if values is None else values
    launcher = next((known for known in LAUNCHERS if _is_from(env, known)), None)
    if place is None:
        host, port = _master(env, launcher.name if launcher else "")
        rank, size = _rank_and_size(env, launcher)
    else:
        launcher = None
        rank, size, host, port = place.rank, place.size, place.host, place.port
    if values is None and size > 1:
        take_secret()
    if secret is None:
        secret = env.get("PYCOMM_SECRET", "")
        if secret:
            secrets.check(secret, "PYCOMM_SECRET")
        elif values is None:
            secret = _taken.key
    return Config(
        launcher=launcher.name if launcher else "",
        rank=rank,
        size=size,
        local_rank=_number(env, launcher.local_rank) if launcher else None,
        local_size=_number(env, launcher.local_size) if launcher else None,
        master_host=host,
        master_port=port,
        agent_store=not place and env.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        encrypt=_choice(env, "PYCOMM_ENCRYPT", ("0", "1"), "0") == "1",
        store_port=0 if place else _port(env, STORE_PORT, env.get(STORE_PORT, "")),
        secret=secrets.key_of(secret) if secret else "",
        address=env.get("GLOO_SOCKET_IFNAME", ""),
        transport=_choice(env, "PYCOMM_TRANSPORT", ("shm", "tcp"), ""),
        log=_choice(env, "PYCOMM_LOG", LOG_LEVELS, "warning"),
        elastic=env.get(ELASTIC_FILE, ""),
    )


def kept_from_replacement(value: str | None = None, name: str = "PYCOMM_REPLACE") -> str | None:
    """If PYCOMM_REPLACE, or `value` of the option `name`, asks for pycomm in place of gloo: the
    pattern of the groups that stay torch's, "" for none. None if the variable is unset.

    Raises:
        InvalidArgument: it is invalid.
    """
    value = value if value is not None else os.environ.get(name, "") or None
    if value is None:
        return None
    match = re.fullmatch(r"gloo(?:,except=(.+))?", value)
    if match is None:
        raise InvalidArgument(
            f"invalid {name}: got {value!r}, expected gloo, or gloo,except=PATTERN"
        )
    return match[1] or ""


def joins_elastic_group() -> bool:
    """Whether the launcher started this process in place of one that failed, or as a spare."""
    return os.environ.get(ELASTIC_JOINS, "") == "1"


class _Taken:
    key = ""  # of PYCOMM_SECRET, after it was removed from the environment


_taken = _Taken()


def known_secret() -> str:
    """The key of PYCOMM_SECRET, also after take_secret(); "" if there is none.

    Raises:
        InvalidArgument: the variable is too easy to guess.
    """
    value = os.environ.get("PYCOMM_SECRET", "")
    if not value:
        return _taken.key
    secrets.check(value, "PYCOMM_SECRET")
    return secrets.key_of(value)


def take_secret() -> None:
    """Moves PYCOMM_SECRET from the environment into this process's memory, where environment()
    finds it: programs that this process starts do not inherit it.

    Raises:
        InvalidArgument: the variable is too easy to guess.
    """
    _taken.key = known_secret()
    os.environ.pop("PYCOMM_SECRET", None)


def keep_secret(key: str) -> None:
    """Sets the run's key, for a launcher that does not pass it in the environment."""
    _taken.key = key


def under_pycomm_launch() -> bool:
    """Whether `pycomm launch` started this process, which ends with it."""
    return STORE_PORT in os.environ


def under_torchrun(pid: int | None = None) -> bool:
    """Whether torch's elastic agent started this process, or the process `pid`; False if that
    cannot be read.
    """
    if pid is None:
        return bool(os.environ.get("TORCHELASTIC_RUN_ID", ""))
    try:
        return b"\0TORCHELASTIC_RUN_ID=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended, or another user owns it
        return False


def flight_recorder_files() -> dict[str, Any]:
    """The paths of flight record and trace, as keyword arguments of connect(); "": none."""
    env = os.environ
    return {"flight": env.get("PYCOMM_FLIGHT_RECORD", ""), "trace": env.get("PYCOMM_TRACE", "")}


def nccl_sharing() -> tuple[bool, str]:
    """Whether NCCL is configured to let ranks share a GPU, and the host that it takes this rank to
    be on, "" for this one: ranks with different ones may share a GPU, too (docs/cuda.md)."""
    return _of_nccl("NCCL_MULTI_RANK_GPU_ENABLE") == "1", _of_nccl("NCCL_HOSTID")


def nccl_prevents_aborts() -> str:
    """A variable of NCCL that replaces what pycomm sets for its communicators, as "NAME=value"; ""
    if there is none. Calls on such communicators could not be cancelled."""
    usual = {"NCCL_COMM_SPLIT_SHARE_RESOURCES": ("", "1"), "NCCL_COMM_BLOCKING": ("",)}
    for name, values in usual.items():
        if (value := _of_nccl(name)) not in values:
            return f"{name}={value}"
    return ""


def _of_nccl(name: str) -> str:
    """A variable as NCCL finds it: of the environment, or of the first of its files that has it."""
    if name in os.environ:
        return os.environ[name]
    user = os.environ.get("NCCL_CONF_FILE", "") or "~/.nccl.conf"
    for file in (user, "/etc/nccl.conf"):
        try:
            lines = Path(file).expanduser().read_text().splitlines()
        except (OSError, RuntimeError):  # no such file, or no home
            continue
        for line in lines:
            key, _, value = line.partition("=")
            if key.strip() == name:
                return value.strip()
    return ""


def cache_folder() -> Path:
    """The folder of this user's cached files; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME", "")  # its specification: relative paths are ignored
    return Path(home if home.startswith("/") else Path.home() / ".cache") / "pycomm"


def described() -> list[tuple[str, str, str]]:
    """Name, value ("" if unset; the secret is not shown) and meaning of each variable."""
    rows = []
    for name, meaning in VARIABLES.items():
        value = os.environ.get(name, "")
        if name == "PYCOMM_SECRET":
            value = "(set)" if value or _taken.key else ""
        rows.append((name, value, meaning))
    return rows


def _is_from(env: Mapping[str, str], launcher: Launcher) -> bool:
    """Whether this launcher's variables are set; srun and mpiexec need all of them."""
    if launcher.name in ("slurm", "mpich"):
        return {launcher.rank, launcher.size, launcher.local_rank} <= env.keys()
    return launcher.rank in env or (launcher.name == "pycomm" and launcher.size in env)


def _number(env: Mapping[str, str], name: str, least: int = 0) -> int | None:
    """The value of a variable as an integer of at least `least`; None if it is unset."""
    text = env.get(name, "") if name else ""
    if not text:
        return None
    # Slurm's special steps have numbers near 2 ** 32.
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) < least:
        raise InvalidArgument(f"invalid {name}: got {text!r}, expected an integer from {least}")
    return int(text)


def _rank_and_size(env: Mapping[str, str], launcher: Launcher | None) -> tuple[int, int]:
    if launcher is None:
        return 0, 1
    rank, size = _number(env, launcher.rank), _number(env, launcher.size, 1)
    for name, value in ((launcher.rank, rank), (launcher.size, size)):
        if value is None:
            raise InvalidArgument(f"{name} is not set, but other variables of the launcher are")
    assert rank is not None
    assert size is not None
    if rank >= size and env.get(ELASTIC_JOINS, "") != "1":  # those of spares follow
        raise InvalidArgument(
            f"invalid {launcher.rank}: got {rank}, expected 0 to {size - 1} "
            f"({launcher.size} is {size})"
        )
    return rank, size


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...], unset: str) -> str:
    value = env.get(name, "") or unset
    if value != unset and value not in choices:
        raise InvalidArgument(
            f"invalid {name}: got {value!r}, expected one of {', '.join(choices)}"
        )
    return value


def _master(env: Mapping[str, str], launcher: str) -> tuple[str, int]:
    """Rank 0's address: MASTER_ADDR and MASTER_PORT, else the launcher's variables."""
    host = _without_brackets(env.get("MASTER_ADDR", ""))
    port = _port(env, "MASTER_PORT", env.get("MASTER_PORT", ""))
    if launcher == "paddle" and not host:
        first = env.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
        if first:
            host, _, text = first.rpartition(":")
            host = _without_brackets(host)
            port = _port(env, "PADDLE_TRAINER_ENDPOINTS", text)
    if launcher == "slurm":
        own, given = env.get("SLURMD_NODENAME", ""), host
        host = given or _first_node(env.get("SLURM_STEP_NODELIST", ""))
        if not given and env.get("SLURM_PROCID") == "0" and own not in ("", host):
            raise InvalidArgument(
                f"rank 0 runs on {own}, which is not the first node of the step, {host}, as with "
                f"srun --distribution=arbitrary: set MASTER_ADDR={own} for all tasks"
            )
        # A port that all tasks derive alike, and different for the steps of one job. Another job
        # may derive the same one: see slurm_step().
        job, step = _number(env, "SLURM_JOB_ID") or 0, _number(env, "SLURM_STEP_ID") or 0
        port = port or 20000 + (job * 7 + step) % 20000
    return host, port


def slurm_step() -> str:
    """Names the run in its store, so that ranks of another one that uses the same port find none of
    its keys: "slurm 1234.0"."""
    return f"slurm {os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_STEP_ID', '')}"


def unknown_launcher() -> str:
    """A variable that shows that a launcher whose variables pycomm does not read started several
    processes, as "NAME=value"; "" if there is none, or the rank is known."""
    env = os.environ
    if any(_is_from(env, known) for known in LAUNCHERS):
        return ""
    for name in SIZES:
        if (value := env.get(name, "")).isdecimal() and int(value) > 1:
            return f"{name}={value}"
    # PMIx has no variable with the number of processes: the others end with the first that knows.
    rank = env.get("PMIX_RANK", "0")
    return f"PMIX_RANK={rank}" if rank.isdecimal() and int(rank) > 0 else ""


def _without_brackets(host: str) -> str:
    """An IPv6 address as a socket takes it: "[fd00::1]" becomes "fd00::1"."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _port(env: Mapping[str, str], name: str, text: str) -> int:
    if not text:
        return 0
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise InvalidArgument(f"invalid {name}: got {env[name]!r}, expected a port from 1 to 65535")
    return int(text)


def _first_node(nodes: str) -> str:
    """The first host of a Slurm list: "a7" for "a[7-9,12],b" and for "a7,a8"."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""
