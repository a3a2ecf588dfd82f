"""Groups that do not form: a rank is missing or is killed. All ranks name it, and no other."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pycomm import _core, errors
from pycomm._bootstrap.rendezvous import TorchStore
from pycomm.testing.threads import join

KEY = "0123456789abcdef"
RANK = """
import sys, time
from pycomm import _core, errors
from pycomm.testing.threads import join
port, rank = int(sys.argv[1]), int(sys.argv[2])
store = _core.TcpStore.connect("127.0.0.1", port, "0123456789abcdef", 30.0)
begin = time.monotonic()
try:
    join(store, rank, {"size": 4, "timeout_s": 40.0, "transport": "tcp",
                        "secret": "0123456789abcdef"})
except errors.Error as error:
    print(type(error).__name__, error.peer, time.monotonic() - begin < 30, error)
"""


@pytest.mark.parametrize(("lives", "dies"), [(0, 3), (3, 0), (3, 2)])
def test_rank_killed_before_all_join_is_named(lives: int, dies: int) -> None:
    """Rank 1 never starts: no rank completes the exchange of rank infos."""
    server = _core.TcpStore.serve("127.0.0.1", 0, KEY)
    ranks = {
        rank: subprocess.Popen(
            [sys.executable, "-c", RANK, str(server.port), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (lives, dies)
    }
    try:
        for rank in ranks:
            server.get(f"world/rank_info/{rank}", 60.0)
        ranks[dies].kill()
        output, _ = ranks[lives].communicate(timeout=60)
        assert output.startswith(f"PeerLost {dies} True"), output
        assert f"rank {dies} (host" in output
        assert f"pid {ranks[dies].pid}" in output
        assert "died while the group formed" in output
    finally:
        for process in ranks.values():
            process.kill()
            process.communicate()


class Attempt:
    """Ranks as threads that join a group of 4; `stores`: of each rank."""

    def __init__(self, stores: dict[int, Any]) -> None:
        self.stores = stores

    def join(self, rank: int, timeout_s: float) -> tuple[str, float]:
        """The error and the seconds; "" if the group formed. The rank's store ends with the
        error."""
        options = {"size": 4, "timeout_s": timeout_s, "transport": "tcp"}
        begin = time.monotonic()
        try:
            join(self.stores[rank], rank, {**options, "secret": KEY}).close()
        except errors.Error as error:  # returned: the test compares those of all ranks
            del self.stores[rank]
            return f"{type(error).__name__}: {error}", time.monotonic() - begin
        return "", time.monotonic() - begin

    def all(self, timeouts: dict[int, float]) -> list[tuple[str, float]]:
        with ThreadPoolExecutor(len(timeouts)) as pool:
            return list(pool.map(self.join, timeouts.keys(), timeouts.values()))


def stores_of(kind: str, ranks: list[int]) -> dict[int, Any]:
    """The stores of the ranks; of "tcp" rank 0 serves it."""
    if kind == "torch":
        shared = pytest.importorskip("torch.distributed").HashStore()
        return {rank: TorchStore(shared, KEY) for rank in ranks}
    first = _core.TcpStore.serve("127.0.0.1", 0, KEY)
    stores = {
        rank: _core.TcpStore.connect("127.0.0.1", first.port, KEY, 10.0) for rank in ranks if rank
    }
    return {0: first, **stores}


@pytest.mark.parametrize("kind", ["tcp", "torch"])
@pytest.mark.parametrize("shortest", [0, 2, 3])
def test_the_missing_rank_is_named_by_all(kind: str, shortest: int) -> None:
    """Rank 1 never joins. One rank fails before the others, which repeat what it knows: its rank
    info is gone then, and with rank 0 the store."""
    timeouts = {0: 30.0, 2: 30.0, 3: 30.0, shortest: 1.0}
    found = Attempt(stores_of(kind, [*timeouts])).all(timeouts)
    for text, seconds in found:
        assert text.startswith('Timeout: the group "world" did not form in '), text
        assert text.endswith(" s: of 4 ranks these did not join: 1"), text
        assert seconds < 15, "as the first"
