"""Constraints concern the text of a translation, whatever pieces spell it."""

import random
import re

import numpy as np
import pytest
from builders import REAL_LINES, WORDS, save_ending_transformer, save_tiny_transformer, tiny_tokenizer

import nmtkit
from nmtkit.data import checkpoint_file
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK, Tokenizer
from nmtkit.models import checkpoint
from nmtkit.translation.search.constraints import AvoidedText, piece_texts, target_texts, text_bytes
from nmtkit.translation.search.shortlist import Shortlist

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
    requests += [nmtkit.Request(line, prefix=" ") for line in LINES]
    options = {"keep_loops": True, **SHORT}  # PyTorch decodes loops again
    expected = nmtkit.load(path).translate(requests, **options)
    assert nmtkit.load(path, engine=engine).translate(requests, **options) == expected
    assert not any("e" in text or "dog" in text for text in expected[len(LINES) : 2 * len(LINES)])


# --- required texts ---------------------------------------------------------------------------------------------------

REQUIRING = [{}, {"beam": 1}, {"nbest": 4}, {"shortlist": True}, {"ordered_constraints": True}]


def parts_of(text: str, draw: random.Random) -> list[str]:
    """Returns a few parts of a text, from words and characters: some begin or end within a word."""
    starts = [draw.randrange(len(text)) for _ in range(3)]
    parts = {text[start : start + draw.randint(1, 7)] for start in starts}
    return sorted(part for part in parts if part.strip() and "\ufffd" not in part)


@pytest.fixture(scope="module")
def listed(path, tmp_path_factory):
    """The model with a shortlist of all pieces, so that the free translations stay the same."""
    file = tmp_path_factory.mktemp("listed") / "listed.pt"
    contents, size = checkpoint.load(path), tiny_tokenizer().target_size
    lists = Shortlist.from_entries(np.array([3]), np.array([3]), np.arange(size), size, size).state()
    checkpoint_file.save(file, contents | {"shortlist": lists})
    return file


@pytest.mark.slow
@pytest.mark.parametrize("search", REQUIRING[:-1], ids=str)
def test_a_required_text_that_is_already_there_changes_nothing(listed, search):
    model, draw = nmtkit.load(listed), random.Random(4)
    options = {"nbest": 1} | search | SHORT
    for _ in range(4):
        free = model.translate(LINES, **options)
        requests = []
        for translation in free:
            texts = [hypothesis.text for hypothesis in translation.hypotheses]
            inside = [part for part in parts_of(texts[0], draw) if all(part in f" {text} " for text in texts)]
            requests.append(nmtkit.Request(translation.source, required=inside))
        assert any(request.required for request in requests)
        required = model.translate(requests, **options)
        assert [each.hypotheses for each in required] == [each.hypotheses for each in free]


@pytest.mark.slow
@pytest.mark.parametrize("search", REQUIRING, ids=str)
def test_every_hypothesis_has_every_required_text(listed, search):
    model, draw, changed = nmtkit.load(listed), random.Random(5), 0
    free = [text for text in model.translate(LINES, max_len_b=20) if text]
    for _ in range(2):
        requests = [nmtkit.Request(line, required=parts_of(draw.choice(free), draw)) for line in LINES]
        requests += [nmtkit.Request(line, required=[".", "ü", "dog"]) for line in LINES]
        plain = model.translate([request.source for request in requests], **SHORT)
        found = model.translate(requests, **{"nbest": 1} | search | SHORT)
        for request, translation, before in zip(requests, found, plain, strict=True):
            for hypothesis in translation.hypotheses:
                text = f" {hypothesis.text} "
                for phrase in request.required:
                    assert text.count(phrase) >= request.required.count(phrase), (request, text)
                if "ordered_constraints" in search:
                    assert re.search(".*".join(map(re.escape, request.required)), text), (request, text)
            changed += translation.text != before
    assert changed > 10


def test_a_text_that_is_required_twice_occurs_twice(path):
    (text,) = nmtkit.load(path).translate([nmtkit.Request("the dog", required=["cat", "cat", "at"])], **SHORT)
    assert text.count("cat") == 2


def test_spaces_at_the_edges_of_a_required_text_are_edges_of_words(ending):
    model = nmtkit.load(ending)
    source = "Everyone has the right to life, liberty and security of person."
    (free,) = model.translate([source])
    word = free.split()[0]
    same = [[f" {word} "], [f"{word} "], [word], [word[1:]], [word[1:-1]], [word[:2], word[1:3]]]
    for phrases in same:
        assert model.translate(nmtkit.Request(source, required=phrases)) == free
    changed = model.translate(nmtkit.Request(source, required=[f" {word[1:]} "]))
    assert changed != free and word[1:] in changed.split()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["numba", "slots"])
def test_every_engine_keeps_required_texts(path, engine):
    if engine == "numba":
        pytest.importorskip("numba")
    free = nmtkit.load(path).translate(LINES, **SHORT)
    draw = random.Random(6)
    requests = [nmtkit.Request(line, required=parts_of(text, draw)) for line, text in zip(LINES, free, strict=True)]
    requests += [nmtkit.Request(line, required=["park", "!"]) for line in LINES]
    expected = nmtkit.load(path).translate(requests, **SHORT)
    found = nmtkit.load(path, engine=engine).translate(requests, **SHORT)
    assert found == expected and found[: len(LINES)] == free
    assert all("park" in text and "!" in text for text in found[len(LINES) :])


