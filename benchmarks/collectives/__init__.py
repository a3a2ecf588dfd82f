"""Forming groups, and collectives between simulated hosts. Those within a host:
`pycomm.bench.collectives`.
"""
