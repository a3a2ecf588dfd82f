"""A part of `python -m benchmarks gpu`: a rank dies while NCCL's kernel of another waits for it.

    python -m benchmarks.gpu.gpu_kills [CASE ...] [--way WAY]

Two ranks have begun an all_reduce. The stream of rank 1 still sleeps, so that the kernel of rank 0
spins; then rank 1 is killed. Rank 0 must get an error, its streams must become free, and its
process must end.

    spins    nothing else
    graph    rank 0 holds a CUDA graph with a call of the group
    stuck    the caller's stream on rank 0 sleeps as well, for seconds
    exit     rank 0 ends at the error, without a destroy_process_group()

Exits with 0 if all is as expected; each result is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs hide it

from benchmarks.gpu.gpu_ranks import WAYS, join
from pycomm.bench.support.processes import Rank

CASES = ("spins", "graph", "stuck", "exit")
START_S = 60.0  # until both ranks have begun the call
LIMIT_S = 30.0  # from the kill to the error, and from there to the end of the process
CYCLES = {"rank 1": 1 << 40, "rank 0": 10_000_000_000}  # of a GPU's clock: minutes, and seconds


def main(argv: Sequence[str]) -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.gpu_kills", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--way", choices=tuple(WAYS), help="how NCCL lets ranks share a GPU")
    options = parser.parse_args(argv)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    found = [kill(case, "cuda", options.way) for case in options.cases or CASES]
    for row in found:
        print(json.dumps(row), flush=True)
    return 0 if all(row["outcome"] == "fine" for row in found) else 1


def kill(case: str, kind: str, shares: str | None = None) -> dict[str, Any]:
    """Runs one case; its outcome, the error of rank 0 and the seconds until it."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, ranks = [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        args = (theirs, rank, store.port, case, kind, shares)
        ranks.append(context.Process(target=_rank, args=args, daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        return {"case": case, **_kill(ranks, pipes)}
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _kill(ranks: Sequence[Any], pipes: Sequence[Connection]) -> dict[str, Any]:
    for pipe in pipes:
        if not pipe.poll(START_S):
            return {"outcome": "the call was not begun"}
        pipe.recv()
    ranks[1].kill()
    start = time.monotonic()
    if not pipes[0].poll(LIMIT_S):
        return {"outcome": "rank 0 got no error"}
    try:
        error = pipes[0].recv()
    except EOFError:  # its end of the pipe closed: reported
        return {"outcome": "rank 0 died"}
    row = {"error": error, "error_s": round(time.monotonic() - start, 3)}
    ranks[0].join(LIMIT_S)
    row["end_s"] = round(time.monotonic() - start, 3)
    if ranks[0].exitcode is None:
        return {"outcome": "rank 0 did not end", **row}
    fine = ranks[0].exitcode == 0 and error
    return {"outcome": "fine" if fine else f"rank 0 ended with {ranks[0].exitcode}", **row}


def _rank(pipe: Connection, rank: int, port: int, case: str, kind: str, shares: str | None) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    device = join(Rank(rank, 2, store, pipe.send), "pycomm", kind, shares)
    on_gpu = device.type == "cuda"
    x = torch.ones(1 << 18, device=device)
    dist.all_reduce(x)
    graph = torch.cuda.CUDAGraph() if on_gpu and case == "graph" else None
    if graph is not None:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
        graph.replay()
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    if on_gpu and (rank == 1 or case == "stuck"):
        cycles = CYCLES[f"rank {rank}"]
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no types for it
    if rank == 1 and not on_gpu:
        pipe.send("ready")  # in host memory the call itself waits for rank 1
        pipe.recv()
    work = dist.all_reduce(x, async_op=True)
    pipe.send("ready")
    if rank == 1:
        pipe.recv()  # until it is killed
    pipe.send(_error_of(work, x))
    if case != "exit":
        dist.destroy_process_group()


def _error_of(work: Any, x: torch.Tensor) -> str:
    """The error of the call or of the one after it; "" if there is none."""
    try:
        work.wait()
        if x.is_cuda:
            torch.cuda.synchronize()
        dist.all_reduce(x)
    except Exception as error:  # of any kind: it is what is measured
        return type(error).__name__
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
