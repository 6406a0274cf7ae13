"""`nmtkit clean`: filters score sentence pairs, `Decision` keeps or drops each pair, and a report has counts."""
