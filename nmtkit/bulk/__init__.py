"""Bulk jobs: any number of processes and machines process the shards of a text. The outputs are joined afterwards."""
