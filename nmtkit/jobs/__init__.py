"""Runs the work of commands in threads, processes and ranks, divides work into shards, and counts its progress."""
