"""Translation over HTTP: `nmtkit serve`.

The first process serves HTTP and holds the queue (`app`, `fair_queue`, `pool`). A second process loads the models and
forks the workers (`loading`, `workers`).
"""
