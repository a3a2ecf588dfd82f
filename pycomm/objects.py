"""Plain values between ranks: gathered from all, or left under a key for whoever wants them.

Plain are None, bool, int, float, str and bytes, and lists, tuples and dicts of them
(serialization.py): what comes from another rank can never run code. Keys lie in the store in which
the ranks of the run met, apart for each group: torch's where torch made the group, else that of
rank 0's process, which serves them until it leaves.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from pycomm import calls, serialization
from pycomm.collectives import all_gather_v
from pycomm.errors import InvalidArgument, Timeout
from pycomm.group import Group, default

__all__ = [
    "MAX_KEY_BYTES",
    "MAX_VALUE_BYTES",
    "all_gather_object",
    "user_get",
    "user_pop",
    "user_set",
]

MAX_KEY_BYTES = 512
LEAST_S = 0.3  # for a healthy store to answer at the end of a limit
MAX_VALUE_BYTES = 1 << 20  # of a value under a key, as bytes: what a store takes


def all_gather_object(
    value: Any, *, group: Group | None = None, timeout_s: float | None = None
) -> list[Any]:
    """Collective. Every rank's plain value, by rank.

    Raises:
        InvalidArgument: a rank's value is not plain. Raised on every rank, with the name of that
            rank and of the part that is not; the group goes on.
    """
    try:
        mine = b"\1" + serialization.encode(value)
    except InvalidArgument as error:  # the others are told, so that nobody waits for this rank
        mine = b"\0" + str(error).encode("utf-8", "backslashreplace")
    group = group or default()
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
    """Leaves a plain value under `key` for all ranks of the group; a later one replaces it.

    Not collective: any rank, at any time, from any thread.

    Args:
        key: of 1 to MAX_KEY_BYTES bytes as UTF-8.
        value: of at most MAX_VALUE_BYTES bytes when encoded (8 to 10 more than its text has, for
            each part).

    Raises:
        InvalidArgument: the value is not plain, or key or value are too long.
        PeerLost: the store has gone, with rank 0.
        Timeout: the store did not answer within the group's limit.
    """
    store, prefix, limit_s = (group or default())._key_store()
    encoded = serialization.encode(value)
    if len(encoded) > MAX_VALUE_BYTES:
        raise InvalidArgument(
            f"user_set: the value of {key!r} has {len(encoded)} bytes and may have "
            f"{MAX_VALUE_BYTES}: broadcast an array instead",
            op="user_set",
            bytes=len(encoded),
        )
    store.set(_place(prefix, key, "user_set"), encoded, limit_s)


def user_get(key: str, timeout_s: float | None = None, *, group: Group | None = None) -> Any:
    """The value of `key`, once a rank has set it.

    Raises:
        Timeout: nobody set it in `timeout_s` seconds (None: the group's limit). The group goes on.
        PeerLost: the store has gone, with rank 0.
    """
    return _wait("user_get", key, timeout_s, group)


def user_pop(key: str, timeout_s: float | None = None, *, group: Group | None = None) -> Any:
    """As user_get, and takes the value away: of several ranks that pop it one gets it.

    The errors are those of user_get.
    """
    return _wait("user_pop", key, timeout_s, group)


def _wait(verb: str, key: str, timeout_s: float | None, group: Group | None) -> Any:
    """Waits for the key and gives its value, or takes it, as the verb says."""
    store, prefix, limit_s = (group or default())._key_store()
    where = _place(prefix, key, verb)
    limit_s = calls.limit(timeout_s) or limit_s
    end = time.monotonic() + limit_s
    while True:
        try:
            value: bytes | None = store.get(where, max(0.0, end - time.monotonic()))
        except Timeout:
            text = f"{verb}: no rank set {key!r} within {limit_s:.3g} s"
            raise Timeout(text, op=verb, elapsed_s=limit_s) from None
        if verb == "user_pop":
            value = store.remove(where, max(LEAST_S, end - time.monotonic()))
        if value is not None:  # else another rank was faster
            return serialization.decode(value)


def _place(prefix: str, key: str, verb: str) -> str:
    """Where the store has the key; raises InvalidArgument for one that is not a short text."""
    try:
        good = type(key) is str and 1 <= len(key.encode()) <= MAX_KEY_BYTES
    except UnicodeEncodeError:  # half a surrogate pair
        good = False
    if not good:
        shown = f"{key!r:.40}" if type(key) is str else type(key).__name__
        raise InvalidArgument(
            f"{verb}: a key is a text of 1 to {MAX_KEY_BYTES} bytes, not {shown}", op=verb
        )
    return prefix + key
