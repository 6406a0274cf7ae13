"""Builds a model from a name and a config or from a checkpoint, and makes a checkpoint of a model."""
