"""Private: how the API calls the compiled modules: arrays, devices, NCCL, calls."""
