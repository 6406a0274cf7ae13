"""Bulk jobs: a text is processed in shards, by any number of processes and machines, and joined again."""
