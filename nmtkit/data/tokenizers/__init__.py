"""Vocabularies: training with SentencePiece, text to ids, and ids to text."""
