"""Metrics with their signatures, and significance tests."""
