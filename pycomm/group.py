"""Process groups, and the default group of the process.

`Group` wraps `_core.Group` and adds names and default options; arrays are handled in
collectives.py. `init` makes the default group, which every call without `group=` uses and which is
closed at exit. A thread can have a default group of its own: `pycomm.testing` runs ranks as
threads.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pycomm import _core, config
from pycomm import _secret as secrets
from pycomm._bootstrap import launcher_watch, rendezvous, shrink
from pycomm._bootstrap.shrink import Store
from pycomm.errors import GroupBroken, InvalidArgument

__all__ = [
    "Group",
    "default",
    "default_core",
    "default_is_encrypted",
    "host_count",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "register_core",
    "set_num_threads",
    "shutdown",
    "size",
]

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_HEARTBEAT_S = 10.0


class Group:
    """Ranks that call collectives together, each from one thread, all in the same order.

    Attributes:
        cuda_channels: channels of rings over large CUDA arrays, 1 to 8 (docs/cuda.md). Set it
            before the first call with such arrays; rank 0's value is used. split() and shrink()
            copy it.
        cuda_internode_transport: "nccl", or "tcp" to send CUDA arrays between hosts through host
            memory and pycomm's connections. Set it as cuda_channels.
    """

    __slots__ = (
        "__weakref__",
        "_aborted",
        "_core",
        "_devices",
        "_parts",
        "_rank",
        "_size",
        "_store",
        "_timeout_s",
        "cuda_channels",
        "cuda_internode_transport",
    )

    def __init__(
        self, core: _core.Group, store: Store | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Wraps `core`, whose ranks met in `store`; `timeout_s` is the time limit of its calls."""
        self._core = core
        self._devices: dict[int, _core.Group] = {}  # by device index: see device_groups.py
        self._rank, self._size = core.rank, core.size
        self._store, self._timeout_s = store, timeout_s
        self._aborted: str | None = None  # the reason
        self.cuda_channels, self.cuda_internode_transport = 1, "nccl"
        self._parts: weakref.WeakSet[Group] = weakref.WeakSet()  # made by split()
        _groups.add(self)

    @property
    def rank(self) -> int:
        """This process's rank, 0 to size - 1."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def ranks(self) -> list[int]:
        """By rank: its rank in the first group, from which split() or shrink() made this one."""
        return self._core.ranks

    @property
    def name(self) -> str:
        """The group's name, the same on every rank."""
        return self._core.name

    def peer_info(self) -> list[_core.Member]:
        """By rank: host, process id, and the transport between this rank and it."""
        return self._core.members

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        """The subgroup of the ranks with this color, ordered by (key, rank). Collective.

        Args:
            color: 0 or more; None or negative: join no subgroup and return None.
            key: None: the rank.

        Raises:
            Error: as pycomm.all_reduce.
        """
        core = self._core.split(-1 if color is None else color, self._rank if key is None else key)
        if core is None:
            return None
        part = self._like(core)
        self._adopt_subgroup(part)
        return part

    def _like(self, core: _core.Group) -> Group:
        """Wraps a group of some of this group's ranks."""
        made = Group(core, self._store, self._timeout_s)
        made.cuda_channels, made.cuda_internode_transport = (
            self.cuda_channels,
            self.cuda_internode_transport,
        )
        return made

    def _adopt_subgroup(self, part: Group) -> None:
        """Makes abort() of this group abort `part` too."""
        with _state.lock:
            self._parts.add(part)
            reason = self._aborted
        if reason is not None:  # another thread aborted this group meanwhile
            part.abort(reason)

    def shrink(self, timeout_s: float | None = None) -> Group:
        """Makes a group of the ranks that still live, in their order. Collective over the
        survivors.

        Call it after PeerLost, Timeout or GroupBroken; it aborts an intact group. A rank is dead if
        its process on this host ended or its connection closed; others are waited for. The new
        group becomes the default if this one was it. Subgroups made by split() need a shrink() of
        their own.

        Args:
            timeout_s: limit of the call and of the wait for ranks that may live; None: the group's.

        Raises:
            GroupBroken: the survivors are not more than half of the ranks that may live (or half of
                them with the lowest rank); or the others continued without this rank.
            PeerLost: the rendezvous store ended, with the rank that served it.
            Timeout: the survivors could not meet in time.
        """
        store, _, limit_s = self._key_store()
        limit_s = limit_s if timeout_s is None else timeout_s
        if not limit_s > 0:
            raise InvalidArgument(f"shrink: timeout_s: got {limit_s}, expected more than 0 seconds")
        group = self._like(shrink.regroup(self._core, store, limit_s))
        _inherit(self, group)
        return group

    def stats(self) -> _core.Stats:
        """This rank's totals: bytes written to peers, calls, seconds. GroupBroken in a fork."""
        return self._core.stats()

    def close(self) -> None:
        """Leaves the group cleanly; later calls raise GroupBroken. Closing twice has no effect.

        Subgroups made by split() stay open until they are closed or the process exits.
        """
        for core in self._devices.values():
            core.close()
        self._core.close()
        if not self._core.forked:
            self._store = None  # the last reference to rank 0's store ends it

    def abort(self, reason: str) -> None:
        """Ends the group on every rank with an error that contains `reason`. Callable from any
        thread.

        Also aborts subgroups made by split() that contain this rank; for the default group also
        those of torch's new_group() and split_group().
        """
        with _state.lock:
            self._aborted, parts = reason, list(self._parts)
        for core in list(self._devices.values()):
            core.abort(reason)
        self._core.abort(reason)
        for part in parts:
            part.abort(reason)

    def _key_store(self) -> tuple[Store, str, float]:
        """For objects/: the store of this group's keys, their prefix, and the limit in seconds.
        Raises GroupBroken if the group was closed or belongs to the parent process.
        """
        name = self._core.name  # raises in a forked child
        if self._store is None:
            raise GroupBroken("this rank has left the group: it was closed", rank=self._rank)
        return self._store, f"{name}/user/", self._timeout_s

    def __repr__(self) -> str:
        """For example <pycomm.Group 'world' rank 0 of 2>."""
        name = self._core.name if not self._core.forked else "of the parent process"
        return f"<pycomm.Group {name!r} rank {self._rank} of {self._size}>"


