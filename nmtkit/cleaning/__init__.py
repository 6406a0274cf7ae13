"""`nmtkit clean`: filters of pairs, their scores, the decision which pairs to keep, and the report."""
