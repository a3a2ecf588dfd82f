"""Process groups.

`Group` wraps `_core.Group` and adds names and default options; arrays are handled in
collectives.py. Every group is closed at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from pycomm import _core
from pycomm._arguments import integer, plain_text, seconds
from pycomm._bootstrap import grow, shrink
from pycomm._bootstrap.elastic_store import Elastic, SurvivingStore, successors, write_file
from pycomm._bootstrap.joining import Joiners
from pycomm.errors import GroupBroken, InvalidArgument, Unsupported

DEFAULT_TIMEOUT_S = 600.0

# Why there is no option cuda_symmetric_memory any more.
NO_SYMMETRIC_MEMORY = (
    "symmetric memory was removed: omit it; NCCL 2.27 and newer has kernels of its own for "
    "symmetric memory"
)

# Of _core.Stats: what stats() has.
STATS = (
    *("calls", "frames_sent", "bytes_sent", "bytes_written", "bytes_received"),
    *("bytes", "seconds"),
)

INT32 = 2**31 - 1  # the largest color, key or count

# How long replace() waits for processes that join.
DEFAULT_WAIT_S = 60.0

# The groups whose store this process serves, as rank 0, and how long it waits at their end for the
# ranks that may use it.
serving: weakref.WeakSet[Group] = weakref.WeakSet()
SERVE_S = 10.0

# Called by shrink(), replace() and grow() with the old and the new group.
on_shrink: list[Callable[[Group, Group], None]] = []

# A WeakSet cannot be iterated while another thread drops a group.
_groups: set[weakref.ref[Group]] = set()
_lock = threading.RLock()  # of the subgroups to abort; reentrant for aborts by signal handlers


class Stats(dict[str, float]):
    """Totals of a rank by name, each also an attribute: see Group.stats()."""

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError if there is no such total."""
        try:
            return self[name]
        except KeyError:  # hasattr() expects another error
            raise AttributeError(f"stats() has no {name!r}, but {', '.join(self)}") from None


