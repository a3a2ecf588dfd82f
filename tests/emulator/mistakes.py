"""Mistakes to plant in the text of the kernels, and how each is found.

A row: name, file of csrc/cuda, the text (found there once), what takes its place, the kind of build
and the case of cases.cpp that find it, and what is said then. "race" is ThreadSanitizer's word; a
plain build finds wrong numbers and what the emulator itself refuses. Called by tests/test_cuda.py.
"""

import programs

RACE = r"data race"
WRONG = r"WRONG: "
STUCK = r"deadlock|has returned|meet at different|no progress"

# ruff: noqa: E501 - a text to find stands as the source has it, on one line
ROWS = [
    # ---- a missing barrier
    (
        "pool_counts_barrier",
        "update.cuh",
        "  if (lane == 31) space.counts[warp] = upto;\n  __syncthreads();",
        "  if (lane == 31) space.counts[warp] = upto;",
        "tsan",
        "brief",
        RACE,
    ),
    (
        "pool_starts_barrier",
        "update.cuh",
        "  __syncthreads();\n  if (hits == 0) return;",
        "  if (hits == 0) return;",
        "tsan",
        "brief",
        RACE,
    ),
    (
        "cleared_bins_barrier",
        "select.cuh",
        "      if (digit == 1) space.reach[b] = 0;\n    }\n    __syncthreads();",
        "      if (digit == 1) space.reach[b] = 0;\n    }",
        "tsan",
        "brief",
        RACE,
    ),
    (
        "flush_barrier",
        "select.cuh",
        "    unsigned* bins = t.bins + size_t{selection} * kBins<V>;\n    __syncthreads();",
        "    unsigned* bins = t.bins + size_t{selection} * kBins<V>;",
        "tsan",
        "brief",
        RACE,
    ),
    (
        "end_of_turn_barrier",
        "block.cuh",
        "__device__ __forceinline__ void end_turn(Turns& turns) {\n  __syncthreads();",
        "__device__ __forceinline__ void end_turn(Turns& turns) {",
        "tsan",
        "brief",
        RACE,
    ),
    (
        "counts_before_barrier",
        "pack.cuh",
        "  if (gpu::lane_id() == 0) space.by_warp[warp] = sum;\n  __syncthreads();",
        "  if (gpu::lane_id() == 0) space.by_warp[warp] = sum;",
        "tsan",
        "brief",
        RACE,
    ),
    (
        "norm_barrier",
        "dense.cu",
        "      lanes[threadIdx.x] = __dadd_rn(lanes[threadIdx.x], lanes[threadIdx.x + width]);\n    __syncthreads();",
        "      lanes[threadIdx.x] = __dadd_rn(lanes[threadIdx.x], lanes[threadIdx.x + width]);",
        "tsan",
        "dense",
        RACE,
    ),
    (
        "decode_warp_order",
        "decode.cuh",
        "  __syncwarp();\n  if (lane == 0) cursor = at;\n  __syncwarp();",
        "  if (lane == 0) cursor = at;",
        "tsan",
        "packets",
        RACE,
    ),
    (
        "decode_cleared_bits",
        "decode.cuh",
        '    static_assert(kWidth / 32 == 32, "a lane for each word");\n    __syncwarp();',
        '    static_assert(kWidth / 32 == 32, "a lane for each word");',
        "tsan",
        "packets",
        RACE,
    ),
    # ---- flags, fences and atomics
    (
        "plain_flag",
        "block.cuh",
        "gpu::add_release(&turns.done, 1u)",
        "turns.done += 1",
        "tsan",
        "brief",
        RACE,
    ),
    (
        "flag_without_release",
        "block.cuh",
        "gpu::add_release(&turns.done, 1u)",
        "atomicAdd(&turns.done, 1u)",
        "tsan",
        "brief",
        RACE,
    ),
    (
        "order_of_blocks_assumed",
        "block.cuh",
        "const unsigned ticket = atomicAdd(&turns.ticket, 1u);",
        "const unsigned ticket = gridDim.x - 1 - blockIdx.x;",
        "plain",
        "step",
        STUCK,
    ),
    (
        "plain_pool_counter",
        "update.cuh",
        "atomicAdd(&state.count, sum)",
        "(state.count += sum) - sum",
        "tsan",
        "brief",
        RACE,
    ),
]

UNIT = {"dense.cu": "dense", "decode.cuh": "packets"}  # else step.cu

MISTAKES = {
    name: (
        programs.Mutant(name, file, old, new, UNIT.get(file, "step"), kind),
        case,
        words,
    )
    for name, file, old, new, kind, case, words in ROWS
}
