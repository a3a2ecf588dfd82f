"""What the tests of the launcher start: python -m pycomm launch launched.py <what> <arguments>.

Not a test itself.
"""

import json
import os
import signal
import sys
import time

import numpy as np

import pycomm


def say(*words: object) -> None:
    print(*words, flush=True)


def place() -> None:
    """Where this rank is, by the environment and by the group."""
    group = pycomm.init()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    told = [[int(os.environ[prefix]) for prefix in names], [pycomm.local_rank()]]
    ours = ("PYCOMM_RANK", "PYCOMM_SIZE", "PYCOMM_LOCAL_RANK", "PYCOMM_LOCAL_SIZE")
    told.append([int(os.environ[name]) for name in ours])
    cores = sorted(os.sched_getaffinity(0))
    total = float(pycomm.all_reduce(np.full(1, float(group.rank)))[0])
    print("on stderr", file=sys.stderr)
    say(json.dumps({"places": told, "cores": cores, "sum": total, "hosts": pycomm.host_count()}))
    say("OMP", os.environ["OMP_NUM_THREADS"], "arguments", *sys.argv[2:])


def fail() -> None:
    """Rank 1 ends as the argument says, while the others wait for it."""
    group = pycomm.init()
    how = sys.argv[2]
    if group.rank == 1:
        if how == "raise":
            raise LookupError("rank one has lost its way")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(7)
    pycomm.barrier()


def wait() -> None:
    """Says its pid and waits until it is ended."""
    group = pycomm.init()
    everybody = pycomm.all_gather_object(os.getpid())
    if group.rank == 0:
        say("pids", *everybody)
    while True:
        time.sleep(60)  # nothing to wait for: a signal ends it


def part() -> None:
    """Rank 0 ends at once; the others fail when something is written to the pipe of that name."""
    if os.environ["RANK"] != "0":
        with open(sys.argv[2], encoding="utf-8") as pipe:
            pipe.read()
        raise LookupError("alone")


def train() -> None:
    """Ten steps; the parameters' bits, which are to be the same on all ranks."""
    import hashlib

    import torch

    group = pycomm.init()
    leader = pycomm.data.share(np.full(1, group.rank))
    assert leader[0] == group.rank - pycomm.local_rank(), "not of this host's first rank"
    model = pycomm.DataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(group.rank)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    say(
        "bits",
        hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        pycomm.host_count(),
        type(group._store).__name__,
    )


if __name__ == "__main__":
    {"place": place, "fail": fail, "part": part, "wait": wait, "train": train}[sys.argv[1]]()
