"""A data pipeline in two ways: each rank reads its shard, or rank 0 reads and sends.

    pycomm launch --nproc 2 examples/reader.py [shards | scatter]

The reader never ends, batches are read ahead, and the device converts them to floats. Prints

    mean 0.000019 over 2 ranks and 25 steps
    the first epoch had each of 200 images once
"""

import itertools
import sys
from collections.abc import Iterable

import torch

import pycomm
from pycomm.data import DataLoader, InfiniteSampler, Prefetcher, ScatterLoader, ShardedSampler

IMAGES, BATCH, STEPS = 200, 10, 25  # two and a half epochs


class Images(torch.utils.data.Dataset):
    """uint8 images, as a decoder returns them."""

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        made = torch.Generator().manual_seed(i)
        return torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8, generator=made), i


def flipped(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    """Random augmentation of the decoded sample, different in each epoch."""
    image, number = sample
    return image.flip(-1) if torch.rand(()) < 0.5 else image, number


def shards() -> Iterable:
    """Every rank reads its own images. Each decodes a share now; all ranks read the one copy."""
    images = Images()
    sampler = InfiniteSampler(ShardedSampler(images, seed=1))  # each image on one rank, per epoch
    return DataLoader(images, BATCH, sampler=sampler, num_workers=1, shared=True, transform=flipped)


def scatter() -> Iterable:
    """Rank 0 reads batches for all ranks and sends each its rows."""
    group = pycomm.init().split(0)  # for the prefetcher's thread alone
    if pycomm.rank() != 0:
        return ScatterLoader(None, group=group)
    images = Images()
    sampler = InfiniteSampler(torch.utils.data.RandomSampler(images))
    loader = torch.utils.data.DataLoader(images, BATCH * pycomm.size(), sampler=sampler)
    return ScatterLoader(itertools.islice(loader, STEPS), group=group)


def to_floats(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts on the device, so that only a quarter of the bytes is copied there."""
    images, numbers = batch
    return images.float().div(255.0).sub(0.5), numbers


def main() -> None:
    group = pycomm.init()
    loader = scatter() if "scatter" in sys.argv else shards()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mean, seen = pycomm.metrics.Mean(), []
    for x, numbers in itertools.islice(Prefetcher(loader, device, convert=to_floats), STEPS):
        mean.update(x.mean(), len(x))
        seen += numbers.tolist()
    average = mean.compute()
    pycomm.print0(f"mean {average:.6f} over {group.size} ranks and {STEPS} steps")
    epoch = IMAGES // group.size
    read = pycomm.all_gather(torch.tensor(seen[:epoch])).flatten().tolist()
    assert sorted(read) == list(range(IMAGES))
    pycomm.print0(f"the first epoch had each of {IMAGES} images once")
    pycomm.shutdown()


if __name__ == "__main__":
    main()
