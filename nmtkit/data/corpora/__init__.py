"""Readers and writers of corpora in all formats, and the rules for dropping pairs."""