class Group:
    """Ranks that call collectives together, each from one thread, all in the same order.

    Attributes:
        core: the compiled group; internal, for pycomm's own modules.
        cuda_agreement: "before", or "after" to enqueue a call like an earlier one on CUDA arrays
            before the ranks compare it (docs/cuda.md). Set it as cuda_channels.
        cuda_channels: channels of rings over large CUDA arrays, 1 to 8 (docs/cuda.md). Set it
            before the first call with such arrays; rank 0's value is used. split() and shrink()
            copy it.
        cuda_internode_transport: "nccl", or "tcp" to send CUDA arrays between hosts through host
            memory and pycomm's connections. Set it as cuda_channels.
        joined: ranks of the processes that joined when replace() or grow() made this group, or the
            one from which split() made it.
        successor: the group that shrink(), replace() or grow() made of this one; None: not yet.
    """

    __slots__ = (
        "__weakref__",
        "_aborted",
        "_devices",
        "_elastic",
        "_rank",
        "_size",
        "_store",
        "_subgroups",
        "_timeout_s",
        "core",
        "cuda_agreement",
        "cuda_channels",
        "cuda_internode_transport",
        "joined",
        "successor",
    )

    def __init__(
        self,
        core: _core.Group,
        store: _core.Store | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Wraps `core`, whose ranks met in `store`; `timeout_s` is the time limit of its calls."""
        self.core = core
        self._devices: dict[int, _core.Collectives] = {}  # by device index: see device_groups.py
        self._rank, self._size = core.rank, core.size
        self._store, self._timeout_s = store, timeout_s
        self._aborted: str | None = None  # the reason
        self.cuda_channels, self.cuda_internode_transport, self.cuda_agreement = 1, "nccl", "before"
        self._subgroups: list[weakref.ref[Group]] = []  # made by split()
        self._elastic: Elastic | None = None
        self.joined: list[int] = []
        self.successor: Group | None = None
        _groups.add(weakref.ref(self, _groups.discard))

    def _refuse_symmetric_memory(self, _: object) -> None:
        raise Unsupported(f"cuda_symmetric_memory: {NO_SYMMETRIC_MEMORY}")

    cuda_symmetric_memory = property(fset=_refuse_symmetric_memory)

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
        return self.core.ranks

    @property
    def name(self) -> str:
        """The group's name, the same on every rank."""
        return self.core.name

    def peer_info(self) -> list[_core.Member]:
        """By rank: host, process id, and the transport between this rank and it."""
        return self.core.members

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        """The subgroup of the ranks with this color, ordered by (key, rank). Collective.

        Args:
            color: 0 or more; None or negative: join no subgroup and return None.
            key: None: the rank.

        Raises:
            InvalidArgument: an argument is no integer of 32 bits.
            Error: as pycomm.all_reduce.
        """
        color = -1 if color is None else integer("color", color, -INT32 - 1, INT32)
        core = self.core.split(
            color, self._rank if key is None else integer("key", key, -INT32 - 1, INT32)
        )
        if core is None:
            return None
        subgroup = Group(core, self._store, self._timeout_s)
        joined = {self.ranks[rank] for rank in self.joined}
        subgroup.joined = [rank for rank, one in enumerate(subgroup.ranks) if one in joined]
        self._copy_options(subgroup)
        self._adopt_subgroup(subgroup)
        return subgroup

    def _copy_options(self, to: Group) -> None:
        to.cuda_channels = self.cuda_channels
        to.cuda_internode_transport = self.cuda_internode_transport
        to.cuda_agreement = self.cuda_agreement

    def _adopt_subgroup(self, subgroup: Group) -> None:
        """Makes abort() of this group abort `subgroup` too."""
        with _lock:
            living = [*_living(self._subgroups), subgroup]
            self._subgroups = [weakref.ref(one) for one in living]
            reason = self._aborted
        if reason is not None:  # another thread aborted this group meanwhile
            subgroup.abort(reason)

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
            InvalidArgument: `timeout_s` is not above 0.
            GroupBroken: the survivors are not more than half of the ranks that may live (or half of
                them with the lowest rank); or the others continued without this rank.
            PeerLost: the rendezvous store ended, with the rank that served it.
            Timeout: the survivors could not meet in time.
        """
        return self._regroup("shrink", timeout_s, None)

    def replace(self, timeout_s: float | None = None, wait_s: float = DEFAULT_WAIT_S) -> Group:
        """As shrink(), but new processes take the ranks that were lost. Collective over the
        survivors and the processes that call pycomm.join. Of an elastic group.

        The survivors keep their ranks. A process gets the lost rank that it asks for, as in
        `ranks`; others get the lowest in order of arrival. `joined` of the new group lists these
        ranks.

        Args:
            timeout_s: limit of the call; None: the group's.
            wait_s: how long to wait for new processes; under `pycomm launch` only for those that it
                can start. Afterwards the group continues without those that are missing; ranks
                above a missing one are renumbered.

        Raises:
            InvalidArgument: the group is not elastic, or a time is invalid.
            GroupBroken, PeerLost, Timeout: as shrink().
        """
        wait_s = seconds("wait_s", wait_s, zero=True)
        self._limit(timeout_s)
        self._check_elastic("replace")
        return self._regroup("replace", timeout_s, wait_s)

    def grow(self, count: int = 1, timeout_s: float | None = None) -> Group:
        """Adds new processes to this group, which must be elastic and intact. Collective over its
        ranks and the processes that call pycomm.join.

        The ranks keep their numbers. A process gets the new rank that it asks for; others get the
        lowest in order of arrival. The new group becomes the default if this one was it. This group
        is closed.

        Args:
            count: number of processes to add.
            timeout_s: limit of the call; None: the group's.

        Raises:
            InvalidArgument: the group is not elastic, or an argument is invalid.
            Timeout: not all ranks called it, or fewer than `count` processes joined. The group
                stays usable.
            PeerLost: a rank died, or a process that was to join. The group stays usable, unless a
                rank died.
        """
        limit_s, count = self._limit(timeout_s), integer("count", count, 1, INT32)
        elastic = self._check_elastic("grow")
        store = self._key_store()[0]
        assert isinstance(store, SurvivingStore)
        core, elastic = grow.grow(self.core, store, elastic, count, limit_s)
        group = self._inherit(elastic_group(core, elastic, self._timeout_s))
        self.close()
        return group

    def _regroup(self, op: str, timeout_s: float | None, wait_s: float | None) -> Group:
        store, limit_s = self._key_store()[0], self._limit(timeout_s)
        joiners = None
        if wait_s is not None:  # leaves time to form the group
            wait_s = min(wait_s, max(limit_s - 2 * shrink.FORM_S, limit_s / 2))
            before = self._check_elastic(op)
            joiners = Joiners(time.monotonic() + wait_s, before.answered, before.file)
        core, elastic = shrink.regroup(self.core, store, limit_s, self._elastic, joiners)
        if elastic is not None:
            return self._inherit(elastic_group(core, elastic, self._timeout_s))
        made = Group(core, self._store, self._timeout_s)
        if self in serving:
            serving.add(made)
        return self._inherit(made)

    def _limit(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else seconds("timeout_s", timeout_s)

    def _inherit(self, made: Group) -> Group:
        """Gives `made`, which replaces this group, what it copies from it."""
        self._copy_options(made)
        self.successor = made
        for callback in on_shrink:
            callback(self, made)
        return made

    def _check_elastic(self, op: str) -> Elastic:
        if self._elastic is None:
            raise InvalidArgument(
                f"{op}: the group is not elastic: pass elastic=FILE to pycomm.init on all ranks, "
                "or start them with pycomm launch --replace"
            )
        return self._elastic

    def stats(self) -> Stats:
        """This rank's totals since the group was formed, without the data of CUDA arrays.

        Returns:
            A dictionary of numbers, each also an attribute: calls, frames_sent, bytes_sent
            (payload), bytes_written (with frame headers: all bytes written to peers) and the same
            as bytes, bytes_received, and the seconds spent in calls.

        Raises:
            GroupBroken: the group belongs to the parent process of a fork.
        """
        core = self.core.stats()
        return Stats({name: getattr(core, name) for name in STATS})

    def close(self) -> None:
        """Leaves the group cleanly; later calls raise GroupBroken. Closing twice has no effect.

        Subgroups made by split() stay open until they are closed or the process exits. If this rank
        serves the store of user_get, as rank 0, it waits up to 10 s until the others left or died.
        """
        for core in list(self._devices.values()):
            core.close()
        if self in serving:
            self.core.close_after_peers(SERVE_S)
        self.core.close()
        if not self.core.forked:
            self._store = None  # the last reference to rank 0's store ends it

    def abort(self, reason: str) -> None:
        """Ends the group on every rank with an error that contains `reason`. Callable from any
        thread.

        Also aborts subgroups made by split() that contain this rank; for the default group also
        those of torch's new_group() and split_group().

        Raises:
            InvalidArgument: `reason` is no text.
        """
        plain_text("reason", reason)
        with _lock:
            self._aborted, subgroups = reason, _living(self._subgroups)
        for core in list(self._devices.values()):
            core.abort(reason)
        self.core.abort(reason)
        for subgroup in subgroups:
            subgroup.abort(reason)

    def _key_store(self) -> tuple[_core.Store, str, float]:
        """For objects/: the store of this group's keys, their prefix, and the limit in seconds.
        Raises GroupBroken if the group was closed or belongs to the parent process.
        """
        name = self.core.name  # raises in a forked child
        if self._store is None:
            raise GroupBroken("this rank has left the group: it was closed", rank=self._rank)
        return self._store, f"{name}/user/", self._timeout_s

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """The group itself: a copy of a module communicates in the same group."""
        return self

    def __repr__(self) -> str:
        """For example <pycomm.Group 'world' rank 0 of 2>."""
        name = self.core.name if not self.core.forked else "of the parent process"
        return f"<pycomm.Group {name!r} rank {self._rank} of {self._size}>"


def elastic_group(core: _core.Group, elastic: Elastic, timeout_s: float) -> Group:
    """Wraps an elastic group, and writes its file, unless others continued without this rank."""
    made = Group(core, elastic.store(core.rank), timeout_s)
    made._elastic, made.joined = elastic, list(elastic.joined)
    # A slow rank does not replace a newer file; the first group replaces that of another run.
    if not elastic.generation or successors(elastic, core.rank) is None:
        write_file(elastic.file, elastic.servers)
    return made


def _living(groups: Iterable[weakref.ref[Group]]) -> list[Group]:
    """The groups that exist. Any thread."""
    return [group for reference in list(groups) if (group := reference()) is not None]


def abort_all(reason: str) -> None:
    """Aborts every group of this process with an error that contains `reason`."""
    for group in _living(_groups):
        with contextlib.suppress(Exception):  # closed meanwhile
            group.abort(reason)


def _close_all(*_: Any) -> None:
    """At exit: leaves every group cleanly, so that no peer reports a loss."""
    for group in _living(_groups):
        with contextlib.suppress(Exception):  # closed or broken already
            group.close()


atexit.register(_close_all)
