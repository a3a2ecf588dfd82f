"""A data pipeline: one copy of the data per host, endless prefetching, conversion on the device.

pycomm launch --nproc 2 examples/reader.py
"""

import itertools

import numpy as np
import torch

import pycomm
from pycomm.data import InfiniteSampler, Prefetcher, ShardedSampler, share

IMAGES, BATCH, STEPS = 200, 10, 25  # two and a half epochs


class Images(torch.utils.data.Dataset):
    """uint8 images in memory that all ranks of a host share."""

    def __init__(self) -> None:
        made = None
        if pycomm.local_rank() == 0:
            made = np.random.default_rng(0).integers(0, 256, (IMAGES, 3, 16, 16), dtype=np.uint8)
        self.array = share(made)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(self.array[i]), i


def to_floats(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts on the device, so that only a quarter of the bytes is copied there."""
    images, numbers = batch
    return images.float().div(255.0).sub(0.5), numbers


def main() -> None:
    group = pycomm.init()
    images = Images()
    sampler = InfiniteSampler(ShardedSampler(images, seed=1))  # each image on one rank, per epoch
    loader = torch.utils.data.DataLoader(images, BATCH, sampler=sampler, num_workers=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mean, seen = pycomm.metrics.Mean(), []
    for x, numbers in itertools.islice(Prefetcher(loader, device, convert=to_floats), STEPS):
        mean.update(x.mean(), len(x))
        seen += numbers.tolist()
    average = mean.compute()
    pycomm.print0(f"mean {average:.6f} over {group.size} ranks and {STEPS} steps")
    epoch = len(images) // group.size
    read = pycomm.all_gather(torch.tensor(seen[:epoch])).flatten().tolist()
    assert sorted(read) == list(range(IMAGES))
    pycomm.print0(f"the first epoch had each of {IMAGES} images once")
    pycomm.shutdown()


if __name__ == "__main__":
    main()
