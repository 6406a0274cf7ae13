"""Translation over HTTP: `nmtkit serve`.

One process speaks HTTP, holds the queue and knows no model (`app`, `fair_queue`, `pool`); another loads the models and
forks the workers that translate (`model_process`). Texts and JSON messages pass between them, nothing else.
"""
