"""The embedded English-German corpus, and the run that learns it with the real commands."""
