"""Private: what the API needs to call the compiled modules: arrays, devices, NCCL, calls."""
