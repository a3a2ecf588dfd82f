"""A data pipeline: one decoded copy per host, endless prefetching, conversion on the device.

pycomm launch --nproc 2 examples/reader.py
"""

import itertools

import torch

import pycomm
from pycomm.data import DataLoader, InfiniteSampler, Prefetcher, ShardedSampler

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


def to_floats(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts on the device, so that only a quarter of the bytes is copied there."""
    images, numbers = batch
    return images.float().div(255.0).sub(0.5), numbers


def main() -> None:
    group = pycomm.init()
    images = Images()
    sampler = InfiniteSampler(ShardedSampler(images, seed=1))  # each image on one rank, per epoch
    # Each rank decodes its share of the images now; all ranks and workers read the one copy.
    loader = DataLoader(
        images, BATCH, sampler=sampler, num_workers=1, shared=True, transform=flipped
    )
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
