"""Corpora: parallel text in files of several formats, read and written as pairs of lines."""
