"""Training in which killed ranks are replaced, as if nothing had happened.

    pycomm launch --nproc 3 --replace 2 examples/replace.py

Rank 1 is killed in step 60, and rank 0, whose process serves the rendezvous, in step 120. The
launcher starts a new process for each. The other ranks wait for it in replace(), and send it the
parameters, the optimizer's state and the step. At last the parameters are bitwise those of a run
with --no-kills, and so is their checksum. Rank 0 prints

    step 60: rank 1 was replaced
    step 120: rank 0 was replaced
    step 200: loss 0.0128, checksum 664943145
"""

import argparse
import os
import signal
import zlib

import torch
from torch import nn

import pycomm
from pycomm.errors import GroupBroken, PeerLost

STEPS, KILLS = 200, {60: 1, 120: 0}  # step: rank


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--no-kills", action="store_true", help="train without failures")
    kills = {} if options.parse_args().no_kills else KILLS
    torch.manual_seed(0)
    target = nn.Linear(64, 8)  # the function to learn, the same on every rank
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    group = pycomm.init()  # a new process joins the group of the others, which wait for it
    if group.rank in group.joined:
        kills = {}
    parallel = pycomm.DataParallel(model)
    step, resume = 0, group.rank in group.joined
    while step < STEPS:
        try:
            if resume:
                result = parallel.replace(optimizer)
                step, resume = result.step, False
                print(f"step {step}: rank {result.lost[0]} was replaced", flush=True)
            if kills.get(step) == group.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            data = torch.Generator().manual_seed(step * group.size + group.rank)
            x = torch.randn(32, 64, generator=data)
            loss = nn.functional.mse_loss(parallel(x), target(x).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        except (PeerLost, GroupBroken):  # a rank died: the step is made again
            resume = True
    content = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().tobytes()
    print(f"step {step}: loss {loss.item():.4f}, checksum {zlib.crc32(content)}", flush=True)
    pycomm.shutdown()


if __name__ == "__main__":
    main()
