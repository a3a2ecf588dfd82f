"""Third-party training programs under torchrun, 2 ranks on the CPU, with any backend.

    python tests/compat/programs.py --backend pycomm [--only REGEX] [--json FILE]

accelerate's scripts and Hugging Face's Trainer use the existing default group: on the CPU they
would choose gloo themselves. Lightning and Ray Train accept the name of a backend; Ray starts its
own processes. A program succeeds if each of its processes reports at its end that it is done. A
program whose package is not installed is skipped, and reported as such.

The exit status is 1 if a program was started and did not complete. The packages are the extra
"programs" of pyproject.toml.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import runpy
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
}
STARTS_ITSELF = {"ray_train"}
PACKAGES = {
    "accelerate_script": "accelerate",
    "accelerate_sync": "accelerate",
    "lightning": "lightning",
    "trainer": "transformers",
    "ray_train": "ray",
}


def rank(program: str, backend: str) -> None:
    """The main function of each process that torchrun starts."""
    if backend == "pycomm":
        import pycomm.torch_backend  # noqa: F401 - registers the backend if pycomm is not installed
    PROGRAMS[program](backend)
    print(_done(program, backend), flush=True)


def _done(program: str, backend: str) -> str:
    return f"{program} on {backend}: done"


def launch(program: str, backend: str) -> dict[str, Any]:
    """Runs one program under torchrun: its package and version, the outcome, seconds."""
    package = PACKAGES[program]
    if importlib.util.find_spec(package) is None:
        return {"package": package, "status": LEFT_OUT, "reason": f"needs the package {package}"}
    processes = 1 if program in STARTS_ITSELF else RANKS
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [__file__, "--rank", program, "--backend", backend]
    found = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1"}
    env |= {"ACCELERATE_USE_CPU": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        ended = done.returncode == 0 and done.stdout.count(_done(program, backend)) == processes
        output = (done.stdout + done.stderr)[-4000:]
    except subprocess.TimeoutExpired as late:
        so_far = ((late.stdout or b"") + (late.stderr or b"")).decode(errors="replace")
        ended, output = False, f"not ready after {LIMIT_S:g} s: {so_far[-4000:]}"
    return {
        "package": package,
        "version": importlib.metadata.version(package),
        "status": RUNS if ended else DIFFERS,
        "reason": "" if ended else output,
        "seconds": round(time.monotonic() - start, 1),
    }


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; 0 if all programs that were started completed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--backend", default="pycomm", help="its name in torch.distributed")
    parser.add_argument("--only", default="", metavar="REGEX", help="programs whose names match")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.rank:
        rank(given.rank, given.backend)
        return 0
    results = {}
    for program in (name for name in PROGRAMS if re.search(given.only, name)):
        result = results[program] = launch(program, given.backend)
        named = f"{program}, {result['package']} {result.get('version', '')}".rstrip()
        print(f"{named} on {given.backend}: {result['status']} {result['reason']}", flush=True)
    if given.json:
        from pycomm.bench.support import summaries
        from pycomm.bench.support.machine import describe

        content = {"machine": describe(), "backend": given.backend, "programs": results}
        summaries.write(Path(given.json), content)
    return int(any(result["status"] == DIFFERS for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
