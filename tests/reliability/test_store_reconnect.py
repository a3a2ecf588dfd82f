"""A connection to rank 0's store that is lost after the group was formed is established again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from store_relay import KEY, Relay, relayed

from benchmarks.support.ports import free_port
from pycomm import _core, errors

RANK = """
import sys, pycomm
group = pycomm.init(timeout_s=60)
print("formed", flush=True)
sys.stdin.readline()
pycomm.user_set(f"from {group.rank}", group.rank)
others = [rank for rank in range(group.size) if rank != group.rank]
print(sum(pycomm.user_get(f"from {rank}", 30.0) for rank in others), flush=True)
if group.rank == 2:
    sys.stdin.readline()
try:
    pycomm.barrier()
except pycomm.errors.PeerLost:  # rank 2 is killed
    smaller = group.shrink(timeout_s=30)
    pycomm.barrier(group=smaller)
    print(smaller.ranks, flush=True)
    pycomm.barrier(group=smaller)
"""


def connected(relay: Relay, server: _core.TcpStore) -> _core.TcpStore:
    """A client behind a relay, in its state after the group was formed."""
    client = _core.TcpStore.connect("127.0.0.1", relay.port, KEY, 10.0)
    server.all_ranks_connected()
    client.all_ranks_connected()
    return client


@pytest.mark.parametrize(
    "lose", [Relay.disconnect, lambda relay: relay.silent.set()], ids=["disconnect", "drop"]
)
def test_calls_continue_when_a_connection_is_lost(lose: Callable[[Relay], None]) -> None:
    server = _core.TcpStore.serve("127.0.0.1", 0, KEY)
    with relayed(server.port) as relay:
        client = connected(relay, server)
        client.set("key", b"value", 20.0)
        lose(relay)
        assert client.add("count", 1, 20.0) == 1
        assert client.get("key", 20.0) == b"value"
        assert client.remove("key", 20.0) == b"value"
        assert client.claim("key", b"first", 20.0) == b"first"
        assert server.add("count", 1, 20.0) == 2


def test_a_change_whose_reply_was_lost_is_applied_once() -> None:
    """The server gets the request, and the connection is closed before the client has the reply."""
    server = _core.TcpStore.serve("127.0.0.1", 0, KEY)
    with relayed(server.port) as relay:
        client = connected(relay, server)
        relay.drop_replies.set()
        assert client.add("count", 1, 20.0) == 1
        assert server.get("count", 1.0) == b"1"
        assert client.add("count", 1, 20.0) == 2
    with relayed(server.port) as relay, pytest.raises(errors.Timeout):  # the port is closed
        _core.TcpStore.connect("127.0.0.1", relay.port, KEY, 0.3)


def test_client_of_an_ended_server_raises_immediately() -> None:
    server = _core.TcpStore.serve("127.0.0.1", 0, KEY)
    with relayed(server.port) as relay:
        client = connected(relay, server)
        del server
        begin = time.monotonic()
        with pytest.raises(errors.PeerLost, match="lost the store"):
            client.add("count", 1, 30.0)
        assert time.monotonic() - begin < 15


def test_values_and_shrink_continue_when_the_store_connections_were_lost() -> None:
    port = free_port()
    with relayed(port) as relay:
        place = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3", "PYCOMM_SECRET": KEY}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK],
                env={
                    **os.environ,
                    **place,
                    "RANK": str(rank),
                    "MASTER_PORT": str(relay.port if rank else port),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        try:
            streams = [(rank.stdin, rank.stdout) for rank in ranks]
            for _, out in streams:
                assert out is not None
                assert out.readline() == "formed\n"
            relay.disconnect()
            for to, _ in streams:
                assert to is not None
                to.write("continue\n")
                to.flush()
            assert [out.readline() for _, out in streams if out] == ["3\n", "2\n", "1\n"]
            relay.disconnect()
            ranks[2].send_signal(signal.SIGKILL)
            assert [out.readline() for _, out in streams[:2] if out] == ["[0, 1]\n"] * 2
            assert [rank.wait(60) for rank in ranks[:2]] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
