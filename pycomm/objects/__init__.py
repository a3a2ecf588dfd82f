"""Plain values between ranks: gathered from all ranks, or stored under a key.

Plain values are None, bool, int, float, str, bytes and NumPy arrays of numbers, and lists, tuples
and dicts of them (serialization.py): a value from another rank can never run code. A NumPy scalar
arrives as a Python number, a torch.Size as a tuple. Keys are kept in the rendezvous
store, separately for each group. That is torch's store if torch created the group; otherwise
rank 0's process serves it until it leaves, for which it waits until the others left, at most 10 s.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from pycomm._arguments import plain_text
from pycomm._core_api import calls
from pycomm.collectives import all_gather_v
from pycomm.default_group import chosen
from pycomm.errors import InvalidArgument, PeerLost, Timeout
from pycomm.group import Group
from pycomm.objects import serialization

MAX_KEY_BYTES = 512
LEAST_S = 0.3  # what a store gets to answer in, even at the end of a time limit
MAX_VALUE_BYTES = 1 << 20  # of an encoded value under a key: the store's limit


def all_gather_object(
    value: Any, *, group: Group | None = None, timeout_s: float | None = None
) -> list[Any]:
    """Gathers every rank's plain value. Collective.

    Args:
        value: None, bool, int, float, str, bytes, a NumPy array of numbers, or lists, tuples and
            dicts of them. NumPy scalars become Python numbers, a torch.Size a tuple.
        group: the group to call in; None: the default group.
        timeout_s: time limit in seconds; None: the group's.

    Returns:
        The values by rank.

    Raises:
        InvalidArgument: a rank's value is not plain. Raised on every rank; the text names the rank
            and the offending element. The group stays usable.
        Error: as pycomm.all_gather.
    """
    try:
        mine = b"\1" + serialization.encode(value)
    except InvalidArgument as error:  # sent to the other ranks, which wait for this one
        mine = b"\0" + str(error).encode("utf-8", "backslashreplace")
    group = chosen(group)
    parts = all_gather_v(np.frombuffer(mine, np.uint8), group=group, timeout_s=timeout_s)
    texts = [part.tobytes() for part in parts]
    for rank, text in enumerate(texts):
        if text[:1] == b"\0":
            raise InvalidArgument(
                f"all_gather_object: rank {rank}: {text[1:].decode()}",
                op="all_gather_object",
                rank=group.rank,
                peer=rank,
            )
    return [serialization.decode(text[1:]) for text in texts]


def user_set(key: str, value: Any, *, group: Group | None = None) -> None:
    """Stores a plain value under `key` for all ranks of the group; a later value replaces it.

    Not collective: any rank may call it, at any time, from any thread.

    Args:
        key: 1 to MAX_KEY_BYTES bytes of UTF-8.
        value: plain, as in all_gather_object; at most MAX_VALUE_BYTES bytes when encoded (8 to 10
            bytes of overhead for each element).
        group: the group that has the key; None: the default group.

    Raises:
        InvalidArgument: the value is not plain, or key or value are too long.
        PeerLost: the store ended, with rank 0.
        Timeout: the store did not answer within the group's time limit.
    """
    store, prefix, limit_s = chosen(group)._key_store()
    encoded = serialization.encode(value)
    if len(encoded) > MAX_VALUE_BYTES:
        raise InvalidArgument(
            f"user_set: the value of {key!r} has {len(encoded)} bytes, at most "
            f"{MAX_VALUE_BYTES} are allowed: broadcast an array instead",
            op="user_set",
            bytes=len(encoded),
        )
    where = _place(prefix, key, "user_set")
    with _naming_server("user_set"):
        store.set(where, encoded, limit_s)


def user_get(key: str, timeout_s: float | None = None, *, group: Group | None = None) -> Any:
    """Waits until a rank has set `key`, and returns its value.

    Args:
        key: as in user_set.
        timeout_s: time limit in seconds; None: the group's.
        group: the group that has the key; None: the default group.

    Raises:
        InvalidArgument: the key is invalid.
        Timeout: no rank set the key in time. The group stays usable.
        PeerLost: the store ended, with rank 0.
    """
    return _wait("user_get", key, timeout_s, group)


def user_pop(key: str, timeout_s: float | None = None, *, group: Group | None = None) -> Any:
    """Waits until a rank has set `key`, removes it and returns its value. If several ranks pop the
    key at the same time, one of them gets the value.

    Args:
        key: as in user_set.
        timeout_s: time limit in seconds; None: the group's.
        group: the group that has the key; None: the default group.

    Raises:
        InvalidArgument, Timeout, PeerLost: as user_get.
    """
    return _wait("user_pop", key, timeout_s, group)


def _wait(verb: str, key: str, timeout_s: float | None, group: Group | None) -> Any:
    """Waits for the key and returns its value; `verb` "user_pop" also removes it."""
    store, prefix, limit_s = chosen(group)._key_store()
    where = _place(prefix, key, verb)
    limit_s = calls.limit(timeout_s) or limit_s
    end = time.monotonic() + limit_s
    while True:
        with _naming_server(verb):
            try:
                value: bytes | None = store.get(where, max(0.0, end - time.monotonic()))
            except Timeout:  # the store names its own key
                text = f"{verb}: no rank set {key!r} within {limit_s:.3g} s"
                raise Timeout(text, op=verb, elapsed_s=limit_s) from None
            if verb == "user_pop":
                value = store.remove(where, max(LEAST_S, end - time.monotonic()))
        if value is not None:  # else another rank was faster
            return serialization.decode(value)


@contextlib.contextmanager
def _naming_server(verb: str) -> Iterator[None]:
    """Adds to the error of a store that ended which process ended."""
    try:
        yield
    except PeerLost as error:  # names the store only
        text = f"{verb}: the store ended, with rank 0 or the launcher that served it: {error}"
        raise PeerLost(text, op=verb) from None


def _place(prefix: str, key: str, verb: str) -> str:
    """The store's name of the key; raises InvalidArgument unless it is a str of valid length."""
    if not 1 <= len(plain_text("key", key).encode()) <= MAX_KEY_BYTES:
        raise InvalidArgument(
            f"{verb}: invalid key: got {key!r:.40}, expected a str of 1 to {MAX_KEY_BYTES} bytes",
            op=verb,
        )
    return prefix + key