@pytest.mark.parametrize("search", REQUIRING[:-1], ids=str)
def test_a_glossary_term_that_is_already_there_changes_nothing(listed, tmp_path, search):
    """The terms are words and signs of the free translation, as the translation spells them."""
    model = nmtkit.load(listed)
    lines, options = ["dog", "street", "women", "sleeps"], {"nbest": 1} | search | SHORT
    free = model.translate(lines, **options)
    terms = []
    for line, translation in zip(lines, free, strict=True):
        texts = [re.findall(r"\w+|[^\w\s]", hypothesis.text) for hypothesis in translation.hypotheses]
        common = set(texts[0]).intersection(*texts[1:])
        terms.append(f"{line}\t{sorted(common)[0]}\n" if common else "")
    (tmp_path / "terms.tsv").write_text("".join(terms))
    assert sum(map(bool, terms)) >= 2
    found = model.translate(lines, glossary=tmp_path / "terms.tsv", **options)
    for one, other, term in zip(found, free, terms, strict=True):
        assert [hypothesis.text for hypothesis in one.hypotheses] == [
            hypothesis.text for hypothesis in other.hypotheses
        ]
        assert not term or one.hypotheses[0].terms[0].found


@pytest.mark.slow
def test_a_vocabulary_of_words_requires_texts_within_its_words(tmp_path):
    tokenizer = Tokenizer(train_model([" ".join(WORDS)] * 3, len(set(WORDS)) + 3, "word"))
    path = save_tiny_transformer(tmp_path / "words.pt", tokenizer, sharpness=2.0)
    model, text = nmtkit.load(path), ""
    for phrase in ("ome", "wome", "eet", "n", "the dog"):
        text = model.translate(nmtkit.Request("the dog runs", required=[phrase]), **SHORT)
        assert phrase in text
    with pytest.raises(ValueError, match=r"line 1.*does not know"):
        model.translate(nmtkit.Request("the dog", required=["wom en"]))


@pytest.mark.parametrize("phrase", ["", " "])
def test_a_phrase_without_text_is_called_empty(ending, phrase):
    for request in (nmtkit.Request("a dog", required=["dog", phrase]), nmtkit.Request("a dog", avoided=[phrase])):
        with pytest.raises(ValueError, match=r"line 1.*empty"):
            nmtkit.load(ending).translate(request)


# --- constraints and the steps of the text pipeline -------------------------------------------------------------------


def test_constraints_of_a_line_in_capitals_concern_its_translation_in_capitals(ending):
    model, line = nmtkit.load(ending), "EVERYONE HAS THE RIGHT TO LIFE, LIBERTY AND SECURITY OF PERSON."
    (free,) = model.translate([line], truecase_caps=True)
    assert free == free.upper()
    word = free.split()[0]
    for unchanged in ({"required": [word]}, {"required": [word[1:3]]}, {"avoided": [word.lower()]}):
        assert model.translate(nmtkit.Request(line, **unchanged), truecase_caps=True) == free
    for phrase in (word, word[1:3]):
        assert phrase not in model.translate(nmtkit.Request(line, avoided=[phrase]), truecase_caps=True)
    for phrase in ("SLAVERY", "slavery"):
        assert "SLAVERY" in model.translate(nmtkit.Request(line, required=[phrase]), truecase_caps=True)


@pytest.mark.slow
def test_an_avoided_text_does_not_appear_where_the_parts_of_a_long_line_meet(ending):
    model, line = nmtkit.load(ending, max_source_len=24), " ".join(REAL_LINES[2:4])
    (free,) = model.translate([line], **SHORT)
    phrases = [free[start : start + size] for size in (3, 5) for start in range(len(free) - size)]
    across = [phrase for phrase in phrases if " " in phrase.strip() and "\ufffd" not in phrase]
    assert len(across) > 5
    for phrase in across:
        text = model.translate(nmtkit.Request(line, avoided=[phrase]), **SHORT)
        assert phrase not in text


def test_an_avoided_text_that_is_copied_from_the_source_is_named(ending, caplog):
    """The output contained the text without a word."""
    model = nmtkit.load(ending)
    requests = [
        nmtkit.Request("All human beings", avoided=["{name}"]),
        nmtkit.Request("All {name} are born free", avoided=["{name}", "zebra"]),
    ]
    plain, copied = model.translate(requests, protect_spans=True, **SHORT)
    warnings = [record.getMessage() for record in caplog.records if "--avoid" in record.getMessage()]
    assert "{name}" in copied and "{name}" not in plain
    assert len(warnings) == 1 and "line 2" in warnings[0] and "'{name}'" in warnings[0]
    caplog.clear()
    model.translate([nmtkit.Request(line, avoided=["e", " All "]) for line in REAL_LINES], **SHORT)
    assert not [record for record in caplog.records if "--avoid" in record.getMessage()]
