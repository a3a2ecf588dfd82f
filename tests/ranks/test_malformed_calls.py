"""Malformed calls of everything in docs/reference, on one rank and on two.

tests/support/malformed.py makes them. The names are read from the reference; a name without a valid
call is in LEFT, with the reason.
"""

import os
import re

import pytest
from paths import ROOT

import pycomm
from pycomm import Group, errors
from pycomm.testing import run_ranks

pytest.importorskip("torch")

from malformed import failures
from valid_calls import ALONE, KERNELS, VALID, x

# Names of the reference without a valid call, and why.
LEFT = {
    "of the whole process": "init join shutdown is_initialized rank size local_rank local_size "
    "host_count testing.run_ranks testing.FaultPlan launcher launch.Launcher save load print0 plan "
    "tuning.planner.Expected algorithms",
    "read in worker processes": "data.ScatterLoader data.DataLoader",
    "results, which programs do not make": "Group Work QuantizeState reference.Step "
    "reference.Update elastic.ShrinkResult elastic.Microbatch kernels.GroupBatch "
    "kernels.PacketBatch kernels.UpdatePacket kernels.UpdateWorkspace",
    "checked by torch, or options of training": "DataParallel SyncBatchNorm DGC dgc_hook "
    "QuantizedGradients quantize_hook quantize_hsdp LocalSGD AdaptiveLocalSGD StaticLossScaler "
    "elastic.sync_state elastic.ShardedTraining elastic.Microbatches elastic.manual_seed "
    "elastic.RandomState",
}


def test_every_name_of_the_reference_is_called_or_left() -> None:
    texts = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
    names = set(re.findall(r"auto(?:function|class):: pycomm\.([\w.]+)", "\n".join(texts)))
    names = {name for name in names if not name.startswith(("torch_backend.", "errors."))}
    called = {name.partition(" ")[0] for name in {*VALID, *ALONE, *KERNELS}}
    assert names == called | set(" ".join(LEFT.values()).split())


@pytest.mark.filterwarnings("ignore")
def test_malformed_calls_of_one_rank() -> None:
    assert run_ranks(1, failures, {**VALID, **ALONE, **KERNELS}) == [[]]
    pycomm.set_num_threads(len(os.sched_getaffinity(0)))


@pytest.mark.filterwarnings("ignore")
def test_malformed_calls_of_two_ranks() -> None:
    assert run_ranks(2, failures, VALID) == [[], []]


def test_all_gather_with_the_arguments_of_torch_names_its_own() -> None:
    def program(group: Group) -> None:
        with pytest.raises(
            errors.InvalidArgument, match=r"got list.* out = pycomm.all_gather\(x\)"
        ):
            pycomm.all_gather([x(), x()], x(), group=group)

    run_ranks(1, program)
