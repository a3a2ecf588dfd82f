"""Groups of torch's new_group() that do not form: a rank of the default group does not call, is
stopped or dies. All ranks name it, and no other; its process may have served the store.
"""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import pycomm
from pycomm import Group, errors
from pycomm.testing import run_ranks

LIMIT_S = 1.0  # of forming


def join(group: Group) -> None:
    """Makes torch's default group, whose store rank 0 serves."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True) if group.rank == 0 else None
    port = np.array([server.port if server else 0])
    pycomm.broadcast(port, group=group)
    store = server or dist.TCPStore("127.0.0.1", int(port[0]))
    dist.init_process_group("pycomm", store=store, rank=group.rank, world_size=group.size)
    dist.barrier()


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done() and time.monotonic() < end:
        time.sleep(0.005)  # polls files


def miss_a_group(group: Group, victim: int, members: list[int], folder: str) -> list[Any]:
    """The victim does not call, is stopped, and dies; returns the errors of new_group()."""
    join(group)
    pid, found = group.peer_info()[victim].pid, []
    for end in ("absent", "stop", "kill"):
        if group.rank == victim and end != "absent":
            os.kill(pid, signal.SIGSTOP if end == "stop" else signal.SIGKILL)
        if group.rank in members and group.rank != victim:
            begin = time.monotonic()
            with pytest.raises(errors.Error) as caught:
                dist.new_group(members, timedelta(seconds=LIMIT_S), use_local_synchronization=True)
            error = caught.value
            passed_s = time.monotonic() - begin
            found.append((type(error).__name__, error.peer, str(error), passed_s, pid))
        Path(folder, f"{end}{group.rank}").touch()
        others = [Path(folder, f"{end}{rank}") for rank in range(group.size) if rank != victim]
        until(lambda others=others: all(path.exists() for path in others))
        if end == "stop":
            os.kill(pid, signal.SIGCONT)
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("victim", "members"), [(3, [1, 2, 3]), (0, [0, 1, 2])])
def test_a_missing_rank_is_named_by_all(
    victim: int, members: list[int], transport: str, tmp_path: Path
) -> None:
    """Also where the stopped rank serves the store, if the others share memory; if not, none of
    them is named."""
    seen = run_ranks(
        4, miss_a_group, victim, members, str(tmp_path), transport=transport,
        processes=True, return_exceptions=True,
    )  # fmt: skip
    at = members.index(victim)
    place = f" (rank {victim} of the default group)" if at != victim else ""
    for rank in set(members) - {victim}:
        assert isinstance(seen[rank], list), seen[rank]
        absent, stopped, dead = seen[rank]
        for kind, peer, text, passed_s, _ in (absent, stopped):
            assert (kind, passed_s < LIMIT_S + 1) == ("Timeout", True), text
            if seen[rank][1][2] == text and victim == 0 and transport == "tcp":
                assert (text.endswith("is stopped or unreachable"), peer) == (True, None), text
            else:
                assert peer == at, text
                assert text.endswith(f" s: of 3 ranks these did not join: {at}{place}"), text
        kind, peer, text, passed_s, pid = dead
        assert (kind, peer) == ("PeerLost", at), text
        assert f"rank {at} (" in text
        assert f"pid {pid}){place} died before it joined: its process has ended" in text
        assert passed_s < LIMIT_S, "without waiting for the limit"
