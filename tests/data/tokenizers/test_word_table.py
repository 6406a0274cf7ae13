import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmtkit.data.tokenizers import batch_encoder
from nmtkit.data.tokenizers.batch_encoder import ABSENT, LONGEST, WordKeys, WordTable

# words that share beginnings and lengths, zeros and 0xFF-like ends among them
WORDS = st.lists(st.text("a\0\x01é", min_size=1, max_size=40).map(str.encode).filter(lambda w: len(w) <= LONGEST))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(WORDS, WORDS, st.sampled_from([1, 1 << 10]))
def test_words_are_found_by_the_number_they_were_added_with(
    added: list[bytes], others: list[bytes], first: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_encoder, "FIRST_CAPACITY", first)  # 1: the table grows all the time
        table, numbers = WordTable(), dict[bytes, int]()
        for word in added:
            if word not in numbers:
                numbers[word] = len(numbers) + 1
        names = list(numbers)
        for part in (names[: len(names) // 2], names[len(names) // 2 :]):
            table.add(WordKeys.of_words(part))
        assert len(table) == len(names)
        wanted = [numbers.get(word, ABSENT) for word in added + others]
        assert table.find(WordKeys.of_words(added + others)).tolist() == wanted


def test_words_whose_hashes_are_equal_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WordKeys, "hashes", lambda keys: np.zeros(keys.count, np.uint64))
    table, words = WordTable(), [b"a", b"b", b"abcdefgh", b"abcdefghi", b"abcdefghj", b"abcdefg"]
    table.add(WordKeys.of_words(words[:5]))
    assert table.find(WordKeys.of_words(words[::-1])).tolist() == [ABSENT, 5, 4, 3, 2, 1]
