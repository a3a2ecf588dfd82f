"""The process groups of a rank, and the call of each contestant."""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs hide it

from pycomm.bench.collectives import mpi
from pycomm.bench.collectives.peers import OPERATORS, Peer
from pycomm.bench.collectives.verbs import Arrays, Call, direct, through_torch
from pycomm.bench.support import packages

OPERATOR_DTYPES = ("float32", "float16", "bfloat16")  # DeepSpeed ignores others silently


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
            case, sums = arrays.case, ("all_reduce", "sum", False)
            if (case.verb, case.redop, case.copies) != sums or case.dtype not in OPERATOR_DTYPES:
                raise NotImplementedError(f"{peer.name}: only all_reduce of 16- and 32-bit floats")
            reduce, x = self._operators[peer.name], arrays.input
            return lambda: reduce(x)
        if not peer.backend:
            return mpi.call(arrays)
        group = self._encrypted if peer.encrypts else self._groups[peer.backend]
        return through_torch(arrays, group)
