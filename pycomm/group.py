"""Groups of ranks, and the default group of the process.

A Group is a thin coat over the core's: names and numbers. What arrays become is in collectives.py.
The default group is made by `init`, found by every call without `group=`, and closed at exit. A
thread can have one of its own: that is how `pycomm.testing` runs ranks as threads.
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

from pycomm import _core, config, launcher_watch, rendezvous, shrink, thresholds
from pycomm import secret as secrets
from pycomm.errors import GroupBroken, InvalidArgument
from pycomm.shrink import Store

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
        cuda_channels: how many channels rings over large CUDA arrays use, 1 to 8 (docs/cuda.md). To
            be set before the first call with such arrays; rank 0's word counts.
        cuda_internode_transport: by what CUDA arrays travel from host to host: "nccl", or "tcp", by
            pycomm's own connections through host memory, and NCCL joins the ranks of each host
            alone. As cuda_channels; groups that split() and shrink() make of this one have both.
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
        """A coat over `core`, which met in `store`; `timeout_s` is the limit of its calls."""
        self._core = core
        self._devices: dict[int, _core.Group] = {}  # by number of the device: see device_groups.py
        self._rank, self._size = core.rank, core.size
        self._store, self._timeout_s = store, timeout_s
        self._aborted: str | None = None  # why, if it was
        self.cuda_channels, self.cuda_internode_transport = 1, "nccl"
        self._parts: weakref.WeakSet[Group] = weakref.WeakSet()  # of split()
        _groups.add(self)

    @property
    def rank(self) -> int:
        """This process's rank, 0 to size - 1."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    @property
    def ranks(self) -> list[int]:
        """By rank: its rank in the first group, of which this one may be a part."""
        return self._core.ranks

    @property
    def name(self) -> str:
        """The group's name, the same on every rank."""
        return self._core.name

    def peer_info(self) -> list[_core.Member]:
        """By rank: host, process id, and the transport between this rank and it."""
        return self._core.members

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        """Collective. The group of the ranks that give the same color, ordered by (key, rank).

        A color of None (or a negative one) takes part and gets None; a key of None is the rank.
        """
        core = self._core.split(-1 if color is None else color, self._rank if key is None else key)
        if core is None:
            return None
        part = self._like(core)
        self._adopt_subgroup(part)
        return part

    def _like(self, core: _core.Group) -> Group:
        """A coat over a group of some of this one's ranks."""
        made = Group(core, self._store, self._timeout_s)
        made.cuda_channels, made.cuda_internode_transport = (
            self.cuda_channels,
            self.cuda_internode_transport,
        )
        return made

    def _adopt_subgroup(self, part: Group) -> None:
        """`part` ends where this group does."""
        with _state.lock:
            self._parts.add(part)
            reason = self._aborted
        if reason is not None:  # by another thread, meanwhile
            part.abort(reason)

    def shrink(self, timeout_s: float | None = None) -> Group:
        """Collective over the survivors: the group of the ranks that still live, in their order.

        For after PeerLost, Timeout or GroupBroken; a group that is whole is broken by it. Ranks
        that have died are known to be dead where this host runs them, or where they were heard to
        hang up; others are waited for. If this was the default group, the new one is from then on.
        Needs the store in which the ranks met. Groups that split() made of this one are shrunk by
        themselves.

        Args:
            timeout_s: for how long ranks that may still live are waited for, and for all of it;
                None: the group's limit.

        Raises:
            GroupBroken: those who came are not more than half of the ranks that may live (or half
                of them with the lowest); or the others went on without this rank.
            PeerLost: the store is gone, as with the rank that served it.
            Timeout: the survivors could not meet.
        """
        store, _, limit_s = self._key_store()
        limit_s = limit_s if timeout_s is None else timeout_s
        if not limit_s > 0:
            raise InvalidArgument(f"shrink: timeout_s is {limit_s}; it must be more than 0 seconds")
        group = self._like(shrink.regroup(self._core, store, limit_s))
        _inherit(self, group)
        return group

    def stats(self) -> _core.Stats:
        """What this rank has done so far: bytes (written to peers), calls, seconds."""
        return self._core.stats()

    def close(self) -> None:
        """Leaves in peace; later calls raise GroupBroken. Closing twice is fine.

        Groups that split() made of it go on: each is a group of its own, and is closed by itself or
        at exit. abort() ends them too.
        """
        for core in self._devices.values():
            core.close()
        self._core.close()
        if not self._core.forked:
            self._store = None  # with rank 0's goes what the ranks have left there

    def abort(self, reason: str) -> None:
        """From any thread: ends the group on every rank with an error that carries `reason`.

        So end the groups that split() made of it, on every rank that is in one with this rank; with
        the default group also those that torch's new_group() and split_group() made.
        """
        with _state.lock:
            self._aborted, parts = reason, list(self._parts)
        for core in list(self._devices.values()):
            core.abort(reason)
        self._core.abort(reason)
        for part in parts:
            part.abort(reason)

    def _key_store(self) -> tuple[Store, str, float]:
        """For objects.py: where this group's keys are kept, what they begin with, the time limit.

        Raises:
            GroupBroken: the group was closed, or is the parent process's.
        """
        name = self._core.name  # raises in a forked child
        if self._store is None:
            raise GroupBroken("this rank has left the group: it was closed", rank=self._rank)
        return self._store, f"{name}/user/", self._timeout_s

    def __repr__(self) -> str:
        """As <pycomm.Group 'world' rank 0 of 2>."""
        name = self._core.name if not self._core.forked else "of the parent process"
        return f"<pycomm.Group {name!r} rank {self._rank} of {self._size}>"


