"""The backend "pycomm" with cuda_agreement="after", for tensors on devices.

Torch's device is an emulated GPU with a fake NCCL (support/torch_devices.py).
"""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_devices import MARKS, run_fixture  # noqa: F401 - the fixture "run"
from torch_ranks import in_processes

from pycomm import errors, torch_backend

pytestmark = MARKS

ErrorType: Any = torch._C._distributed_c10d.ErrorType


@in_processes(2)
def test_repeated_calls_need_no_other_host(at: Any) -> None:
    """A repeated call needs no other host, and its Mismatch comes later."""
    options = torch_backend.Options(cuda_agreement="after")
    both = "cpu:pycomm,privateuseone:pycomm"
    group = dist.new_group(backend=both, pg_options=options)
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(10, device=at.device)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        dist.all_reduce(x, op, group=group)
    assert (x.cpu() == group.size()).all()
    dist.barrier()
    if dist.get_rank() == 1:
        store.wait(["made"], timedelta(seconds=60))
    works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    if dist.get_rank() == 0:
        assert not any(work.is_completed() for work in works)
        store.set("made", "")
    assert (x.cpu() == group.size() ** 4).all()
    assert all(work.is_completed() for work in works)
    backend = group._get_backend(at.device)
    assert backend.get_error() == ErrorType.SUCCESS
    op = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
    work = dist.all_reduce(x, op, group=group, async_op=True)
    with pytest.raises(errors.Mismatch, match="arrays may have changed"):
        work.wait()  # at the latest when the stream has continued
        x.cpu()
        work.wait()
    assert backend.get_error() == ErrorType.COMM_ERROR
