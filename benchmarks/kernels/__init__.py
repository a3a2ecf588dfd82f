"""More kernels, and the packet codec; `pycomm.bench.kernels` measures the others."""
