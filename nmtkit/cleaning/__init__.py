"""`nmtkit clean`: filters of pairs, their scores, the decision about the pairs to keep, and the report."""
