"""The contestants of a run: pycomm's APIs and the peers it is compared with.

`fake` is torch.distributed's backend that does nothing: it shows the cost of torch's dispatch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs hide it

from pycomm.bench.collectives import mpi
from pycomm.bench.collectives.verbs import Arrays, Call, direct, through_torch
from pycomm.bench.support import packages


@dataclass(frozen=True)
class Peer:
    """One contestant: its name, the torch.distributed backend under it."""

    name: str
    backend: str  # "" for MPI and operators
    bypasses_torch: bool = False  # called through pycomm's own functions
    communicates: bool = True  # else its answers are not checked
    shares: bool = False  # its arrays are pycomm.empty's
    encrypts: bool = False  # traffic between hosts


OURS = {
    p.name: p
    for p in (
        Peer("pycomm", "pycomm"),
        Peer("pycomm-direct", "pycomm", True),
        Peer("pycomm-shared", "pycomm", True, shares=True),
    )
}
ENCRYPTED = Peer("pycomm-encrypted", "pycomm", encrypts=True)  # needs PYCOMM_SECRET
OPERATORS = ("deepspeed", "vllm")  # of benchmarks/collectives/operators.py
OPERATOR_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
)  # DeepSpeed ignores others silently
PEERS = {
    p.name: p
    for p in (
        Peer("gloo", "gloo"),
        Peer("nccl", "nccl"),  # on devices alone
        Peer("fake", "fake", communicates=False),
        *(Peer(name, "") for name in OPERATORS),
        *(Peer(name, "") for name in mpi.PACKAGES),
    )
}


def operators() -> Any:
    """The module of OPERATORS; None outside pycomm's repository."""
    return packages.in_repository("benchmarks.collectives.operators")


class Groups:
    """One process group for each backend, all on the same ranks.

    pycomm's is the default group, which pycomm's own calls use.
    """

    def __init__(self, peers: list[Peer], store: Store, rank: int, size: int) -> None:
        names = {p.backend for p in peers if p.backend}
        backends = sorted(names, key=lambda name: (name != "pycomm", name != "gloo"))
        if "fake" in backends:
            importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
        dist.init_process_group(backends[0], store=store, rank=rank, world_size=size)
        self._groups: dict[str, dist.ProcessGroup | None] = {backends[0]: None}
        for name in backends[1:]:
            self._groups[name] = dist.new_group(backend=name)
        self._encrypted: dist.ProcessGroup | None = None
        if any(p.encrypts for p in peers):
            from pycomm import torch_backend

            options = torch_backend.Options(encrypt=True)
            self._encrypted = dist.new_group(backend="pycomm", pg_options=options)
        if any(p.bypasses_torch for p in peers):
            import pycomm

            pycomm.init()
        self._operators = {
            p.name: operators().LOADERS[p.name](store, rank, size)
            for p in peers
            if p.name in OPERATORS
        }

    def of(self, backend: str) -> dist.ProcessGroup | None:
        """The torch.distributed group on this backend."""
        return self._groups[backend]

    def call(self, peer: Peer, arrays: Arrays) -> Call:
        """The call of `peer` on `arrays`."""
        if peer.bypasses_torch:
            return direct(arrays)
        if peer.name in OPERATORS:
            if arrays.case.verb != "all_reduce" or arrays.dtype not in OPERATOR_DTYPES:
                raise NotImplementedError(f"{peer.name}: only all_reduce of 16- and 32-bit floats")
            reduce, x = self._operators[peer.name], arrays.input
            return lambda: reduce(x)
        if not peer.backend:
            return mpi.call(arrays)
        group = self._encrypted if peer.encrypts else self._groups[peer.backend]
        return through_torch(arrays, group)
