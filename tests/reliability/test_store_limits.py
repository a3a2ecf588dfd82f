"""A store that accepts connections and never answers delays no call beyond its timeout."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from store_relay import KEY, relayed

from benchmarks.support.ports import free_port
from pycomm import _core, errors
from pycomm._bootstrap.rendezvous import TorchStore
from pycomm.testing.threads import join

dist = pytest.importorskip("torch.distributed")
LATE_S = 8.0  # for a busy machine; calls without a timeout took 26 s and more


@contextlib.contextmanager
def pycomm_store_and_silencer() -> Iterator[Any]:
    """A client of pycomm's store, and a function that makes the server silent for it."""
    server = _core.TcpStore.serve("127.0.0.1", 0, KEY)
    with relayed(server.port) as relay:
        yield _core.TcpStore.connect("127.0.0.1", relay.port, KEY, 10.0), relay.silent


@contextlib.contextmanager
def torch_store_and_silencer() -> Iterator[Any]:
    """The same for torch's store."""
    limit = timedelta(seconds=10)
    server = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    with relayed(server.port) as relay:
        yield TorchStore(dist.TCPStore("127.0.0.1", relay.port, None, False, limit)), relay.silent


STORES = pytest.mark.parametrize("made", [pycomm_store_and_silencer, torch_store_and_silencer])


@STORES
@pytest.mark.parametrize("call", ["set", "get", "add", "remove", "claim"])
def test_each_call_of_a_silent_store_times_out(made: Callable[[], Any], call: str) -> None:
    with made() as (store, silent):
        store.set("key", b"1", 10.0)
        silent.set()
        given = {"set": (b"2",), "claim": (b"2",), "add": (1,)}.get(call, ())
        begin = time.monotonic()
        with contextlib.suppress(errors.Timeout):  # set() of torch's store waits for no answer
            getattr(store, call)("key", *given, 0.5)
            assert (call, made) == ("set", torch_store_and_silencer)
        assert time.monotonic() - begin < 0.5 + LATE_S


@STORES
@pytest.mark.parametrize("silent_s", [0, 0.3], ids=["is silent", "becomes silent"])
def test_group_creation_times_out_when_the_store_is_silent(
    made: Callable[[], Any], silent_s: float
) -> None:
    """Also while it waits for the other rank's info: its own is already stored."""
    with made() as (store, silent):
        end = threading.Timer(silent_s, silent.set)
        end.start()
        begin = time.monotonic()
        with pytest.raises(errors.Timeout):
            join(store, 0, {"size": 2, "timeout_s": 1.0, "transport": "tcp", "secret": KEY})
        end.join()
        assert time.monotonic() - begin < 1.0 + LATE_S


@STORES
def test_shrink_times_out_when_the_store_becomes_silent(made: Callable[[], Any]) -> None:
    with made() as (store, silent):
        options = {"size": 1, "timeout_s": 10.0, "transport": "tcp", "secret": KEY}
        group = join(store, 0, options)
        silent.set()
        begin = time.monotonic()
        with pytest.raises(errors.Timeout):
            group.shrink(timeout_s=1.0)
        assert time.monotonic() - begin < 1.0 + LATE_S
        group.close()


INIT = """
import time, torch.distributed, pycomm
begin = time.monotonic()
try:
    pycomm.init(timeout_s=1.0)
except pycomm.errors.Error as error:  # printed for the test
    print(f"{type(error).__name__}: {error}", time.monotonic() - begin, sep="\\n")
"""


def init(rank: int, port: int, secret: str) -> tuple[str, float]:
    """The error of init() in a new process, and its seconds. It has imported torch."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYCOMM_SECRET": secret}
    env = {**os.environ, **place, "RANK": str(rank), "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", INIT],
        check=True,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    text, seconds = done.stdout.splitlines()
    return text, float(seconds)


SECRETS = pytest.mark.parametrize("secret", [KEY, ""], ids=["pycomm's store", "torch's store"])


@SECRETS
def test_init_times_out_when_no_store_answers(secret: str) -> None:
    """Another program has the port, and says nothing: the kernel accepts for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        text, seconds = init(1, server.getsockname()[1], secret)
    assert text.startswith("Timeout: "), text
    assert seconds < 1.0 + LATE_S


@SECRETS
def test_init_times_out_when_rank_0_is_absent(secret: str) -> None:
    text, seconds = init(1, free_port(), secret)
    assert text.startswith("Timeout: "), text
    assert seconds < 1.0 + LATE_S


@SECRETS
def test_init_says_that_the_port_of_rank_0_is_in_use(secret: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        text, seconds = init(0, server.getsockname()[1], secret)
    assert text.startswith("InvalidArgument: "), text
    assert "in use" in text
    assert seconds < 1.0 + LATE_S
