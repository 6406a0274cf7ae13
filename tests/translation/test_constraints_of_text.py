"""Constraints concern the text of a translation, whatever pieces spell it."""

import random
import re

import pytest
from builders import save_ending_transformer, save_tiny_transformer, tiny_tokenizer

import nmtkit
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK
from nmtkit.translation.search.constraints import AvoidedText, piece_texts, target_texts, text_bytes

LINES = [
    "the dog runs in the park .",
    "a dog and a dog",
    "two men sleep !",
    "a women runs",
    "cat cat cat .",
    "the street",
]
SEARCHES = [
    {},
    {"beam": 1},
    {"nbest": 4},
    {"sampling": True, "nbest": 3},
    {"diverse_groups": 2},
    {"no_repeat_ngram": 3},
]
SHORT = {"max_len_a": 0.0, "max_len_b": 8}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_transformer(tmp_path_factory.mktemp("model") / "tiny.pt", tiny_tokenizer(), sharpness=2.0)


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    return save_ending_transformer(tmp_path_factory.mktemp("ending") / "ending.pt")


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_an_avoided_text_is_in_no_hypothesis(path, search):
    """The texts are parts of the translations: single characters, parts of words, and several words."""
    model, draw, changed = nmtkit.load(path), random.Random(1), 0
    free = dict(zip(LINES, model.translate(LINES, **SHORT), strict=True))
    for _ in range(3):
        requests = []
        for line, text in free.items():
            starts = [draw.randrange(max(1, len(text) - 1)) for _ in range(3)]
            phrases = [text[start : start + draw.randint(1, 6)] for start in starts]
            valid = [phrase for phrase in phrases if phrase.strip() and "\ufffd" not in phrase]
            requests.append(nmtkit.Request(line, avoided=valid))
        for request, translation in zip(
            requests, model.translate(requests, **{"nbest": 1} | search, **SHORT), strict=True
        ):
            for hypothesis in translation.hypotheses:
                assert not any(phrase in f" {hypothesis.text} " for phrase in request.avoided), request
                changed += hypothesis.text != free[request.source]
    assert changed > 10


def test_a_token_is_forbidden_if_the_text_with_this_token_contains_the_avoided_text():
    """The oracle decodes the output with each token, without the knowledge of beginnings."""
    tokenizer, draw = tiny_tokenizer(), random.Random(2)
    texts = piece_texts(tokenizer)
    for _ in range(300):
        output = [draw.randrange(3, tokenizer.target_size) for _ in range(draw.randint(0, 6))]
        more = [draw.randrange(3, tokenizer.target_size) for _ in range(draw.randint(1, 2))]
        whole = "".join(texts[token] for token in [*output, *more]).encode(errors="surrogateescape")
        spelt = re.sub("\ufffd|  +", " ", whole.decode(errors="replace")).strip()
        start = draw.randrange(max(1, len(spelt)))
        phrase = spelt[start : start + draw.randint(1, 5)]
        if not phrase.strip():
            continue
        avoided = AvoidedText.of(phrase, tokenizer)

        def contains(tokens, phrase=phrase):
            """Decodes with SentencePiece. The start and the end of a line count as spaces."""
            ended = tokens[-1:] == [EOS]
            text = f" {tokenizer.decode_target(tokens[:-1] if ended else tokens)}{' ' if ended else ''}"
            return re.sub(" +", " ", phrase) in re.sub(" +", " ", text)

        if contains(output):
            continue
        wanted = {token for token in range(3, tokenizer.target_size) if contains([*output, token])}
        wanted |= {EOS} if contains([*output, EOS]) else set()
        assert wanted == set(avoided.forbidden(output)) - {UNK, BOS}, (phrase, output)


def test_a_character_of_several_bytes_is_avoided_when_its_last_byte_comes():
    tokenizer = tiny_tokenizer()
    avoided = AvoidedText.of("ü", tokenizer)
    first, last = (f"<0x{byte:02X}>" for byte in "ü".encode())
    pieces = tokenizer.target_pieces(range(tokenizer.target_size))
    begun = [pieces.index(first)]
    assert pieces.index(last) in avoided.forbidden(begun) and pieces.index(last) not in avoided.forbidden([])
    assert text_bytes(piece_texts(tokenizer)[begun[0]]) == target_texts(tokenizer).texts[begun[0]] == "ü".encode()[:1]


def test_spaces_at_the_edges_of_an_avoided_text_are_edges_of_words(ending):
    model = nmtkit.load(ending)
    source = "Everyone has the right to life, liberty and security of person."
    (free,) = model.translate([source])
    word = free.split()[0]
    assert not model.translate(nmtkit.Request(source, avoided=[f" {word} "])).startswith(f"{word} ")
    inside = word[1:]
    assert model.translate(nmtkit.Request(source, avoided=[f" {inside} "])) == free
    assert inside not in model.translate(nmtkit.Request(source, avoided=[inside]))


@pytest.mark.parametrize("search", SEARCHES, ids=str)
@pytest.mark.parametrize("prefix", ["the ", "the dog ", "two men\t", "x "])
def test_a_prefix_keeps_the_space_at_its_end(path, prefix, search):
    texts = nmtkit.load(path).translate([nmtkit.Request(line, prefix=prefix) for line in LINES], **search, **SHORT)
    first = [text if isinstance(text, str) else text.hypotheses[0].text for text in texts]
    assert all(text.startswith(prefix.replace("\t", " ")) for text in first), first


@pytest.mark.parametrize(("prefix", "avoided"), [("the dog", "dog"), ("the dog", "he d"), ("the dog ", " dog ")])
def test_a_prefix_with_an_avoided_text_is_an_error(path, prefix, avoided):
    with pytest.raises(ValueError, match=f"line 2.*{avoided}"):
        nmtkit.load(path).translate(["a", nmtkit.Request("a dog", prefix=prefix, avoided=[avoided])])
    nmtkit.load(path).translate(nmtkit.Request("a dog", prefix="the ca", avoided=["cat"]), **SHORT)


@pytest.mark.parametrize("engine", ["numba", "slots"])
def test_every_engine_keeps_prefixes_and_avoided_texts(path, engine):
    if engine == "numba":
        pytest.importorskip("numba")
    requests = [nmtkit.Request(line, prefix="the ") for line in LINES] + [
        nmtkit.Request(line, avoided=["e", "dog"]) for line in LINES
    ]
    expected = nmtkit.load(path).translate(requests, **SHORT)
    assert nmtkit.load(path, engine=engine).translate(requests, **SHORT) == expected
    assert not any("e" in text or "dog" in text for text in expected[len(LINES) :])
