"""Several runs, or a run from outside: sweep, comparison, estimate, inspection."""
