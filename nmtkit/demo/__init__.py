"""The embedded English-German corpus, and the demo that learns to translate it with the real commands."""
