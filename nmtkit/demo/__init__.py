"""The embedded English-German corpus, and the demo that trains a model on this corpus with the real commands."""

SHOWS_COMMANDS = "NMTKIT_DEMO"  # environment variable; if set, commands do not suggest the next command
