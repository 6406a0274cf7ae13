"""Translation over HTTP: `nmtkit serve`.

One process serves HTTP and holds the queue; it loads no model (`app`, `fair_queue`, `pool`). A second process loads the
models and forks the workers (`model_process`). They exchange text in JSON messages.
"""
