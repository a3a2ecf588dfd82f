"""The processes of delayed_flood.py: ranks that wait for commands, and the unauthenticated clients.

    python -m benchmarks.reliability.delayed_flood_rank rank
    python -m benchmarks.reliability.delayed_flood_rank client RATE PID PORT ADDRESS

A rank finds the others by environment variables. The client connects to a process of its host at
ADDRESS: at PORT, or if that is 0 at all ports where the process listens. Each reads commands from
standard input and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections import deque
from typing import Any

import numpy as np

import pycomm
from benchmarks.reliability.unauthenticated import GREETING, inodes, listeners
from pycomm.testing import status

FORM_LIMIT_S, CALL_LIMIT_S = 60.0, 60.0
HELD = 300  # connections that unauthenticated clients hold open
LOOK_S = 0.1  # between two looks for the ports of the process


def rank() -> None:
    """Forms the group on command, then calls the commanded ranks."""
    _print("ready")
    sys.stdin.readline()
    _print("forms")
    begin = time.monotonic()
    try:
        group = pycomm.init(transport="tcp", timeout_s=FORM_LIMIT_S, heartbeat_s=60.0)
        _print(time.monotonic() - begin)
        x = np.zeros(1, np.float32)
        for line in sys.stdin:
            word, *given = line.split()
            if word == "unmet":
                peers = status(group)["peers"]
                _print([peer["rank"] for peer in peers if not peer["connected"]])
            elif word == "meet":
                begin = time.monotonic()
                pycomm.send(x, int(given[0]), timeout_s=CALL_LIMIT_S)
                pycomm.recv(x, int(given[0]), timeout_s=CALL_LIMIT_S)
                _print(time.monotonic() - begin)
            elif word == "answer":
                pycomm.recv(x, -1, timeout_s=CALL_LIMIT_S)  # from any rank: opens no connection
                pycomm.send(x, int(given[0]), timeout_s=CALL_LIMIT_S)
                _print("answered")

    except pycomm.errors.Error as error:  # reported to delayed_flood.py, which fails the case
        _print(f"{type(error).__name__}: {error}")


def client(per_s: float, pid: int, port: int, address: str) -> None:
    """Connects at a given rate, sends a greeting on every second connection, and holds some open.

    Reports when a thousand connections were made, and at its end the rate of the later ones.
    """
    open_: deque[socket.socket] = deque()
    ports, looked, calls, warm = [port] if port else [], 0.0, 0, False
    begin = busy = time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0]:
        now = time.monotonic()
        if not port and now - looked > LOOK_S:
            theirs, looked = inodes([pid]), now
            ports = [one.address[1] for inode, one in listeners().items() if inode in theirs]
        due = int(min((now - begin) * per_s, calls + 50)) if ports else calls
        if not ports:
            begin = now - calls / per_s
        while calls < due:
            caller = socket.socket()
            try:
                caller.connect((address, ports[calls % len(ports)]))
                calls += 1
                if calls % 2:
                    caller.send(b"g" * GREETING)
            except OSError:  # no listener now, or it closed the connection
                caller.close()
                break
            open_.append(caller)
            if len(open_) > HELD:
                open_.popleft().close()
        if calls >= 1000 and not warm:
            warm, busy = True, time.monotonic()
            _print("in full course")
        time.sleep(0.0005)  # the next connections are due later: no busy loop
    _print((calls - 1000) / (time.monotonic() - busy) if warm else 0.0)


def _print(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank()
    else:
        client(float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
