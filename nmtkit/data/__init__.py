"""The data path: raw text to pieces, to a memory-mapped dataset, to batches."""
