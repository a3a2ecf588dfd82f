"""The program of one rank of host_runs.py: python tests/support/host_ranks.py <program>.

The environment sets the rank; the result is printed to stdout as one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import pycomm
from pycomm import default_group
from pycomm._training.communicators import CommunicatorPool
from pycomm.errors import Error

TIMEOUT_S = 60.0


def check_verbs(group: pycomm.Group) -> None:
    """Calls every verb, also with named algorithms, and compares with NumPy."""
    rank, size = group.rank, group.size
    whole = [np.arange(30_000, dtype=np.int64) * 3 + 7 * r for r in range(size)]
    mine, total = whole[rank], sum(whole)
    tables = [np.stack([w + peer for peer in range(size)]) for w in whole]  # [size, count] each
    last = size - 1

    def send_and_receive() -> None:
        left, right = (rank - 1) % size, (rank + 1) % size
        work = pycomm.send(mine, right, tag=5, async_op=True)
        got = np.zeros_like(mine)
        pycomm.recv(got, left, tag=5)
        work.wait()
        np.testing.assert_array_equal(got, whole[left])

    def same(got: Any, want: Any) -> None:
        np.testing.assert_array_equal(np.asarray(got), want)

    def reduce() -> None:
        got = pycomm.reduce(mine.copy(), dst=last)
        if rank == last:
            same(got, total)

    def gather() -> None:
        got = pycomm.gather(mine, dst=last)
        if rank == last:
            same(got, np.stack(whole))
        else:
            assert got is None

    def user_keys() -> None:
        pycomm.user_set(f"from {rank}", rank)
        same(pycomm.user_get(f"from {(rank + 1) % size}"), (rank + 1) % size)

    def ragged() -> None:
        parts = pycomm.all_gather_v(mine[: 10 * rank])
        for r, part in enumerate(parts):
            same(part, whole[r][: 10 * r])

    verbs: dict[str, Callable[[], None]] = {
        "all_reduce": lambda: same(pycomm.all_reduce(mine.copy()), total),
        "reduce": reduce,
        "broadcast": lambda: same(pycomm.broadcast(mine.copy(), src=last), whole[last]),
        "all_gather": lambda: same(pycomm.all_gather(mine), np.stack(whole)),
        "gather": gather,
        "all_gather_v": ragged,
        "reduce_scatter": lambda: same(pycomm.reduce_scatter(tables[rank]), sum(tables)[rank]),
        "scatter": lambda: same(pycomm.scatter(tables[rank], src=last), tables[last][rank]),
        "all_to_all": lambda: same(
            pycomm.all_to_all(tables[rank]), np.stack([t[rank] for t in tables])
        ),
        "send": send_and_receive,
        "barrier": pycomm.barrier,
        "all_gather_object": lambda: same(pycomm.all_gather_object(rank), np.arange(size)),
        "user_set": user_keys,
    }
    for verb in verbs.values():
        verb()
    forced = {
        "all_reduce": lambda by: same(pycomm.all_reduce(mine.copy(), algorithm=by), total),
        "broadcast": lambda by: same(
            pycomm.broadcast(mine.copy(), src=last, algorithm=by), whole[last]
        ),
        "all_gather": lambda by: same(pycomm.all_gather(mine, algorithm=by), np.stack(whole)),
        "reduce_scatter": lambda by: same(
            pycomm.reduce_scatter(tables[rank], algorithm=by), sum(tables)[rank]
        ),
    }
    for by in ("hierarchical", "halving", "tree"):
        for name, call in forced.items():
            if (name, by) != ("broadcast", "halving"):  # no other subgroup
                call(by)


def verbs() -> dict[str, Any]:
    """All verbs, in the whole group and in its two halves by parity."""
    group = pycomm.init(timeout_s=TIMEOUT_S)
    check_verbs(group)
    part = group.split(group.rank % 2)
    assert part is not None
    got = pycomm.all_reduce(np.full(1000, group.rank), group=part)
    assert got[0] == sum(r for r in range(group.size) if r % 2 == group.rank % 2)
    rng = np.random.default_rng(group.rank)
    x = pycomm.all_reduce(rng.standard_normal(300_000).astype(np.float32))
    return {
        "transports": [member.transport for member in group.peer_info()],
        "local": [pycomm.local_rank(), pycomm.local_size(), pycomm.host_count()],
        "bits": hashlib.sha256(x.tobytes()).hexdigest(),
    }


def traffic() -> dict[str, Any]:
    """A 64 MiB all_reduce between two marks, at which the parent reads the interface counters."""
    group = pycomm.init(timeout_s=TIMEOUT_S)
    x = np.ones(16 << 20, np.float32)
    pycomm.barrier()
    emit("ready")
    sys.stdin.readline()
    before = group.stats()
    pycomm.all_reduce(x)
    after = group.stats()
    emit("done")
    sys.stdin.readline()
    return {
        "written": after.bytes_written - before.bytes_written,
        "received": after.bytes_received - before.bytes_received,
    }


def middle_sum() -> dict[str, Any]:
    """An all_reduce of 400,000 bytes."""
    pycomm.init(timeout_s=TIMEOUT_S)
    assert (pycomm.all_reduce(np.ones(100_000, np.float32)) == pycomm.size()).all()
    return {}


def emit(text: str) -> None:
    """Prints a line and flushes it."""
    print(text, flush=True)


def form() -> dict[str, Any]:
    """Forms a group, or prints the error."""
    try:
        group = pycomm.init(timeout_s=float(os.environ["FORM_S"]))
    except Error as error:
        return {"error": type(error).__name__, "text": str(error), "peer": error.peer}
    return {"transports": [member.transport for member in group.peer_info()]}


def shrinking() -> dict[str, Any]:
    """Forms a group and, on request, calls shrink(): the ranks or the error, and the seconds."""
    group = pycomm.init(timeout_s=TIMEOUT_S)
    emit("ready")
    sys.stdin.readline()
    begin = time.monotonic()
    result: dict[str, Any]
    try:
        result = {"ranks": group.shrink(timeout_s=TIMEOUT_S).ranks}
    except Error as error:
        result = {"error": type(error).__name__, "text": str(error), "peer": error.peer}
    return {**result, "took_s": time.monotonic() - begin}


def training() -> dict[str, Any]:
    """Ten steps of DDP, or of HIERARCHICAL DataParallel; returns the parameters."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if starts := not dist.is_initialized():
        dist.init_process_group("pycomm")
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512),
        torch.nn.Tanh(),
        torch.nn.Linear(512, 512),
        torch.nn.Linear(512, 4),
    )
    parallel: torch.nn.Module
    if "HIERARCHICAL" in os.environ:
        parallel = pycomm.DataParallel(model, bucket_mb=0.5, hierarchical=True)
    else:
        parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(10):
        optimizer.zero_grad()
        parallel(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    sums = [float(p.detach().double().abs().sum()) for p in model.parameters()]
    hosts, lanes = pycomm.host_count(), CommunicatorPool().count  # lanes: all ranks of the host
    if starts:
        dist.destroy_process_group()
    bits = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return {"bits": bits, "sums": sums, "hosts": hosts, "lanes": lanes}


def hierarchical() -> dict[str, Any]:
    """Steps of DGC, the last one between two marks, as in traffic(): the weights, u and v."""
    import torch

    torch.set_num_threads(1)
    group = pycomm.init(timeout_s=TIMEOUT_S)
    count, own = 1_000_000, torch.Generator().manual_seed(group.rank)
    layer = torch.nn.Linear(count, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    dgc = pycomm.DGC(optimizer, sparsity=[0.99], value_dtype="2bit")
    model = pycomm.DataParallel(layer, compression=dgc)
    for step in range(3):
        if step == 2:
            pycomm.barrier()
            emit("ready")
            sys.stdin.readline()
        optimizer.zero_grad()
        model(torch.randn(1, count, generator=own)).sum().backward()
        optimizer.step()
    pycomm.barrier()
    emit("done")
    sys.stdin.readline()
    state = dgc.state_dict()
    kept = {"w": layer.weight.detach(), "u": state["u"]["weight"], "v": state["v"]["weight"]}
    bits = {name: hashlib.sha256(x.numpy().tobytes()).hexdigest() for name, x in kept.items()}
    stats = dgc.stats()
    return {**bits, "exchange": stats["exchange"], "k": stats["k"], "sent": stats["sent_bytes"]}


def in_place_of_gloo() -> dict[str, Any]:
    """A group "gloo" as programs make it: the sum of the ranks, and who computed it."""
    import torch
    import torch.distributed as dist

    own = socket.gethostbyname(socket.gethostname())
    dist.init_process_group("gloo")
    x = torch.full((100_000,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    made = pycomm.torch_backend.stats()["groups_in_place_of_gloo"]
    encrypted = default_group.default_has("encrypt")
    dist.destroy_process_group()
    return {"own": own, "made": made, "encrypted": encrypted, "sums": x.unique().tolist()}


PROGRAMS = {
    "verbs": verbs, "traffic": traffic, "form": form, "training": training, "hierarchical":
    hierarchical, "shrinking": shrinking, "middle_sum": middle_sum,
    "in_place_of_gloo": in_place_of_gloo,
}  # fmt: skip

if __name__ == "__main__":
    emit(json.dumps(PROGRAMS[sys.argv[1]]()))
    pycomm.shutdown()
