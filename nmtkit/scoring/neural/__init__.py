"""COMET and MetricX: neural metrics that read the published checkpoint files."""
