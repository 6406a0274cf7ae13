"""The registered filters of `nmtkit clean`. This package exports all names that a plug-in needs."""

from nmtkit.cleaning.filters.interface import FILTERS, Filter, FilterContext
from nmtkit.cleaning.filters.text_block import Scores, TextBlock

# the modules below register filters
# isort: split
from nmtkit.cleaning.filters import alignment, domain, languages, rules, word_order  # noqa: F401

__all__ = ["FILTERS", "Filter", "FilterContext", "Scores", "TextBlock"]
