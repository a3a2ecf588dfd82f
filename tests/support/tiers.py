"""The tier of each test: UNIT and QUICK list files, everything else runs in `make test-all` alone.

    make test-unit   UNIT: no ranks beyond one process, below a minute
    make test        UNIT and QUICK: for users, below six minutes on two cores
    make test-all    everything, with unauthenticated clients that connect meanwhile (attack.py)
    make nightly     each file alone, long simulations, fuzzing, soak: see the Makefile

conftest.py gives each test the marker of its tier, so that no test needs a decorator.
"""

UNIT = {
    "test_arrays", "test_buckets", "test_compact", "test_data", "test_dgc_exchange_policy",
    "test_dtypes", "test_flight_recorder", "test_kernel_inputs", "test_kernel_packets",
    "test_kernel_rows", "test_kernels", "test_local_sgd", "test_metrics", "test_misuse",
    "test_packet_batches", "test_planner", "test_save", "test_summaries", "test_top", "test_trace",
    "test_tuning",
}  # fmt: skip
QUICK = {
    "test_api", "test_c10d", "test_data_parallel", "test_dgc", "test_dgc_compact", "test_dgc_fused",
    "test_dgc_states", "test_dgc_steps", "test_dgc_unseen", "test_errors", "test_layers",
    "test_join_scaled", "test_product", "test_shrink", "test_hierarchical_exchange", "test_objects",
    "test_verbs",
}  # fmt: skip
# Tests of these files that take too long for their tier.
SLOW = {"test_every_header_compiles_alone"}


def tier_of(file: str, name: str) -> str:
    """The marker of the test `name`, without its parameters, in the file `file`.py."""
    if name not in SLOW:
        if file in UNIT:
            return "unit"
        if file in QUICK:
            return "quick"
    return "full"
