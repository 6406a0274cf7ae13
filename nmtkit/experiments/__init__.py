"""Tools around training runs: sweep of runs, comparison of runs, estimate of costs, inspection of files."""