class _State:
    """The default group of the process, and what stands around it."""

    group: Group | None = None
    adopted: bool = False  # the engine is torch's, which closes it
    ended: str = ""  # why there is none any more
    lock = threading.RLock()


class _Thread(threading.local):
    """What this thread has of its own. The class holds what a thread without any finds: such a
    look-up is half of what a small call costs if it has to fail first."""

    own: Sequence[Group] = ()  # the first is its default group
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
    """Forms the default group from the environment; collective over the processes of the run.

    The second call gives the same group, whatever its arguments; after torch's
    init_process_group("pycomm") the group is that one's engine.

    Args:
        timeout_s: the limit of the forming and of every later call that names none, in seconds.
        transport: "shm" or "tcp": this one only; None: PYCOMM_TRANSPORT, or the best for each pair.
        secret: the run's key; None: PYCOMM_SECRET.
        encrypt: what leaves a host is encrypted and authenticated with AES-256-GCM, in this group
            and in those that split() and shrink() make of it; needs OpenSSL 3 and, on several
            hosts, a secret. The same on every rank. None: PYCOMM_ENCRYPT, or no.
        reproducible: sums in rank order whatever the size, so that bits depend on the inputs alone.
        heartbeat_s: a rank that others wait for and that they have not heard of for so many seconds
            is lost: it is stopped or its host is gone. One that is merely busy, be it with the GIL
            held, is heard of all the time. 0: never, as where a debugger stops ranks. The same on
            every rank.

    Raises:
        InvalidArgument: an argument or a variable makes no sense; or there is a default group,
            which is not encrypted where `encrypt` wants that.
        Timeout: not all ranks came; the text names those that did not.
        PeerLost, Mismatch: a rank died, or was started with other options.
        Unsupported: `encrypt` without OpenSSL 3, or on several hosts without a secret.
    """
    with _state.lock:
        found = _find()
        if found is not None:
            if encrypt and not found._core.encrypted:
                raise InvalidArgument(
                    "encrypt=True, but the default group is there already and is not encrypted: "
                    "give encrypt=True where it is made"
                )
            return found
        if not timeout_s > 0:
            raise InvalidArgument(f"timeout_s is {timeout_s}; it must be more than 0 seconds")
        if not heartbeat_s >= 0:
            raise InvalidArgument(f"heartbeat_s is {heartbeat_s}; it must be 0 or more seconds")
        if transport is not None and transport not in config.TRANSPORTS:
            raise InvalidArgument(
                f"transport is {transport!r}; it must be one of {', '.join(config.TRANSPORTS)}"
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
        tuned=thresholds.thresholds(),
        **config.flight_recorder_files(),
    )
    core.set_timeout(timeout_s)  # of its calls; the forming had what was left of it
    store.settle()
    launcher_watch.start(_abort_all)
    return Group(core, store, timeout_s)


def _abort_all(reason: str) -> None:
    """Ends every group of this process with an error that carries `reason`."""
    for group in list(_groups):
        with contextlib.suppress(Exception):  # closed meanwhile
            group.abort(reason)


def log_at(level: str) -> None:
    """Lets pycomm's lines through to stderr, unless the program has set up logging itself."""
    logger = logging.getLogger("pycomm")
    if level == "warning" or logger.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("pycomm: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())


def shutdown() -> None:
    """Closes the default group; calling it twice is fine. An engine of torch's is left to torch."""
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
    """How many ranks the default group has."""
    return default().size


def local_rank() -> int:
    """This process's rank among those of its host."""
    return default()._core.local_rank


def local_size() -> int:
    """How many processes of the default group run on this host."""
    return default()._core.local_size


def host_count() -> int:
    """On how many hosts the default group runs."""
    return default()._core.host_count


def set_num_threads(n: int) -> None:
    """With how many threads this process works on large arrays in `pycomm.kernels`.

    At first one for each processor that it may use. Results do not depend on it. Collectives
    reduce with the thread that calls.
    """
    if n < 1:
        raise InvalidArgument(f"set_num_threads({n}): at least one thread is needed")
    _core.set_kernel_threads(n)


def register_core(core: _core.Group, store: Store, timeout_s: float) -> Callable[[], None]:
    """Makes torch's engine the default group; gives what forgets it. Called by torch_backend.

    Where the process has one already, as when ranks are threads, it is that of this thread alone.
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
    """Lets the engine of torch's new_group() or split_group() end where the default group does, as
    parts of split() do; gives what forgets it. Called by torch_backend."""
    held = [Group(core, store, timeout_s)]
    if (group := _find()) is not None:
        group._adopt_subgroup(held[0])
    return held.clear


def default_core() -> _core.Group | None:
    """The engine behind `init` or `run_ranks`, for torch_backend to build on; None without one."""
    group = _thread.forced or (None if _state.adopted else _state.group)
    return None if group is None else group._core


def default_is_encrypted() -> bool:
    """Whether there is a default group, of torch's or ours, that is encrypted."""
    group = _thread.forced or _state.group
    return group is not None and not group._core.forked and group._core.encrypted


@contextlib.contextmanager
def as_thread_default(group: Group) -> Iterator[None]:
    """Within it, `group` is the default of this thread alone."""
    _thread.forced = group
    try:
        yield
    finally:
        _thread.forced = None


def _close_all(*_: Any) -> None:
    """At exit: leaves every group in peace, so that no peer takes the end for a loss."""
    for group in list(_groups):
        with contextlib.suppress(Exception):
            group.close()


atexit.register(_close_all)
