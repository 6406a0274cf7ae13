"""Ids in, hypotheses out: the rules of a search, search algorithms, logits processors, shortlists."""
