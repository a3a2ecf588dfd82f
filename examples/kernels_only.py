"""A DGC step with the kernels alone, without a group or torch.

Four workers each send the largest hundredth of their accumulated gradients and keep the residual.

    python examples/kernels_only.py

Prints

    step 25: 16032 of 800000 bytes sent, 0.914 left
    step 100: 16032 of 800000 bytes sent, 0.532 left
"""

import numpy as np

from pycomm import kernels

WORKERS, COUNT, STEPS = 4, 200_000, 100
LEARNING_RATE, MOMENTUM = 0.004, 0.5


def main() -> float:
    """Moves `weights` towards `target`; returns the remaining distance as a share of the first."""
    random = np.random.default_rng(0)
    target = random.laplace(size=COUNT).astype(np.float32)
    weights = np.zeros_like(target)
    u, v = np.zeros((2, WORKERS, COUNT), np.float32)
    k = COUNT // 100
    workspaces = [kernels.dgc_workspace(u[w], v[w], k) for w in range(WORKERS)]
    first = kernels.norm(weights - target)[0]
    for step in range(STEPS):
        packets = []
        for w in range(WORKERS):
            noise = random.normal(0, 0.1, COUNT).astype(np.float32)
            gradient = weights - target + noise
            indices, values = kernels.dgc_step(
                gradient, u[w], v[w], k, momentum=MOMENTUM, workspace=workspaces[w]
            )
            packets.append(kernels.encode(indices, values, COUNT))  # bytes to send
        kernels.decode_update(weights, packets, LEARNING_RATE, 1 / WORKERS)
        if step % 25 == 24:
            left = kernels.norm(weights - target)[0] / first
            print(f"step {step + 1}: {len(packets[0])} of {4 * COUNT} bytes sent, {left:.3f} left")
    return float(left)


if __name__ == "__main__":
    assert main() < 0.9
