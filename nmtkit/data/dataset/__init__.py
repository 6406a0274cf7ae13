"""The memory-mapped dataset: its tokenizer, writer, reader and batches, and transforms of training pairs."""
