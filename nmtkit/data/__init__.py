"""Turns raw text into pieces, pieces into a memory-mapped dataset, and the dataset into batches."""
