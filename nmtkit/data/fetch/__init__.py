"""Data by name: corpora of OPUS, test sets of sacreBLEU, datasets of Hugging Face."""
