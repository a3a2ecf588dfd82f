"""Metrics of the ranks of this host for Prometheus, as `pycomm top` sees them.

docs/observability.md lists them. The package prometheus_client is optional.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pycomm.errors import Unsupported
from pycomm.observe.flight_recorder import FlightRecord
from pycomm.observe.sample import Sample, program, state_of

LOOPBACK = "127.0.0.1"
STATES = ("broken", "stopped", "late")
LABELS = ("group", "rank", "pid", "program")
COUNTERS: dict[str, tuple[str, Callable[[FlightRecord], float]]] = {
    "pycomm_calls": ("calls that the rank began", lambda one: one.begun),
    "pycomm_sent_bytes": ("bytes written to peers", lambda one: one.bytes_written),
    "pycomm_received_bytes": ("bytes received from peers", lambda one: one.bytes_received),
    "pycomm_call_seconds": ("time inside completed calls", lambda one: one.inside / 1e9),
    "pycomm_waiting_seconds": ("time inside calls without work", lambda one: one.waited / 1e9),
}


class Collector:
    """The metrics of prometheus_client for a sample of each scrape."""

    def __init__(self, sample: Callable[[], Sample]) -> None:
        self._sample = sample

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._sample()
        ranks = {
            (one.name, str(one.rank), str(one.pid), program(one)): one for one in now.flight_records
        }
        for name, (text, value) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for labels, one in ranks.items():
                counter.add_metric(labels, value(one))
            yield counter
        size = GaugeMetricFamily("pycomm_group_size", "ranks of the group", labels=LABELS)
        call = GaugeMetricFamily(
            "pycomm_current_call_seconds", "time since the current call began", labels=LABELS
        )
        state = GaugeMetricFamily(
            "pycomm_rank_state", "1: the rank is in this state", labels=(*LABELS, "state")
        )
        states = state_of(now)
        for labels, one in ranks.items():
            size.add_metric(labels, one.size)
            begun = int(one.records[-1]["begun"]) if one.is_inside() else now.at_ns
            call.add_metric(labels, max(now.at_ns - begun, 0) / 1e9)
            for name in STATES:
                state.add_metric((*labels, name), states[one.id, one.rank] == name)
        yield from (size, call, state)


def export(
    sample: Callable[[], Sample],
    textfile: Path | None,
    port: int | None,
    every_s: float,
    once: bool = False,
) -> int:
    """Writes the metrics to a file every `every_s` seconds, and serves them on a port of the
    loopback interface; returns 0 at Ctrl-C, or after one file.

    Each file replaces the one before as a whole: a reader never sees a part.

    Raises:
        Unsupported: prometheus_client is not installed.
        OSError: the file cannot be written, or the port is in use.
    """
    try:
        import prometheus_client
    except ImportError as error:  # an extra
        wanted = 'pip install "prometheus_client>=0.20"'
        raise Unsupported(f"metrics need prometheus_client: {wanted}") from error
    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector(sample))
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        if port is not None:
            server, thread = prometheus_client.start_http_server(port, LOOPBACK, registry)
            for end in (thread.join, server.server_close, server.shutdown):  # the last first
                stack.callback(end)
            print(f"http://{LOOPBACK}:{server.server_port}/metrics", flush=True)
        while True:
            if textfile is not None:
                prometheus_client.write_to_textfile(str(textfile), registry)
            if once:
                return 0
            time.sleep(every_s)  # until the next file
    return 0
