"""What the environment says: the only place of the package that reads it.

Understands pycomm's own variables and those of torchrun, Paddle, Open MPI, MPICH (and others that
have its mpiexec, as Intel MPI) and Slurm (srun); with none of them the process is a group of its
own. `pycomm.init` calls it; `pycomm info` lists them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm import secret as secrets
from pycomm.errors import InvalidArgument

__all__ = ["TRANSPORTS", "VARIABLES", "Config", "environment", "take_secret"]

TRANSPORTS = ("local", "shm", "tcp")
LOG_LEVELS = ("warning", "info", "debug")
# Set by our launchers for their ranks, not by users: where rank 0 serves pycomm's store.
STORE_PORT = "PYCOMM_STORE_PORT"

VARIABLES = {
    "PYCOMM_RANK": "this process's rank, 0 to size - 1",
    "PYCOMM_SIZE": "how many processes there are",
    "PYCOMM_LOCAL_RANK": "its rank among the processes of its host",
    "PYCOMM_LOCAL_SIZE": "how many processes its host has",
    "PYCOMM_SECRET": f"the run's key, equal on all: {secrets.MIN_CHARACTERS} characters or more",
    "PYCOMM_ENCRYPT": "1: what leaves a host is encrypted, which needs PYCOMM_SECRET; 0 if unset",
    "PYCOMM_TRANSPORT": "shm or tcp: this one only; the best for each pair of ranks if unset",
    "PYCOMM_LOG": "info: what the group is made of; debug: more; warning if unset",
    "PYCOMM_FLIGHT_RECORD": "a path: what a rank called last goes there when the group breaks",
    "PYCOMM_TRACE": "a folder: all calls of a rank go there, for `pycomm trace`",
    "GLOO_SOCKET_IFNAME": "interface, address or prefix that tcp uses here; found by itself",
}


@dataclass(frozen=True)
class Launcher:
    """How one launcher spells rank, size, local rank and local size ("" where it does not)."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


# The first whose variables are set wins. MPI stands before Slurm, whose variables an mpiexec in a
# job passes on; srun itself may set PMI_RANK, but no MPI_LOCALRANKID. Slurm is srun alone:
# SLURM_STEP_NUM_TASKS is not set in a batch script, one process however many tasks the job has.
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


@dataclass(frozen=True)
class Config:
    """One process's place in the run. Strings are empty and ports 0 where nothing was said.

    Attributes:
        launcher: whose variables gave the rank; "" for a process alone.
        rank, size: this process and how many there are.
        local_rank, local_size: the same on this host, or None where the launcher does not say.
        master_host, master_port: where rank 0 can be met.
        agent_store: a launcher (torchrun) already serves torch's TCPStore there.
        encrypt: what leaves a host is encrypted.
        store_port: where rank 0 serves pycomm's own store, if our launcher reserved a port for it.
        secret: the run's key: 64 hexadecimal digits, stretched where the text given is no such.
        address: which of this host's addresses tcp uses: an interface, an address or a prefix, or
            several with commas, of which the first that the host has counts; "" for the best.
        transport: the only one that ranks use, or "" for the best for each pair.
        log: one of LOG_LEVELS.
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


def environment(values: Mapping[str, str] | None = None, secret: str | None = None) -> Config:
    """The configuration that `values` (os.environ if None) describe; `secret` goes before theirs.

    In a rank of several, PYCOMM_SECRET leaves os.environ: see take_secret().

    Raises:
        InvalidArgument: a value makes no sense; the text names the variable.
    """
    env = os.environ if values is None else values
    launcher = next((known for known in LAUNCHERS if _is_from(env, known)), None)
    host, port = _master(env, launcher.name if launcher else "")
    rank, size = _rank_and_size(env, launcher)
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
        local_size=_number(env, launcher.local_size, 1) if launcher else None,
        master_host=host,
        master_port=port,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        encrypt=_choice(env, "PYCOMM_ENCRYPT", ("0", "1"), "0") == "1",
        store_port=_port(env, STORE_PORT, env.get(STORE_PORT, "")),
        secret=secrets.key_of(secret) if secret else "",
        address=env.get("GLOO_SOCKET_IFNAME", ""),
        transport=_choice(env, "PYCOMM_TRANSPORT", ("shm", "tcp"), ""),
        log=_choice(env, "PYCOMM_LOG", LOG_LEVELS, "warning"),
    )


class _Taken:
    key = ""  # of PYCOMM_SECRET, once it has left the environment


_taken = _Taken()


def known_secret() -> str:
    """The key of PYCOMM_SECRET or, where it has left the environment, the one it had; "" if none.

    Raises:
        InvalidArgument: the variable is too easy to guess.
    """
    value = os.environ.get("PYCOMM_SECRET", "")
    if not value:
        return _taken.key
    secrets.check(value, "PYCOMM_SECRET")
    return secrets.key_of(value)


def take_secret() -> None:
    """Moves PYCOMM_SECRET from the environment into this process's memory, where later calls of
    environment() find it: programs that this process starts do not get it.

    Raises:
        InvalidArgument: the variable is too easy to guess.
    """
    _taken.key = known_secret()
    os.environ.pop("PYCOMM_SECRET", None)


def keep_secret(key: str) -> None:
    """The run's key, from a launcher that has another way than the environment."""
    _taken.key = key


