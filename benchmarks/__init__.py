"""Benchmarks of pycomm and comparable libraries: `python -m benchmarks collectives ...`.

Every figure comes from one run that includes the comparator and names the machine. Needs torch.
"""
