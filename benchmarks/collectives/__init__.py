"""Collectives between simulated hosts; `pycomm.bench.collectives` measures those within a host."""