def under_torchrun(pid: int | None = None) -> bool:
    """Whether an agent of torch's started this process, or the process `pid`; False where that
    cannot be read."""
    if pid is None:
        return bool(os.environ.get("TORCHELASTIC_RUN_ID", ""))
    try:
        return b"\0TORCHELASTIC_RUN_ID=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended, or is another user's
        return False


def flight_recorder_files() -> dict[str, Any]:
    """Where the core leaves a flight record and a trace, as connect() takes it; "": nowhere."""
    env = os.environ
    return {"flight": env.get("PYCOMM_FLIGHT_RECORD", ""), "trace": env.get("PYCOMM_TRACE", "")}


def nccl_shares_gpus() -> bool:
    """Whether NCCL was told to let ranks share a GPU, by one of its own two ways (docs/cuda.md)."""
    env = os.environ
    return env.get("NCCL_MULTI_RANK_GPU_ENABLE", "") == "1" or bool(env.get("NCCL_HOSTID", ""))


def cache_folder() -> Path:
    """Where this user's programs keep what they can find out again; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME", "")  # its specification: relative ones do not count
    return Path(home if home.startswith("/") else Path.home() / ".cache") / "pycomm"


def described() -> list[tuple[str, str, str]]:
    """Name, value ("" if unset; the secret is not shown) and meaning of each of VARIABLES."""
    rows = []
    for name, meaning in VARIABLES.items():
        value = os.environ.get(name, "")
        if name == "PYCOMM_SECRET":
            value = "(set)" if value or _taken.key else ""
        rows.append((name, value, meaning))
    return rows


def _is_from(env: Mapping[str, str], launcher: Launcher) -> bool:
    """Whether this launcher's variables are there; srun's and mpiexec's only together."""
    if launcher.name in ("slurm", "mpich"):
        return {launcher.rank, launcher.size, launcher.local_rank} <= env.keys()
    return launcher.rank in env or (launcher.name == "pycomm" and launcher.size in env)


def _number(env: Mapping[str, str], name: str, least: int = 0) -> int | None:
    """The value of a variable as a number >= least; None if it is unset."""
    text = env.get(name, "") if name else ""
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise InvalidArgument(f"{name} is {text!r}; it must be a whole number from {least} on")
    return int(text)


def _rank_and_size(env: Mapping[str, str], launcher: Launcher | None) -> tuple[int, int]:
    if launcher is None:
        return 0, 1
    rank, size = _number(env, launcher.rank), _number(env, launcher.size, 1)
    for name, value in ((launcher.rank, rank), (launcher.size, size)):
        if value is None:
            raise InvalidArgument(f"{name} is not set, although other variables of its kind are")
    assert rank is not None
    assert size is not None
    if rank >= size:
        raise InvalidArgument(
            f"{launcher.rank} is {rank} and {launcher.size} is {size}: ranks end at {size - 1}"
        )
    return rank, size


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...], unset: str) -> str:
    value = env.get(name, "") or unset
    if value != unset and value not in choices:
        raise InvalidArgument(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
    return value


def _master(env: Mapping[str, str], launcher: str) -> tuple[str, int]:
    """Where rank 0 can be met: MASTER_ADDR and MASTER_PORT, else what the launcher offers."""
    host = _without_brackets(env.get("MASTER_ADDR", ""))
    port = _port(env, "MASTER_PORT", env.get("MASTER_PORT", ""))
    if launcher == "paddle" and not host:
        first = env.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
        if first:
            host, _, text = first.rpartition(":")
            host = _without_brackets(host)
            port = _port(env, "PADDLE_TRAINER_ENDPOINTS", text)
    if launcher == "slurm":
        host = host or _first_node(env.get("SLURM_STEP_NODELIST", ""))
        # Any port that all tasks agree on; two steps of one job should not meet.
        job, step = _number(env, "SLURM_JOB_ID") or 0, _number(env, "SLURM_STEP_ID") or 0
        port = port or 20000 + (job * 7 + step) % 20000
    return host, port


def _without_brackets(host: str) -> str:
    """An IPv6 address as a socket takes it: "fd00::1" of "[fd00::1]"."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _port(env: Mapping[str, str], name: str, text: str) -> int:
    if not text:
        return 0
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise InvalidArgument(f"{name} is {env[name]!r}; its port must be from 1 to 65535")
    return int(text)


def _first_node(nodes: str) -> str:
    """The first host of a Slurm list: "a7" of "a[7-9,12],b" and "a7,a8"."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""
