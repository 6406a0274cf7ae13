"""The embedded English-German corpus, and the demo that trains a model on this corpus with the real commands."""

SHOWS_COMMANDS = "NMTKIT_DEMO"  # environment variable: the demo shows the next command, so the commands do not
