"""Counters of a service in the text format of Prometheus."""

from collections import Counter, defaultdict
from collections.abc import Mapping

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.lines: Counter[tuple[str, str]] = Counter()  # by source and target language
        self.characters: Counter[tuple[str, str]] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)  # by route
        self.buckets: dict[str, list[int]] = defaultdict(lambda: [0] * len(BUCKETS))

    def observe(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] += 1
        self.seconds[route] += seconds
        for index, bound in enumerate(BUCKETS):
            self.buckets[route][index] += seconds <= bound

    def text(self, gauges: Mapping[str, tuple[str, float]], counters: Mapping[str, tuple[str, float]]) -> str:
        """Returns the page of GET /metrics; `gauges` and `counters` are help and value by name."""
        rows: list[str] = []

        def family(name: str, kind: str, help: str, samples: list[str]) -> None:
            rows.extend([f"# HELP {name} {help}", f"# TYPE {name} {kind}", *samples])

        family(
            "nmtkit_requests_total",
            "counter",
            "Requests by route and status.",
            [f'nmtkit_requests_total{{route="{route}",status="{status}"}} {number}'
             for (route, status), number in sorted(self.requests.items())],
        )  # fmt: skip
        for name, help, by_pair in (
            ("nmtkit_sentences_total", "Lines translated.", self.lines),
            ("nmtkit_characters_total", "Characters translated.", self.characters),
        ):
            samples = [f'{name}{{source="{s}",target="{t}"}} {number}' for (s, t), number in sorted(by_pair.items())]
            family(name, "counter", help, samples)
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, (help, value) in values.items():
                family(name, kind, help, [f"{name} {value:g}"])
        family("nmtkit_request_seconds", "histogram", "Seconds from a request to its answer.", self._histogram())
        return "\n".join(rows) + "\n"

    def _histogram(self) -> list[str]:
        rows = []
        for route in sorted(self.seconds):
            name, total = "nmtkit_request_seconds", sum(n for (r, _), n in self.requests.items() if r == route)
            for bound, number in zip(BUCKETS, self.buckets[route], strict=True):
                rows.append(f'{name}_bucket{{route="{route}",le="{bound:g}"}} {number}')
            rows.append(f'{name}_bucket{{route="{route}",le="+Inf"}} {total}')
            rows.append(f'{name}_sum{{route="{route}"}} {self.seconds[route]:.6f}')
            rows.append(f'{name}_count{{route="{route}"}} {total}')
        return rows
