"""pycomm measured beside its peers: `python -m benchmarks collectives ...`.

Every figure is taken in one run with the comparator beside it and the machine named. Needs torch.
"""
