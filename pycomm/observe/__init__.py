"""The commands that show machines, ranks and calls: `pycomm info`, `doctor`, `top` and `trace`."""
