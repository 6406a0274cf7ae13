"""Metrics of the service for Prometheus."""

from collections.abc import Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nmtkit.serving.fair_queue import LineResult, Pair
from nmtkit.serving.pool import Pool

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # latencies in seconds


class Metrics(Collector):
    """The figures for Prometheus: counters of requests, and the state of the pool at the time of the query."""

    MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.registry = CollectorRegistry()
        counter, pair = partial(Counter, registry=self.registry), ["source", "target"]
        self.requests = counter("nmtkit_requests", "Requests by route and status.", ["route", "status"])
        about = "Seconds from a request to its answer."
        self.seconds = Histogram("nmtkit_request_seconds", about, ["route"], buckets=BUCKETS, registry=self.registry)
        self.lines = counter("nmtkit_sentences", "Lines translated.", pair)
        self.characters = counter("nmtkit_characters", "Characters translated.", pair)
        self.loops = counter("nmtkit_loops", "Lines decoded again, because the first translation was a loop.", pair)
        self.registry.register(self)

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Counts a request. `route` is empty for a request that is not valid HTTP."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def count(self, pair: Pair, lines: Sequence[list[LineResult]], characters: int) -> None:
        self.lines.labels(*pair).inc(len(lines))
        self.loops.labels(*pair).inc(sum("decoded_again" in line[0] for line in lines))
        self.characters.labels(*pair).inc(characters)

    def page(self) -> bytes:
        """Returns the text of GET /metrics."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        pool = self.pool
        waiting = sum(queue.waiting for queue in pool.queues.values())
        yield GaugeMetricFamily("nmtkit_queue_sentences", "Lines that are waiting.", waiting)
        yield GaugeMetricFamily("nmtkit_workers", "Worker processes.", len(pool.workers))
        busy = sum(bool(worker.tasks) for worker in pool.workers)
        yield GaugeMetricFamily("nmtkit_workers_busy", "Busy worker processes.", busy)
        yield CounterMetricFamily("nmtkit_batches", "Batches sent to workers.", pool.scheduler.sent)
        yield CounterMetricFamily("nmtkit_worker_deaths", "Workers that died and were replaced.", pool.death_count)
        yield CounterMetricFamily("nmtkit_reloads", "Reloads of the models.", pool.reload_count)
        failed = pool.failed_reload_count
        yield CounterMetricFamily("nmtkit_failed_reloads", "Reloads that failed, so the old models stayed.", failed)
