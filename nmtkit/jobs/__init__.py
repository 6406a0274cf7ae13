"""One scheduler of workers over processes and ranks; shards, file locks, threads, machine code, progress."""
