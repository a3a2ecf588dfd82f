"""Plain values: their bytes, and the keys that ranks exchange, with every rendezvous."""

import contextlib
import math
import os
import random
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from finished import finished, finished_together
from on_ranks import on_ranks

import pycomm
from benchmarks.support.ports import free_port
from pycomm import Group, _core, errors
from pycomm.objects import MAX_KEY_BYTES, MAX_VALUE_BYTES, serialization
from pycomm.testing import run_ranks

pytestmark = pytest.mark.usefixtures("torch_first_store")

PLAIN = [
    *(None, True, False, 0, -1, 255, -128, 1 << 200, -(1 << 63), 0.0, -0.0, 1.5e300, math.inf),
    *("", "a\0b", "ä€\U0001f600", "\ud800", b"", b"\0\xff", [], (), {}, [[], ()], (1, "1", b"1")),
    {"a": [1, {"b": None}], 2: (3.5,), b"x": True, None: -0.0, (1, "k"): "tuples are keys too"},
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:20])
def test_plain_values_round_trip(value: Any) -> None:
    back = serialization.decode(serialization.encode(value))
    assert repr(back) == repr(value)  # distinguishes True from 1 and -0.0 from 0.0
    assert math.isnan(serialization.decode(serialization.encode(math.nan)))


ARRAYS = [
    *(
        np.arange(6, dtype=name).reshape(2, 3)
        for name in ("i1", "<u2", ">i4", "u8", "f2", "f4", ">f8")
    ),
    *(np.array([True, False]), np.array(2.5), np.zeros((0, 3), np.int64), np.ones((1,) * 32, "f4")),
    np.arange(12.0).reshape(3, 4).T[::2],
]


@pytest.mark.parametrize("x", ARRAYS, ids=lambda x: f"{x.dtype}{x.shape}"[:20])
def test_arrays_round_trip(x: np.ndarray) -> None:
    (back,) = serialization.decode(serialization.encode([x]))
    assert (back.shape, back.dtype) == (x.shape, x.dtype.newbyteorder("="))
    assert np.array_equal(back, x)
    back[...] = 1  # it is writable


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        *((np.int64(3), 3), (np.float32(0.5), 0.5), (np.float64(0.1), 0.1), (np.bool_(1), True)),
        *((np.str_("a"), "a"), (np.bytes_(b"a"), b"a"), ({np.int8(1): [np.uint64(2)]}, {1: [2]})),
    ],
)
def test_numpy_scalars_become_plain(value: Any, plain: Any) -> None:
    assert repr(serialization.decode(serialization.encode(value))) == repr(plain)


