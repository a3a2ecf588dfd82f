"""`pycomm bench`: the benchmarks of pycomm and of comparable libraries.

Every figure comes from one run that includes the comparator and names the machine.
"""
