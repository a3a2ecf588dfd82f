"""Forms the groups of a torch process group that was created with enable_reconfigure=True.

Each process serves a store, whose address and key make up its handle. The caller passes the handles
of the new ranks to all of them. They form the group through the store of its rank 0, under keys
that contain the uuid.

If the run has a secret, each store requires it and the handles contain none. Otherwise the handles
contain the keys of the stores: every process that can read them can join.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pycomm import _core
from pycomm._bootstrap import elastic_store, rendezvous
from pycomm.errors import InvalidArgument, Mismatch, PeerLost, Timeout

WAITING = (
    "the process group was created with enable_reconfigure=True: call reconfigure() on it first"
)
REPEAT = "call reconfigure() again, on all ranks, with a fresh uuid and handles of live processes"
# A route to it, if there is one, leads out of this host. RFC 5737 reserves it; nothing is sent.
ELSEWHERE = "192.0.2.1"
HANDLE = re.compile(r"pycomm/([0-9a-zA-Z.:%_-]{1,255})/([0-9]{1,5})/([0-9a-f]{64})")

# (store, name, rank, size, timeout_s) -> the group
Connect = Callable[[_core.TcpStore, str, int, int, float], _core.Group]
# (group, store) -> a function that unregisters the group
Register = Callable[[_core.Group, _core.TcpStore], Callable[[], None]]


@dataclass(frozen=True)
class _Address:
    """What a handle contains."""

    host: str
    port: int
    token: str  # random; without a secret the key of the store


def ordered(handles: Sequence[str], given_order: bool) -> list[str]:
    """The handles by rank.

    Args:
        given_order: they are a list; else a set, and ranks follow the order of the strings.

    Raises:
        InvalidArgument: no handle, the same one twice, or one of another backend.
    """
    if not handles:
        raise InvalidArgument("reconfigure: no handles: pass one for each rank, this one too")
    if len(set(handles)) < len(handles):
        raise InvalidArgument("reconfigure: a handle occurs twice: pass one for each rank")
    for handle in handles:
        _address_in(handle)
    return list(handles) if given_order else sorted(handles)


def _address_in(handle: str) -> _Address:
    match = HANDLE.fullmatch(handle)
    if match is None:
        raise InvalidArgument(
            f"reconfigure: invalid handle {handle[:80]!r}: pass those that "
            "get_reconfigure_handle() returned on the ranks"
        )
    return _Address(match[1], int(match[2]), match[3])


class Membership:
    """The handle of this process, and the groups that it joins.

    Args:
        connect: connects the ranks of a group.
        register: registers a group beside pycomm's default group.
        secret: the run's shared secret; "" if there is none.
        towards: a host of the run; "" if none is known.
    """

    def __init__(self, connect: Connect, register: Register, secret: str, towards: str) -> None:
        self._connect, self._register, self._secret = connect, register, secret
        token = secrets.token_hex(32)
        key, loopback = secret or token, bool(towards) and rendezvous.is_loopback(towards)
        try:
            served = elastic_store.serve(towards or ELSEWHERE, loopback, key, 0)
        except OSError:  # no network but the loopback
            served = elastic_store.serve("", True, key, 0)
        self._own, server = served
        self.handle = f"pycomm/{server.host}/{server.port}/{token}"
        self._used: set[int] = set()
        self._unregister: Callable[[], None] = lambda: None

    def register(self, core: _core.Group) -> None:
        """Registers a group in place of the last one."""
        self._unregister()
        self._unregister = self._register(core, self._own)

    def unregister(self) -> None:
        """Unregisters the last group."""
        self._unregister()

    def prepare(
        self, uuid: int, handles: Sequence[str], given_order: bool
    ) -> Callable[[float], object]:
        """Checks the arguments; returns form(timeout_s), which forms the group and returns a
        capsule of it. The uuid counts as used from now on.

        Raises:
            InvalidArgument: invalid handles; this process's is not among them; or the uuid was
                used.
        """
        by_rank = ordered(handles, given_order)
        if self.handle not in by_rank:
            raise InvalidArgument(
                "reconfigure: the handles do not contain that of this rank: pass "
                "get_reconfigure_handle() of each rank of the new group"
            )
        if uuid in self._used:
            raise InvalidArgument(
                f"reconfigure: uuid {uuid} was already used in this process group, also if no "
                "group formed: pass a fresh one"
            )
        self._used.add(uuid)
        return functools.partial(self._form, uuid, by_rank)

    def _form(self, uuid: int, by_rank: Sequence[str], timeout_s: float) -> object:
        """Forms a group.

        Raises:
            Timeout, PeerLost: no group formed; the text names the ranks.
            Mismatch: rank 0 has other handles.
        """
        end = time.monotonic() + timeout_s
        rank, name = by_rank.index(self.handle), f"reconfigure-{uuid}"
        digest = hashlib.sha256("\n".join(by_rank).encode()).digest()
        if rank == 0:
            store = self._own
            store.set(f"{name}/handles", digest)
        else:
            store = self._store_of(by_rank[0], name, digest, end)
        try:
            core = self._connect(store, name, rank, len(by_rank), max(0.1, end - time.monotonic()))
        except (PeerLost, Timeout) as error:
            raise type(error)(f"{error}; {REPEAT}", op="reconfigure", rank=rank) from error
        self.register(core)
        return core._capsule()

    def _store_of(self, handle: str, name: str, digest: bytes, end: float) -> _core.TcpStore:
        """A client of the store of rank 0, which has the same handles."""
        address, begin = _address_in(handle), time.monotonic()
        try:
            store = _core.TcpStore.connect(
                address.host, address.port, self._secret or address.token, max(0.1, end - begin)
            )
            found = store.get(f"{name}/handles", max(0.1, end - time.monotonic()))
        except (PeerLost, Timeout) as error:
            raise type(error)(
                f"reconfigure: rank 0 of the new group, at {address.host}:{address.port}, did not "
                f"call reconfigure() with this uuid ({error}); {REPEAT}",
                op="reconfigure",
                peer=0,
                elapsed_s=time.monotonic() - begin,
            ) from error
        if found != digest:
            raise Mismatch(
                "reconfigure: the handles of this rank differ from those of rank 0: pass the same "
                "to all ranks, in one order or as a set on all, with a fresh uuid"
            )
        return store
