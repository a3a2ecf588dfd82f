"""Ranks that die while other processes hold their descriptors: survivors detect it within a second.

A forked child of a rank has its descriptors too, and the kernel closes a connection only when the
last process that holds it ends. Ranks that are stopped or busy: test_faults.py.
"""

import contextlib
import fcntl
import multiprocessing
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_groups import connect

import pycomm
from pycomm import Group, errors
from pycomm.testing import run_ranks

RANKS = 4
VICTIM = 2
NOTICED_S = 2.0
"""The promise is 1 s; a busy machine adds its own. What children hold open shows after 5 s."""
TRANSPORTS = ["shm", "tcp"]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(1)


def hold_until_reported(folder: str) -> None:
    """Forks a child that lives until all survivors reported."""
    if os.fork() > 0:
        return
    end = time.monotonic() + 20
    while len(list(Path(folder).glob("reported*"))) < RANKS - 1 and time.monotonic() < end:
        time.sleep(0.02)  # polling interval
    os._exit(0)


def fork_child(folder: str) -> Any:
    hold_until_reported(folder)


def fork_foreign_child(folder: str) -> Any:
    """The child holds copies of the sockets that the library does not know of: so does a child that
    a library starts without the handlers of fork()."""
    copies = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                copies.append(os.dup(int(entry)))
    hold_until_reported(folder)
    for copy in copies:
        os.close(copy)


def load_data(folder: str) -> Any:
    """Two workers of torch, which poll for their parent every 5 s."""
    from torch.utils.data import DataLoader

    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # otherwise it may have no children
    loader = DataLoader(range(1000), num_workers=2, multiprocessing_context="fork", collate_fn=list)
    batches = iter(loader)
    for _ in range(2):  # one of each: a worker that starts after its parent died never ends
        next(batches)
    return batches


def lose_one(group: Group, hold: Callable[[str], Any], die: Callable[[], None], folder: str) -> Any:
    """The victim dies between two calls while its children live."""
    x = np.ones(4, np.float32)
    pycomm.all_reduce(x, group=group)
    if group.rank == VICTIM:
        held = hold(folder)
        pycomm.barrier(group=group)
        Path(folder, "died").write_text(str(time.monotonic()))
        die()
        return held
    pycomm.barrier(group=group)
    try:
        while True:
            pycomm.all_reduce(x, "max", group=group)
    except errors.PeerLost as error:
        noticed = time.monotonic()
        Path(folder, f"reported{group.rank}").touch()
        return noticed - float(Path(folder, "died").read_text()), error.peer, str(error)


def check(results: list[Any]) -> None:
    for rank, result in enumerate(results):
        if rank == VICTIM:
            continue
        assert not isinstance(result, BaseException), result
        noticed_s, peer, text = result
        assert peer == VICTIM
        assert f"rank {VICTIM} " in text
        assert noticed_s < NOTICED_S, text


