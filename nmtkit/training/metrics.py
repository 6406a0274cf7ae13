"""Metrics of a validation by name (`--metrics a,b`)."""

from abc import ABC

from nmtkit.registry import Registry


class Metric(ABC):  # noqa: B024
    """A score of a validation."""


METRICS: Registry[Metric] = Registry("metric", "--metrics", several=True)
