"""The embedded English-German corpus, and the demo that trains a model on this corpus with the real commands."""