@pytest.mark.parametrize("die", [kill, crash, leave])
@pytest.mark.parametrize("hold", [fork_child, fork_foreign_child])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_failure_is_detected_although_children_hold_sockets(
    transport: str, hold: Callable[[str], Any], die: Callable[[], None], tmp_path: Path
) -> None:
    check(
        run_ranks(
            RANKS, lose_one, hold, die, str(tmp_path),
            transport=transport, processes=True, exit_timeout_s=15, return_exceptions=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_failure_is_detected_while_workers_load_data(transport: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    check(
        run_ranks(
            RANKS, lose_one, load_data, kill, str(tmp_path),
            transport=transport, processes=True, exit_timeout_s=15, return_exceptions=True,
        )
    )  # fmt: skip


def open_memory() -> int:
    """How many of this process's descriptors are the group's shared memory."""
    return sum(
        os.path.realpath(path).startswith("/memfd:pycomm")
        for path in Path("/proc/self/fd").iterdir()
    )


def call_in_a_child(group: Group) -> Any:
    """The descriptors of the parent in a forked child, and the calls that it must not make."""
    pycomm.barrier(group=group)
    assert open_memory() > 0
    ways_in, way_out = os.pipe()
    child = os.fork()
    if child == 0:
        held = open_memory()
        message = "nothing"
        try:
            pycomm.barrier(group=group)
        except errors.GroupBroken as error:
            message = str(error)
        # Files that it opens get the group's descriptor numbers, and keep them.
        mine = [socket.socketpair() for _ in range(50)]
        del group
        for a, b in mine:
            a.send(b"x")
            assert b.recv(1) == b"x"
        os.write(way_out, f"{message}\n{held}".encode())
        os._exit(0)
    os.close(way_out)
    message, held = os.read(ways_in, 1 << 12).decode().split("\n")
    os.close(ways_in)
    status = os.waitpid(child, 0)[1]
    pycomm.barrier(group=group)
    return message, status, int(held)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forked_child_holds_no_descriptors_and_its_calls_raise(transport: str) -> None:
    for message, status, held in run_ranks(2, call_in_a_child, transport=transport, processes=True):
        assert "this process was forked after the group formed" in message
        assert status == 0
        assert held == 0


def send_and_leave(group: Group, folder: str, orderly: bool) -> Any:
    """Rank 1 ends with an unread message of it, and children hold its sockets: rank 0 gets the
    message, and then the error."""
    pycomm.barrier(group=group)
    if group.rank == 1:
        fork_foreign_child(folder)
        pycomm.send(np.full(1 << 16, 7.0, np.float32), 0, group=group)
        if orderly:
            group.close()
        os._exit(0)
    status = Path(f"/proc/{group.peer_info()[1].pid}/status")
    with contextlib.suppress(OSError):  # its parent has collected it
        while "State:\tZ" not in status.read_text():
            time.sleep(0.01)  # polling interval
    x = np.zeros(1 << 16, np.float32)
    pycomm.recv(x, 1, group=group)
    start = time.monotonic()
    with pytest.raises(errors.PeerLost) as ended:
        pycomm.recv(x, 1, group=group)
    for rank in (0, 2, 3):
        Path(folder, f"reported{rank}").touch()
    return bool((x == 7).all()), time.monotonic() - start, str(ended.value)


@pytest.mark.parametrize("orderly", [True, False], ids=["closed", "died"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_of_a_dead_rank_are_received(
    transport: str, orderly: bool, tmp_path: Path
) -> None:
    result = run_ranks(
        2, send_and_leave, str(tmp_path), orderly,
        transport=transport, processes=True, exit_timeout_s=15, return_exceptions=True,
    )[0]  # fmt: skip
    assert not isinstance(result, BaseException), result
    right, noticed_s, text = result
    assert right
    assert noticed_s < NOTICED_S
    assert ("it closed the group" if orderly else "died") in text


class FolderStore:
    """A store in files, whose rank 2 dies after it stored its rank info, while it reads the
    others'."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank = Path(folder), rank

    def _path(self, key: str) -> Path:
        return self.folder / key.replace("/", "_")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def set(self, key: str, value: bytes, timeout_s: float = 30.0) -> None:
        new = self._path(key).with_suffix(f".new{self.rank}")
        new.write_bytes(value)
        new.rename(self._path(key))

    def get(self, key: str, timeout_s: float) -> bytes:
        if self.rank == VICTIM:
            (self.folder / "died").write_text(str(time.monotonic()))
            kill()
        end = time.monotonic() + timeout_s
        while not self._path(key).exists():
            if time.monotonic() > end:
                raise errors.Timeout(key)
            time.sleep(0.005)  # polling interval
        return self._path(key).read_bytes()

    def add(self, key: str, amount: int, timeout_s: float = 30.0) -> int:
        with self._alone():
            found = self._path(key).read_bytes() if self._path(key).exists() else b"0"
            self.set(key, b"%d" % (int(found) + amount))
            return int(found) + amount

    def remove(self, key: str, timeout_s: float = 30.0) -> bytes | None:
        with self._alone():
            if not self._path(key).exists():
                return None
            value = self._path(key).read_bytes()
            self._path(key).unlink()
            return value

    def claim(self, key: str, value: bytes, timeout_s: float = 30.0) -> bytes:
        with self._alone():
            if not self._path(key).exists():
                self.set(key, value)
            return self._path(key).read_bytes()


def form_with_one_that_dies(rank: int, transport: str, folder: str, late: int | None) -> None:
    end = time.monotonic() + 30.0
    while rank == late and not Path(folder, "died").exists() and time.monotonic() < end:
        time.sleep(0.005)  # polling interval
    try:
        options = {"timeout_s": 30.0, "secret": "k" * 32, "transport": transport, "full_mesh": 64}
        connect(FolderStore(folder, rank), rank, 3, **options)
    except errors.PeerLost as error:
        Path(folder, f"reported{rank}").write_text(f"{time.monotonic()} {error}")
        # A survivor that ended at once could be the rank that the other one names.
        end = time.monotonic() + 30.0
        while len(list(Path(folder).glob("reported*"))) < 2 and time.monotonic() < end:
            time.sleep(0.005)  # polling interval


# A rank that is late: the others see the death while they wait for its rank info.
@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_that_dies_while_the_group_forms_is_named(
    transport: str, late: int | None, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=form_with_one_that_dies, args=(rank, transport, str(tmp_path), late))
        for rank in range(3)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        process.close()
    for rank in range(2):
        at, text = Path(tmp_path, f"reported{rank}").read_text().split(" ", 1)
        began = max(float(Path(tmp_path, "died").read_text()), 0.0)
        assert f"rank {VICTIM} " in text
        assert "died" in text  # seen by the end of its process or of its connection
        assert float(at) - began < NOTICED_S
