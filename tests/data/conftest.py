"""Tokenizers of a small made-up text."""

import pytest
from parallel_text import parallel_lines

from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def joint_tokenizer() -> Tokenizer:
    source, target = parallel_lines(400)
    return Tokenizer(train_model(source + target, 340, tags=("<2de>",)))


@pytest.fixture(scope="session")
def separate_tokenizer() -> Tokenizer:
    source, target = parallel_lines(400)
    return Tokenizer(train_model(source, 310), train_model(target, 320))
