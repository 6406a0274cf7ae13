"""Wrong targets for the calibration of scores."""

import pytest

from nmtkit.cleaning.filters.calibration import Error, noise

TARGETS = [" ".join(f"{row}.{word}" for word in range(1 + 5 * row)) for row in range(12)]


@pytest.mark.parametrize("error", ["misaligned", "appended", "joined"])
def test_a_wrong_target_has_words_of_another_target(error: Error) -> None:
    """ "appended" and "joined" could take the target itself as the different target."""
    for seed in range(20):
        wrong = noise(TARGETS, seed, [error])
        for target, other in zip(TARGETS[1:], wrong[1:], strict=True):
            assert {word.partition(".")[0] for word in other.split()} != {target.partition(".")[0]}


def test_a_misaligned_target_has_a_similar_length() -> None:
    """The shortest target got the longest."""
    lengths = [len(target.split()) for target in noise(TARGETS, 1, ["misaligned"])]
    assert all(abs(length - len(target.split())) == 5 for length, target in zip(lengths, TARGETS, strict=True))