class _State:
    """The default group of the process."""

    group: Group | None = None
    adopted: bool = False  # torch owns the engine and closes it
    ended: str = ""  # why there is no group any more
    lock = threading.RLock()


class _Thread(threading.local):
    """Thread-local groups. Class attributes are the defaults: a failed lookup costs half a small
    call."""

    own: Sequence[Group] = ()  # the first is the thread's default group
    forced: Group | None = None  # the default within as_thread_default


_state = _State()
_thread = _Thread()
_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def init(
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    transport: str | None = None,
    secret: str | None = None,
    encrypt: bool | None = None,
    reproducible: bool = False,
    heartbeat_s: float = DEFAULT_HEARTBEAT_S,
) -> Group:
    """Forms the default group from the environment. Collective over the processes of the run.

    A second call returns the same group and ignores its arguments. After torch's
    init_process_group("pycomm") the group uses that backend's engine.

    Args:
        timeout_s: limit in seconds of the forming and of every call without one of its own.
        transport: "shm" or "tcp": this one only; None: PYCOMM_TRANSPORT, or the best for each pair.
        secret: the run's shared secret; None: PYCOMM_SECRET.
        encrypt: encrypt and authenticate traffic between hosts (AES-256-GCM), also in groups made
            by split() and shrink(). Needs OpenSSL 3 and, on several hosts, a secret. The same on
            every rank. None: PYCOMM_ENCRYPT, or no.
        reproducible: add in rank order for every size, so that bits depend on the inputs alone.
        heartbeat_s: a peer without a heartbeat for so many seconds counts as lost: it is stopped or
            its host failed. A busy rank sends heartbeats, also while it holds the GIL. 0: no limit,
            for debuggers. The same on every rank.

    Raises:
        InvalidArgument: an argument or variable is invalid; or `encrypt`, but the default group
            exists and is not encrypted.
        Timeout: not all ranks joined; the text names the missing ones.
        PeerLost, Mismatch: a rank died, or was started with other options.
        Unsupported: `encrypt` without OpenSSL 3, or on several hosts without a secret.
    """
    with _state.lock:
        found = _find()
        if found is not None:
            if encrypt and not found._core.encrypted:
                raise InvalidArgument(
                    "encrypt=True, but the default group exists and is not encrypted: "
                    "pass encrypt=True where it is made"
                )
            return found
        if not timeout_s > 0:
            raise InvalidArgument(f"invalid timeout_s: got {timeout_s}, expected more than 0")
        if not heartbeat_s >= 0:
            raise InvalidArgument(f"invalid heartbeat_s: got {heartbeat_s}, expected 0 or more")
        if transport is not None and transport not in config.TRANSPORTS:
            raise InvalidArgument(
                f"invalid transport: got {transport!r}, expected {', '.join(config.TRANSPORTS)}"
            )
        if secret is not None:
            secrets.check(secret, "secret")
        here = config.environment(secret=secret)
        if encrypt is not None:
            here = dataclasses.replace(here, encrypt=encrypt)
        _state.group = _form(here, timeout_s, transport, reproducible, heartbeat_s)
        _state.adopted = False
        return _state.group


def _form(
    here: config.Config,
    timeout_s: float,
    transport: str | None,
    reproducible: bool,
    heartbeat_s: float,
) -> Group:
    log_at(here.log)
    _core.check_address(here.address)
    end = time.monotonic() + timeout_s
    store = rendezvous.find_store(here, timeout_s)
    core = rendezvous.connect(
        store,
        rank=here.rank,
        size=here.size,
        name="world",
        timeout_s=max(0.1, end - time.monotonic()),
        secret=here.secret,
        encrypt=here.encrypt,
        transport=transport or here.transport,
        address=here.address,
        route_hint=here.master_host,
        reproducible=reproducible,
        heartbeat_s=heartbeat_s,
        log=here.log != "warning",
    )
    core.set_timeout(timeout_s)  # of its calls; forming used the remaining time
    store.settle()
    launcher_watch.start(_abort_all)
    return Group(core, store, timeout_s)


