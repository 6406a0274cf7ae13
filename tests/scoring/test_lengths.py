import pytest

from nmtkit.scoring.lengths import word_count


@pytest.mark.parametrize("text", ["नमस्ते दुनिया", "cafe\u0301 noir", "שָׁלוֹם עולם", "வணக்கம் உலகம்"])
def test_a_combining_mark_belongs_to_its_word(text: str) -> None:
    assert word_count(text) == 2
