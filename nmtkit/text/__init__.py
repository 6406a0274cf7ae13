"""Processing of text without torch: sentences, casing, markup, protected spans, glossary, languages."""