def _abort_all(reason: str) -> None:
    """Aborts every group of this process with an error that contains `reason`."""
    for group in list(_groups):
        with contextlib.suppress(Exception):  # closed meanwhile
            group.abort(reason)


def log_at(level: str) -> None:
    """Sends pycomm's log messages to stderr, unless the program has configured logging."""
    logger = logging.getLogger("pycomm")
    if level == "warning" or logger.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("pycomm: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())


def shutdown() -> None:
    """Closes the default group; a second call has no effect. An engine that torch owns stays
    open."""
    with _state.lock:
        group, adopted = _state.group, _state.adopted
        _state.group, _state.adopted = None, False
        _thread.own = ()
        if group is not None:
            _state.ended = "the default group was closed by pycomm.shutdown()"
            if not adopted:
                group.close()


def is_initialized() -> bool:
    """Whether there is a default group."""
    return _find() is not None


def _inherit(old: Group, new: Group) -> None:
    """Makes `new` the default wherever `old` was it."""
    with _state.lock:
        if _state.group is old:
            _state.group, _state.adopted = new, False
        if _thread.forced is old:
            _thread.forced = new
        elif _thread.own and _thread.own[0] is old:
            _thread.own = [new]


def _find() -> Group | None:
    if _thread.forced is not None:
        return _thread.forced
    own = _thread.own
    return own[0] if own else _state.group


def default() -> Group:
    """The default group. Raises GroupBroken after shutdown, InvalidArgument before init."""
    group = _find()
    if group is None:
        if _state.ended:
            raise GroupBroken(f"{_state.ended}; pycomm.init() makes a new one")
        raise InvalidArgument("there is no default group yet: call pycomm.init() first")
    return group


def rank() -> int:
    """This process's rank in the default group."""
    return default().rank


def size() -> int:
    """The number of ranks of the default group."""
    return default().size


def local_rank() -> int:
    """This process's rank among the default group's ranks on this host."""
    return default()._core.local_rank


def local_size() -> int:
    """The number of the default group's ranks on this host."""
    return default()._core.local_size


def host_count() -> int:
    """The number of hosts of the default group."""
    return default()._core.host_count


def set_num_threads(n: int) -> None:
    """Sets the number of threads of `pycomm.kernels` for large arrays; results do not depend on it.

    Args:
        n: at least 1; the default is the number of processors that the process may use.

    Raises:
        InvalidArgument: `n` is below 1.
    """
    if n < 1:
        raise InvalidArgument(f"set_num_threads: invalid n: got {n}, expected at least 1")
    _core.set_kernel_threads(n)


def register_core(core: _core.Group, store: Store, timeout_s: float) -> Callable[[], None]:
    """Makes torch's engine the default group, or that of this thread if the process has one already
    (ranks as threads); returns a function that unregisters it.
    """
    group = Group(core, store, timeout_s)
    launcher_watch.start(_abort_all)
    own: list[Group] = [group]
    with _state.lock:
        if _state.group is None:
            _state.group, _state.adopted = group, True
        _thread.own = own

    def unregister() -> None:
        with _state.lock:
            own.clear()
            if _state.group is group:
                _state.group, _state.adopted = None, False
                _state.ended = "torch's process group was destroyed"

    return unregister


def register_backend(
    core: _core.Group, store: Store | None, timeout_s: float
) -> Callable[[], None]:
    """Makes abort() of the default group abort the engine of torch's new_group() or split_group()
    too; returns a function that unregisters it.
    """
    held = [Group(core, store, timeout_s)]
    if (group := _find()) is not None:
        group._adopt_subgroup(held[0])
    return held.clear


def default_core() -> _core.Group | None:
    """The engine made by `init` or `run_ranks`, for torch_backend to share; None if there is
    none."""
    group = _thread.forced or (None if _state.adopted else _state.group)
    return None if group is None else group._core


def default_is_encrypted() -> bool:
    """Whether the default group, made by torch or by pycomm, is encrypted."""
    group = _thread.forced or _state.group
    return group is not None and not group._core.forked and group._core.encrypted


@contextlib.contextmanager
def as_thread_default(group: Group) -> Iterator[None]:
    """A context in which `group` is the default of this thread only."""
    _thread.forced = group
    try:
        yield
    finally:
        _thread.forced = None


def _close_all(*_: Any) -> None:
    """At exit: leaves every group cleanly, so that no peer reports a loss."""
    for group in list(_groups):
        with contextlib.suppress(Exception):
            group.close()


atexit.register(_close_all)
