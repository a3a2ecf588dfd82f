"""PYCOMM_REPLACE and `pycomm launch --replace-backend`: programs that ask torch for gloo,
unchanged.

test_c10d_replace.py has torch_backend.replace().
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from finished import finished
from paths import ROOT

LIMIT_S = 180
LINE = "pycomm replaces gloo (PYCOMM_REPLACE=gloo)"
ENDING = "unset the variable to go back"
# The ranks share a pipe, and torchrun's do not buffer: each line is one write.
ATOMIC_PRINT = """
import os
def print(*given):
    os.write(1, (" ".join(map(str, given)) + "\\n").encode())
"""


def _run(
    code: str, folder: Path, ranks: int = 1, value: str = "gloo", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program under torchrun, which prints what all ranks print."""
    script = folder / "program.py"
    script.write_text(ATOMIC_PRINT + textwrap.dedent(code))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    env.pop("PYCOMM_REPLACE", None)
    if value:
        env["PYCOMM_REPLACE"] = value
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(script)]
    done: subprocess.CompletedProcess[str] = finished(command, env=env, cwd=folder, timeout=LIMIT_S)
    return done


GROUP = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    x = torch.ones(2)
    dist.all_reduce(x)
    print(dist.get_backend(), backend.name(), x.tolist())
    dist.barrier()
    dist.destroy_process_group()
"""


def test_the_variable_replaces_gloo(tmp_path: Path) -> None:
    done = _run(GROUP, tmp_path, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gloo pycomm [2.0, 2.0]\n" * 2
    lines = [line for line in done.stderr.splitlines() if "pycomm" in line]
    assert lines == [f'{LINE}: group "0", 2 ranks, 1 host, shm; {ENDING}']


def test_a_program_that_imports_pycomm_before_torch(tmp_path: Path) -> None:
    """Then `import torch`, which reads the variable, runs within the import of pycomm's module."""
    done = _run(f"import pycomm.torch_backend\n{textwrap.dedent(GROUP)}", tmp_path)
    assert (done.stdout, "keeps" in done.stderr) == ("gloo pycomm [1.0, 1.0]\n", False), done.stderr


def test_without_the_variable_gloo_is_torchs(tmp_path: Path) -> None:
    done = _run(GROUP, tmp_path, 2, "")
    assert (done.stdout, "pycomm" in done.stderr) == ("gloo gloo [2.0, 2.0]\n" * 2, False)


def test_a_pattern_keeps_groups(tmp_path: Path) -> None:
    done = _run(GROUP, tmp_path, 1, "gloo,except=default*", PYCOMM_LOG="info")
    assert done.stdout == "gloo gloo [1.0, 1.0]\n", done.stderr


@pytest.mark.parametrize("value", ["nccl", "gloo,except=", "gloo,else=1", "GLOO"])
def test_an_invalid_value_is_logged(value: str, tmp_path: Path) -> None:
    done = _run(GROUP, tmp_path, 1, value)
    assert done.stdout == "gloo gloo [1.0, 1.0]\n", done.stderr
    text = f"keeps its own gloo: invalid PYCOMM_REPLACE: got {value!r}, expected gloo, or gloo,exc"
    assert text in done.stderr


def test_detail_debugging(tmp_path: Path) -> None:
    """Its helper is torch's gloo. With torch's own gloo, DDP ends with a segmentation fault."""
    code = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        wrapper = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert wrapper.wrapped_pg.name() == "pycomm"
        from pycomm._c10d import gloo
        assert gloo.made() == 1  # not its helper
        model = torch.nn.Linear(2, 2)
        trained = torch.nn.parallel.DistributedDataParallel(model)
        trained(torch.ones(1, 2)).sum().backward()
        try:
            dist.all_reduce(torch.ones(2 + dist.get_rank()))
        except RuntimeError as error:  # reported, and checked below
            print(str(error).count("mismatch") > 0, model.weight.grad.tolist())
        dist.destroy_process_group()
    """
    done = _run(code, tmp_path, 2, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True [[1.0, 1.0], [1.0, 1.0]]\n" * 2


def test_checkpoints(tmp_path: Path) -> None:
    """Also beside training: by a thread, with a group of its own, and by a process that torch
    starts, which makes its group itself."""
    code = """
        import sys, torch, torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        def main():
            dist.init_process_group("cpu:gloo")
            rank = dist.get_rank()
            for way in ("save", "THREAD", "PROCESS"):
                state = {"w": torch.full((4,), 1.5), "step": 3}
                if way == "save":
                    dcp.save(state, checkpoint_id=way)
                else:
                    kind = AsyncCheckpointerType[way]
                    saved = dcp.async_save(
                        state,
                        checkpoint_id=way,
                        process_group=dist.new_group() if way == "THREAD" else None,
                        async_checkpointer_type=kind,
                    )
                    x = torch.ones(3)
                    for _ in range(20):
                        dist.all_reduce(x)
                    saved.result()
                loaded = {"w": torch.zeros(4), "step": 0}
                dcp.load(loaded, checkpoint_id=way)
                assert loaded["step"] == 3 and torch.equal(loaded["w"], state["w"]), way
                dist.barrier()
            print("right")
            dist.destroy_process_group()

        if __name__ == "__main__":
            main()
    """
    done = _run(code, tmp_path, 2)
    assert done.stdout == "right\n" * 2, done.stderr
    assert done.stderr.count(LINE) >= 2  # of the ranks, and of the processes that save


def test_rpc(tmp_path: Path) -> None:
    code = """
        import os, torch, torch.distributed as dist
        from torch.distributed import rpc
        from pycomm._c10d import gloo
        rank = int(os.environ["RANK"])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        got = rpc.rpc_sync(f"worker{1 - rank}", torch.add, (torch.ones(1), rank))
        print(gloo.made() >= 1, got.item() - rank)
        rpc.shutdown()
    """
    done = _run(code, tmp_path, 2)
    assert done.stdout == "True 1.0\n" * 2, done.stderr


def test_the_launcher_sets_the_variable(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(GROUP))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pycomm", "launch", "--nproc", "2"]
    command += ["--replace-backend", "gloo", str(script)]
    done = finished(command, env=env, cwd=tmp_path, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    shown = done.stdout  # that of rank 0
    assert (shown.count("gloo pycomm [2.0, 2.0]\n"), shown.count(LINE)) == (1, 1), shown
