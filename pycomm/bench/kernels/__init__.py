"""`pycomm bench kernels`."""
