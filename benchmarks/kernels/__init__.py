"""The packet codec; `pycomm.bench.kernels` measures the other kernels."""
