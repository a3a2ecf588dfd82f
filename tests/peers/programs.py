"""Other people's training programs under torchrun, on whichever backend is named.

    python -m torch.distributed.run --nproc-per-node 2 tests/peers/programs.py PROGRAM BACKEND

accelerate's scripts and Hugging Face's Trainer take the group that stands: on the CPU they would
name gloo themselves. Lightning takes the backend's name. Each ends with "PROGRAM on BACKEND: done"
from every rank. Called by tests/test_programs.py; the packages are their own.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def accelerate_script(backend: str) -> None:
    """What accelerate runs to see that it works: samplers, loaders, training, gathers."""
    _run_module("accelerate.test_utils.scripts.test_script", backend)


def accelerate_sync(backend: str) -> None:
    """Gradient accumulation with and without synchronisation."""
    _run_module("accelerate.test_utils.scripts.test_sync", backend)


def _run_module(name: str, backend: str) -> None:
    dist.init_process_group(backend)
    sys.argv = [name]
    runpy.run_module(name, run_name="__main__")


def lightning(backend: str) -> None:
    """DDPStrategy, told the backend; the parameters are equal on all ranks afterwards."""
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
    """Hugging Face's Trainer on the CPU, in the group that stands."""
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
}

if __name__ == "__main__":
    program, wanted = sys.argv[1:]
    if wanted == "pycomm":
        import pycomm.torch_backend  # noqa: F401 - for a pycomm that is not installed
    PROGRAMS[program](wanted)
    print(f"{program} on {wanted}: done", flush=True)