def test_a_shape_of_torch_becomes_a_tuple() -> None:
    torch = pytest.importorskip("torch")
    back = serialization.decode(serialization.encode({"shape": torch.empty(2, 3).shape}))
    assert repr(back) == "{'shape': (2, 3)}"


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (("<f4", (2,), bytes(7)), "7 bytes for shape"),
        (("<f4", (-1, -1), bytes(4)), "invalid shape"),
        (("<f4", (10**5000,), bytes(4)), "invalid shape"),  # too long for Python to print
        (("<f4", (0, 1 << 63), b""), "invalid shape"),
        (("<f4", (0, *[(1 << 63) - 1] * 2), b""), "invalid shape"),
        (("<f4", (1,) * 65, bytes(4)), "no valid dtype, shape"),
        (("|O8", (1,), bytes(8)), "no valid dtype"),
        ((["<f4"], (1,), bytes(4)), "no valid dtype"),
        (("<f4", (True,), bytes(4)), "invalid shape"),
        (("<f4", [1], bytes(4)), "no valid dtype"),
        (("<f4", (1,)), "not three values"),
        ([1], "not three values"),
    ],
)
def test_an_invalid_array_is_rejected(described: Any, message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        serialization.decode(b"a" + serialization.encode(described))


class Text(str):
    """A subclass of str, which is no plain value."""


def endless() -> Any:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"value is a builtins\.object"),
        ([1, {"a": (0, 3j)}], r"value\[1\]\['a'\]\[1\] is a builtins\.complex"),
        ([np.longdouble(1)], r"value\[0\] is a numpy\.longdouble"),
        (np.array([1j]), r"value is a numpy\.ndarray of complex128"),
        (np.array([None]), r"value is a numpy\.ndarray of object"),
        (np.ma.masked_array([1]), r"value is a .*MaskedArray"),
        ({"x": {1}}, r"value\['x'\] is a builtins\.set"),
        ({Text("k"): 1}, r"the key 'k' of value is a .*Text"),
        (bytearray(b"a"), "bytearray"),
        (endless(), "deep"),
    ],
)
def test_unsupported_value_is_named(value: Any, message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        serialization.encode(value)


def test_arbitrary_bytes_are_a_value_or_rejected() -> None:
    def decodes(content: bytes) -> bool:
        try:
            serialization.decode(content)
        except errors.InvalidArgument:  # the allowed error
            return False
        return True

    whole = serialization.encode([{"key": (1, 2.5)}, "text", b"bytes", np.ones(2), None])
    assert decodes(whole)
    assert not any(decodes(whole[:cut]) for cut in range(len(whole)))
    assert not decodes(whole + b"N")
    huge = (1 << 63).to_bytes(8, "little")
    for kind in b"isbltda":
        assert not decodes(bytes([kind]) + huge)
    assert not decodes(b"l" + (1).to_bytes(8, "little") * 5000)
    deep = (b"l" + (1).to_bytes(8, "little")) * 5000 + b"N"
    assert not decodes(deep)
    assert not decodes(b"d" + (1).to_bytes(8, "little") + b"l" + bytes(8) + b"N")  # a list as a key
    assert not decodes(b"s" + (1).to_bytes(8, "little") + b"\xff")
    rng = random.Random(7)
    for _ in range(5000):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        decodes(bytes(content[: rng.randint(0, len(content))]))


VALUE = {"a": [1, 2.5, b"\0"], "b": None}


def set_and_claim(group: Group) -> Any:
    """Every rank sets, gets the next one's, and all try to take one value."""
    n = group.size
    pycomm.user_set(f"of {group.rank}", [group.rank, VALUE])
    got = pycomm.user_get(f"of {(group.rank + 1) % n}", 30.0)
    assert got == [(group.rank + 1) % n, VALUE]
    pycomm.barrier()
    pycomm.user_set(f"of {group.rank}", "a later one")
    assert pycomm.user_get(f"of {group.rank}") == "a later one"
    pycomm.barrier()
    if group.rank == 0:
        pycomm.user_set("one", "prize")
    popped = 0
    with contextlib.suppress(errors.Timeout):  # all ranks but one get nothing
        popped += pycomm.user_pop("one", 0.4) == "prize"
    winners = int(pycomm.all_reduce(np.array([popped]))[0])
    with pytest.raises(errors.Timeout, match=r"no rank set 'one' within 0\.05 s"):
        pycomm.user_get("one", 0.05)
    pycomm.barrier()
    return winners


@pytest.mark.parametrize("n", [1, 3])
def test_keys_between_threads(n: int) -> None:
    assert run_ranks(n, set_and_claim) == [1] * n


def test_keys_between_processes() -> None:
    assert run_ranks(3, set_and_claim, transport="", processes=True) == [1, 1, 1]


@on_ranks(4)
def test_groups_have_separate_keys(group: Group) -> None:
    pair = group.split(group.rank // 2)
    assert pair is not None
    pycomm.user_set("key", f"world, from {group.rank}")
    if pair.rank == 0:
        pycomm.user_set("key", group.rank, group=pair)
    value = pycomm.user_get("key", group=pair)
    pycomm.barrier()
    pair.close()
    with pytest.raises(errors.GroupBroken, match="closed"):
        pycomm.user_get("key", group=pair)
    assert value == group.rank // 2 * 2


@on_ranks(2)
def test_invalid_keys_and_values_are_rejected(group: Group) -> None:
    for key in ("", "x" * (MAX_KEY_BYTES + 1), b"bytes", None, "\ud800"):
        for call in (lambda k: pycomm.user_set(k, 1), pycomm.user_get, pycomm.user_pop):
            with pytest.raises(errors.InvalidArgument, match="invalid key"):
                call(key)
    with pytest.raises(errors.InvalidArgument, match="at most 1048576"):
        pycomm.user_set("large", bytes(MAX_VALUE_BYTES))
    with pytest.raises(errors.InvalidArgument, match="value is a builtins"):
        pycomm.user_set("object", object())
    with pytest.raises(errors.InvalidArgument, match="timeout_s"):
        pycomm.user_get("key", 0)
    longest = str(group.rank) * MAX_KEY_BYTES
    pycomm.user_set(longest, bytes(MAX_VALUE_BYTES - 9))
    assert len(pycomm.user_pop(longest)) == MAX_VALUE_BYTES - 9


def test_a_get_waits_for_another_thread_on_one_connection() -> None:
    """After all_ranks_connected() a client has one connection for all its threads."""
    server = _core.TcpStore.serve("127.0.0.1", 0, "a key of the run")
    client = _core.TcpStore.connect("127.0.0.1", server.port, "a key of the run", 10.0)
    server.all_ranks_connected()
    client.all_ranks_connected()
    with pytest.raises(errors.Timeout):
        _core.TcpStore.connect("127.0.0.1", server.port, "a key of the run", 0.1)
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(client.get("later", 30.0)))
    waiting.start()
    for _ in range(3):
        assert client.add("count", 2) % 2 == 0
    client.set("later", b"come")
    waiting.join()
    assert got == [b"come"]
    assert client.remove("later") == b"come"
    assert client.remove("later") is None
    assert server.get("count", 1.0) == b"6"
    with pytest.raises(errors.InvalidArgument, match=r"not a 64-bit integer|not a number"):
        client.set("word", b"1x")
        client.add("word", 1)


INTERRUPTED = """
import os, signal, threading, time, pycomm
pycomm.init()
start = time.monotonic()
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    pycomm.user_get("never", 60.0)
except KeyboardInterrupt:
    print("stopped", time.monotonic() - start < 20)
"""


def test_ctrl_c_ends_a_wait_for_a_key() -> None:
    done = finished([sys.executable, "-c", INTERRUPTED], timeout=60)
    assert done.stdout == "stopped True\n", done.stderr


TOGETHER = """
import os, pycomm
{before}
group = pycomm.init(timeout_s=60)
inodes = {{line.split()[9] for name in ("tcp", "tcp6") for line in open(f"/proc/net/{{name}}")
          if line.split()[3] == "0A"}}
ours = set()
for fd in os.listdir("/proc/self/fd"):
    try:
        ours.add(os.readlink(f"/proc/self/fd/{{fd}}"))
    except OSError:  # listdir's own descriptor is closed
        pass
listening = sum(f"socket:[{{inode}}]" in ours for inode in inodes)
for turn in range(2):
    if group.rank == turn:
        pycomm.user_set("key", [turn, "value"])
    assert pycomm.user_pop("key") == [turn, "value"] if group.rank != turn else True
    pycomm.barrier()
print(group.rank, group.size, listening, flush=True)
pycomm.barrier()
"""
BY_TORCH = """
import torch.distributed as dist
dist.init_process_group("pycomm")
"""


def run_two(code: str, **environment: str) -> list[str]:
    """The output of two processes that use a free port as their rendezvous."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env = {**os.environ, **place, **environment}
    command = [sys.executable, "-c", code]
    ranks = finished_together((command, {**env, "RANK": str(rank)}) for rank in range(2))
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [line for rank in ranks for line in rank.stdout.splitlines()]


def test_user_keys_with_a_secret_and_one_open_port() -> None:
    """Rank 0's store listens for ranks that lose their connection to it; no other port is open."""
    assert run_two(TOGETHER.format(before=""), PYCOMM_SECRET="0123456789abcdef") == [
        "0 2 1",
        "1 2 0",
    ]


@pytest.mark.parametrize("before", ["", BY_TORCH], ids=["init", "init_process_group"])
def test_keys_through_the_store_of_torch(before: str) -> None:
    """Only torch's store listens, on rank 0."""
    pytest.importorskip("torch")
    lines = run_two(TOGETHER.format(before=before))
    assert [re.sub(r"1$", "0", line) if line[0] == "0" else line for line in lines] == [
        "0 2 0",
        "1 2 0",
    ]


def dict_of(keys: list[Any]) -> bytes:
    """The bytes of a dict whose values are None, as a hostile program might create them."""
    parts = b"".join(serialization.encode(key) + b"N" for key in keys)
    return b"d" + len(keys).to_bytes(8, "little") + parts


EQUAL = [k * ((1 << 61) - 1) for k in range(10_000)]  # Python hashes all to 0


@pytest.mark.parametrize("keys", [EQUAL, [(k,) for k in EQUAL]], ids=["ints", "tuples"])
def test_colliding_keys_are_rejected_after_a_few(
    keys: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dict compares each key with all before it: the test counts how many are read."""
    content = dict_of(keys)
    read: list[int] = []
    whole = serialization._Reader.value

    def counted(reader: Any, depth: int) -> Any:
        read.append(reader.at)
        return whole(reader, depth)

    monkeypatch.setattr(serialization._Reader, "value", counted)
    with pytest.raises(errors.InvalidArgument, match="have one hash"):
        serialization.decode(content)
    assert len(read) < 5 * serialization.MAX_EQUAL_HASHES
    with pytest.raises(errors.InvalidArgument, match="10000 keys of value have the same hash"):
        serialization.encode(dict.fromkeys(keys))


def test_powers_of_two_are_valid_keys() -> None:
    powers = {2.0**k: k for k in range(-1074, 1024)}
    assert serialization.decode(serialization.encode(powers)) == powers


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_successive_groups_of_one_name_share_a_torch_store(kind: str, tmp_path: Any) -> None:
    """The first rank that leaves a group begins the next one, while others use the last."""
    dist = pytest.importorskip("torch.distributed")
    from pycomm._bootstrap.rendezvous import TorchStore
    from pycomm.testing.threads import join

    make = {
        "hash": dist.HashStore,
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, True),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 2),
    }[kind]
    stores = [make(), make()] if kind == "file" else [make()] * 2

    def one(rank: int) -> list[str]:
        names = []
        for turn in range(3):
            options = {"size": 2, "timeout_s": 20.0, "transport": "shm"}
            group = join(TorchStore(stores[rank]), rank, options)
            assert pycomm.all_reduce(np.full(1, turn), group=group)[0] == 2 * turn
            pycomm.user_set(f"of {rank}", turn, group=group)
            assert pycomm.user_get(f"of {1 - rank}", group=group) == turn
            assert pycomm.user_pop(f"of {1 - rank}", group=group) == turn
            names.append(group.name)
            group.close()
        return names

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [["world", "world#2", "world#3"]] * 2
