"""Programs of the launcher tests: python -m pycomm launch launched.py <program> <arguments>."""

import json
import os
import signal
import sys
import time

import numpy as np

import pycomm


def emit(*values: object) -> None:
    print(*values, flush=True)


def place() -> None:
    """Where this rank runs, by the environment and by the group."""
    group = pycomm.init()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    places = [[int(os.environ[prefix]) for prefix in names], [pycomm.local_rank()]]
    ours = ("PYCOMM_RANK", "PYCOMM_SIZE", "PYCOMM_LOCAL_RANK", "PYCOMM_LOCAL_SIZE")
    places.append([int(os.environ[name]) for name in ours])
    cores = sorted(os.sched_getaffinity(0))
    total = float(pycomm.all_reduce(np.full(1, float(group.rank)))[0])
    print("on stderr", file=sys.stderr)
    emit(json.dumps({"places": places, "cores": cores, "sum": total, "hosts": pycomm.host_count()}))
    emit("OMP", os.environ["OMP_NUM_THREADS"], "arguments", *sys.argv[2:])


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


def replaced() -> None:
    """Ranks fail as the arguments say (RANK:HOW ...), each once; all end when they are replaced."""
    how = dict(one.split(":") for one in sys.argv[2:])
    group = pycomm.init(timeout_s=60.0)
    fails = "" if group.rank in group.joined else how.get(str(group.rank), "")
    done: set[str] = set()
    while True:
        try:
            known = [*done, *map(str, group.joined)]
            done.update(*pycomm.all_gather_object(known, group=group))
            if done == how.keys():
                break
            if fails == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fails == "raise":
                raise LookupError("a failure")
            pycomm.barrier(group=group)
        except (pycomm.errors.PeerLost, pycomm.errors.GroupBroken):  # a rank was killed
            group = group.replace()
    emit(json.dumps({"rank": group.rank, "size": group.size, "pid": os.getpid()}))


def lost() -> None:
    """The ranks of the arguments are killed in turn. RANK:again is killed until no process
    replaces it. The new process of RANK:late asks for a rank when the others have ended, that of
    RANK:second when another process has the rank."""
    victims, file = sys.argv[2:], os.environ["PYCOMM_ELASTIC_FILE"]
    if "PYCOMM_ELASTIC_JOINS" in os.environ:
        for how, moment in (("late", "ended"), ("second", "replaced")):
            while f"{os.environ['RANK']}:{how}" in victims and not os.path.exists(
                f"{file}.{moment}"
            ):
                time.sleep(0.01)  # polls: a file sends no notifications
    group, turn = pycomm.init(timeout_s=600.0), 0
    while True:
        try:
            turn = max(pycomm.all_gather_object(turn, group=group))
            if turn == len(victims):
                break
            number, _, how = victims[turn].partition(":")
            if group.ranks[group.rank] == int(number):
                os.kill(os.getpid(), signal.SIGKILL)
            pycomm.barrier(group=group)
        except (pycomm.errors.PeerLost, pycomm.errors.GroupBroken):  # a rank was killed
            group = group.replace(wait_s=500.0)
            open(f"{file}.replaced", "a").close()
            number, _, how = victims[turn].partition(":")  # the first gather may have failed
            turn += how != "again" or int(number) not in group.ranks
    emit(json.dumps({"rank": group.rank, "size": group.size, "ranks": group.ranks}))


def lost_host() -> None:
    """Calls until the group is broken, then until it is complete or all others are left."""
    group = pycomm.init(timeout_s=600.0)
    if not group.joined:
        pycomm.barrier(group=group)
        emit("ready")
        try:
            while True:
                pycomm.barrier(group=group)
        except (pycomm.errors.PeerLost, pycomm.errors.GroupBroken):  # a rank was killed
            group = group.replace(wait_s=500.0)
    pycomm.barrier(group=group)
    emit(json.dumps({"rank": group.rank, "size": group.size, "ranks": group.ranks}))


def fail_always() -> None:
    """Rank 1 fails at once, again and again."""
    if os.environ["RANK"] == "1":
        sys.exit(3)
    pycomm.init(timeout_s=60.0)


def wait() -> None:
    """Prints its pid and waits until it is killed."""
    group = pycomm.init()
    pids = pycomm.all_gather_object(os.getpid())
    if group.rank == 0:
        emit("pids", *pids)
    while True:
        time.sleep(60)  # keeps the process alive: a signal ends it


def end_separately() -> None:
    """Rank 0 ends immediately; the others fail when the named pipe receives data."""
    if os.environ["RANK"] != "0":
        with open(sys.argv[2], encoding="utf-8") as pipe:
            pipe.read()
        raise LookupError("alone")


def train() -> None:
    """Ten steps; prints the bits of the parameters, which must be equal on all ranks."""
    import hashlib

    import torch

    group = pycomm.init()
    leader = pycomm.data.share(np.full(1, group.rank))
    assert leader[0] == group.rank - pycomm.local_rank(), "not of this host's first rank"
    model = pycomm.DataParallel(torch.nn.Linear(64, 64))
    torch.manual_seed(group.rank)
    for _ in range(10):
        model.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        for parameter in model.parameters():  # an optimizer would import torch._dynamo: a second
            parameter.data.sub_(0.1 * parameter.grad)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    emit(
        "bits",
        hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        pycomm.host_count(),
        type(group._store).__name__,
    )


if __name__ == "__main__":
    {
        **{"place": place, "fail": fail, "part": end_separately, "wait": wait, "train": train},
        **{"replaced": replaced, "fail_always": fail_always, "lost": lost},
        "lost_host": lost_host,
    }[sys.argv[1]]()
