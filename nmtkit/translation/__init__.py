"""Text in, text out: requests, processing of text before and after the model, batches, processes."""
