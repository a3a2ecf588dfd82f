"""A representative part of PyTorch's own distributed suite on the backend "pycomm", 3 processes.

tests/compat/torch_suite.py runs all of it, with any backend; table.py writes the results into docs.
"""

import os
import subprocess
import sys
from pathlib import Path

from finished import finished
from paths import ROOT

from pycomm.bench.support import summaries

SCRIPT = ROOT / "tests" / "compat" / "torch_suite.py"

TESTS = [
    "test_Backend_enum_class",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_group_max",
    "test_all_reduce_full_group_product",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all_group",
    "test_all_to_all_single_unequal_split_complex",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_ddp_create_graph",
    "test_destroy_full_group",
    "test_dump_DDP_relevant_env_vars",
    "test_gather_full_group",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_isend_torch_profiler",
    "test_reduce_group_min",
    "test_reduce_sum_twice",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_send_recv_with_tag",
    "test_static_graph_api_cpu",
]


def _suite(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return finished(command, env=env, timeout=280)


def test_representative_part_passes(tmp_path: Path) -> None:
    stored = tmp_path / "results.json"
    only = f"^({'|'.join(TESTS)})$"
    done = _suite("--backend", "pycomm", "--only", only, "--json", str(stored))
    results = summaries.read(stored)
    assert (results["totals"], results["tests"]) == ({"passed": len(TESTS)}, {}), done.stdout
    assert done.returncode == 0, done.stderr


def test_failures_and_skipped_tests_are_reported(tmp_path: Path) -> None:
    """gloo, whose all_to_all rejects uneven lists, fails visibly. A GPU test states its reason."""
    stored = tmp_path / "results.json"
    names = "test_all_to_all", "test_all_gather_cuda"
    done = _suite("--backend", "gloo", "--only", f"^({'|'.join(names)})$", "--json", str(stored))
    results = summaries.read(stored)
    assert results["tests"][names[0]]["status"] == "failed"
    assert "alltoall" in results["tests"][names[0]]["reason"]
    assert results["left_out"] == {"needs gpu: works on CUDA tensors": 1}
    assert done.returncode == 1


def test_page_contains_the_table_of_the_stored_results() -> None:
    """tests/compat/table.py rewrites it."""
    code = "import table; page = table.PAGE.read_text(); assert table.written(page) == page"
    done = finished([sys.executable, "-c", code], cwd=SCRIPT.parent, timeout=100)
    assert done.returncode == 0, done.stderr
