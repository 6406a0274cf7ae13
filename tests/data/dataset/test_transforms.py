"""Transforms of training pairs equal plain Python on lists of words, and depend only on (seed, epoch, pair)."""

import hashlib
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from parallel_text import parallel_lines

from nmtkit.config import derive
from nmtkit.data.dataset.transform_pipeline import TransformPipeline
from nmtkit.data.dataset.transforms import TRANSFORMS, Transform
from nmtkit.data.tokenizers.spm_model import renumbered
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import EOS, Tokenizer
from nmtkit.text.encoded import Encoded

SOURCE, TARGET = parallel_lines(60)
PAIRS = np.arange(100, 160)


def pipeline(tokenizer: Tokenizer, *names: str, seed: int = 1, **settings: Any) -> TransformPipeline:
    chosen = []
    for name in names:
        entry = TRANSFORMS[name]
        own = {key: value for key, value in settings.items() if hasattr(entry.preset, key)}
        chosen.append((name, entry.factory(derive(entry.preset, own, "test"), tokenizer)))
    return TransformPipeline(chosen, tokenizer, seed)


def transformed(
    transforms: TransformPipeline,
    epoch: int = 0,
    source: list[str] = SOURCE,
    target: list[str] = TARGET,
    monolingual: bool = False,
) -> tuple[list[str], list[str]]:
    tokenizer = transforms.tokenizer
    encoded = tokenizer.encode_source(source), tokenizer.encode_target(target)
    sides = applied(transforms, epoch, PAIRS[: len(source)], *encoded, monolingual=monolingual)
    for side in sides:
        assert all(ids[-1] == EOS and (ids[:-1] != EOS).all() for ids in side.split())
    sources = [tokenizer.decode_source(ids.tolist()) for ids in sides[0].split()]
    return sources, [tokenizer.decode_target(ids.tolist()) for ids in sides[1].split()]


def applied(
    transforms: TransformPipeline, epoch: int, pairs: Any, source: Encoded, target: Encoded, monolingual: bool = False
) -> tuple[Encoded, Encoded]:
    return transforms(epoch, pairs, source, target, monolingual=np.full(len(pairs), monolingual))


def generator_of(name: str, pair: int, seed: int = 1, epoch: int = 0) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed} {epoch} {name}".encode(), digest_size=8).digest()
    return np.random.Generator(np.random.Philox(key=np.array([int.from_bytes(digest, "little"), pair], np.uint64)))


# --- the words, in plain Python ---------------------------------------------------------------------------------------


def with_language_tokens(model: bytes, *tokens: str) -> bytes:
    pieces = Tokenizer(model).source_pieces(range(Tokenizer(model).source_size))
    return renumbered(model, [*pieces, *tokens], control=tokens)


def dropped(words: list[str], draw: np.random.Generator) -> list[str]:
    kept = [word for word, number in zip(words, draw.random(len(words)), strict=True) if number >= 0.6]
    return kept or [words[draw.integers(len(words))]]


def blanked(words: list[str], draw: np.random.Generator) -> list[str]:
    return [" ⁇ " if number < 0.5 else word for word, number in zip(words, draw.random(len(words)), strict=True)]


def shuffled(words: list[str], draw: np.random.Generator) -> list[str]:
    keys = [index + 4 * number for index, number in enumerate(draw.random(len(words)).tolist())]
    return [words[index] for index in sorted(range(len(words)), key=keys.__getitem__)]


@pytest.mark.parametrize(
    ("name", "settings", "plain"),
    [
        ("word_dropout", {"word_dropout": 0.6}, dropped),
        ("word_blank", {"word_blank": 0.5}, blanked),
        ("word_shuffle", {}, shuffled),
    ],
)
def test_noise_of_words_is_that_of_plain_python(
    name: str,
    settings: dict[str, Any],
    plain: Callable[[list[str], np.random.Generator], list[str]],
    joint_tokenizer: Tokenizer,
) -> None:
    sources, targets = transformed(pipeline(joint_tokenizer, name, **settings))
    expected = [
        plain(line.split(" "), generator_of(name, pair)) for line, pair in zip(SOURCE, PAIRS.tolist(), strict=True)
    ]
    # a blank decodes to a sign between two spaces
    assert [line.split() for line in sources] == [" ".join(words).split() for words in expected]
    assert targets == TARGET
    assert sources != SOURCE


def test_a_shuffled_word_moves_at_most_k_places_and_a_dropped_sentence_keeps_a_word(
    joint_tokenizer: Tokenizer,
) -> None:
    line = " ".join("abcdefghijklmnopqrst")
    sources, _ = transformed(pipeline(joint_tokenizer, "word_shuffle"), source=[line] * 60)
    moves = [abs(position - line.split().index(word)) for it in sources for position, word in enumerate(it.split())]
    assert max(moves) == 3
    sources, _ = transformed(pipeline(joint_tokenizer, "word_dropout", word_dropout=0.98))
    assert all(sources)
    assert {len(line.split()) for line in sources} == {1, 2} or {len(line.split()) for line in sources} == {1}


def test_bpe_dropout_changes_pieces_and_no_text(separate_tokenizer: Tokenizer) -> None:
    transforms = pipeline(separate_tokenizer, "bpe_dropout", bpe_dropout=0.5)
    assert transformed(transforms) == (SOURCE, TARGET)
    source, target = separate_tokenizer.encode_source(SOURCE), separate_tokenizer.encode_target(TARGET)
    made = applied(transforms, 0, PAIRS, source, target)
    assert len(made[0].ids) > len(source.ids) and len(made[1].ids) > len(target.ids)


def test_casing_changes_shares_of_pairs(joint_tokenizer: Tokenizer) -> None:
    settings = {"casing_lower": 0.2, "casing_upper": 0.3, "casing_title": 0.1}
    lines = ["Der Hund sieht McDonald"] * 60
    sources, targets = transformed(pipeline(joint_tokenizer, "casing", **settings), source=lines, target=lines)
    assert sources == targets
    kinds = [lines[0], lines[0].lower(), lines[0].upper(), "Der Hund Sieht McDonald"]
    counts = [sources.count(kind) for kind in kinds]
    assert sum(counts) == 60
    for count, share in zip(counts, (0.4, 0.2, 0.3, 0.1), strict=True):
        assert abs(count - 60 * share) < 3 * (60 * share * (1 - share)) ** 0.5
    one = pipeline(joint_tokenizer, "casing", casing_sides="source", **settings)
    assert transformed(one, source=lines, target=lines) == (sources, lines)


def test_text_that_stays_keeps_its_pieces(joint_tokenizer: Tokenizer) -> None:
    source, target = joint_tokenizer.encode_source(SOURCE), joint_tokenizer.encode_target(TARGET)
    segmented = applied(pipeline(joint_tokenizer, "bpe_dropout", bpe_dropout=0.5), 0, PAIRS, source, target)
    only_upper = {"casing_lower": 0.0, "casing_title": 0.0, "casing_upper": 0.5}
    transforms = pipeline(joint_tokenizer, "bpe_dropout", "casing", bpe_dropout=0.5, **only_upper)
    both = applied(transforms, 0, PAIRS, source, target)
    same = [(a == b).all() for a, b in zip(segmented[0].split(), both[0].split(), strict=True) if len(a) == len(b)]
    assert 15 < sum(same) < 45


def by_type(before: str, after: str) -> str:
    """Names the single typing error that turns one word into another."""
    if sorted(before) == sorted(after) and before != after:
        at = next(i for i in range(len(before)) if before[i] != after[i])
        return "swap" if before[:at] + before[at + 1] + before[at] + before[at + 2 :] == after else "?"
    if any(before[:at] + before[at + 1 :] == after for at in range(len(before))):
        return "missing"
    if any(before[:at] + before[at] + before[at:] == after for at in range(len(before))):
        return "repeated"
    rows = "qwertyuiop asdfghjkl zxcvbnm"
    changed = [(a.lower(), b.lower()) for a, b in zip(before, after, strict=False) if a != b]
    near = len(before) == len(after) and len(changed) == 1
    return "neighbour" if near and ("".join(changed[0]) in rows or "".join(changed[0])[::-1] in rows) else "?"


def test_typos_change_a_share_of_the_sources_by_single_errors_of_each_kind(joint_tokenizer: Tokenizer) -> None:
    lines = ["Der kleine Hund sieht Maria"] * 60
    once = pipeline(joint_tokenizer, "typos", typos=0.5, typos_words=0.001)  # nearly always a single word
    kinds: dict[str, int] = {}
    changed = 0
    for epoch in range(20):
        sources, targets = transformed(once, epoch, lines, lines)
        assert targets == lines
        for line in sources:
            if line == lines[0]:
                continue
            changed += 1
            words, wrong = lines[0].split(), line.split()
            if len(wrong) == 4:
                kind = "space" if line.replace(" ", "") == lines[0].replace(" ", "") else "two errors"
            else:
                kind = " ".join(by_type(a, b) for a, b in zip(words, wrong, strict=True) if a != b)
            kinds[kind] = kinds.get(kind, 0) + 1
    assert 400 < changed < 600  # of 1,200, less the errors that change nothing, such as a swap at the end of a word
    single = {kind: count for kind, count in kinds.items() if " " not in kind}
    assert set(single) == {"swap", "missing", "repeated", "neighbour", "space"} and min(single.values()) > 40
    assert sum(single.values()) > 0.9 * changed


def test_lines_of_noise_are_the_same_on_both_sides_and_of_one_script(joint_tokenizer: Tokenizer) -> None:
    transforms = pipeline(joint_tokenizer, "noise_lines", noise_lines=0.5)
    noise = [
        (source, target)
        for epoch in range(5)
        for before, source, target in zip(SOURCE, *transformed(transforms, epoch), strict=True)
        if source != before
    ]
    assert 110 < len(noise) < 190 and all(source == target for source, target in noise)
    scripts = set()
    for source, _ in noise:
        assert 2 <= len(source.split()) <= 5 and all(len(word) <= 4 for word in source.split())
        names = {unicodedata.name(letter).split()[0] for letter in source.replace(" ", "")}
        assert len(names) == 1
        scripts |= names
    assert scripts == {"LATIN", "GREEK", "CYRILLIC", "HEBREW", "HIRAGANA", "CJK"}


def test_the_end_punctuation_of_both_sides_is_removed_from_a_share_of_the_pairs(joint_tokenizer: Tokenizer) -> None:
    transforms = pipeline(joint_tokenizer, "end_punctuation", end_punctuation=0.5)
    sources, targets = transformed(transforms, source=["Ein Hund."] * 60, target=["a dog ?!"] * 60)
    pairs = list(zip(sources, targets, strict=True))
    assert set(pairs) == {("Ein Hund.", "a dog ?!"), ("Ein Hund", "a dog")} and 15 < pairs.count(pairs[0]) < 45
    for source, target in (("Ein Hund", "a dog."), ("Ein Hund.", "a dog"), ("...", "..."), ("", "")):
        assert transformed(transforms, source=[source] * 60, target=[target] * 60) == ([source] * 60, [target] * 60)


# --- tags -------------------------------------------------------------------------------------------------------------


def test_tags_stay_at_the_beginning_and_whole(joint_tokenizer: Tokenizer) -> None:
    tagged = [f"<2de> {line}" for line in SOURCE]
    noise = ("casing", "word_dropout", "word_shuffle", "word_blank", "bpe_dropout")
    settings = {"word_dropout": 0.5, "word_blank": 0.5, "casing_upper": 0.8}
    plain, _ = transformed(pipeline(joint_tokenizer, *noise, **settings))
    sources, _ = transformed(pipeline(joint_tokenizer, *noise, **settings), source=tagged)
    assert [line.split() for line in sources] == [f"<2de> {line}".split() for line in plain]
    assert all(line.startswith("<2de> ") for line in sources) and sources != tagged
    added, _ = transformed(pipeline(joint_tokenizer, "tag", *noise, tag_symbol="<2de>", **settings))
    assert added == sources


@pytest.mark.parametrize("name", ["tag", "span_masking"])
def test_the_tags_of_a_dataset_come_first_whatever_transform_is_last(name: str) -> None:
    tokenizer = Tokenizer(train_model([*SOURCE, *TARGET], 400, tags=["<2de>", "<mask>", "<old>"]))
    settings = {"tag_symbol": "<old>", "mask_share": 0.9, "word_blank": 1e-9}
    tagged = [f"<2de> {line}" for line in SOURCE]
    last, before_another = (
        transformed(pipeline(tokenizer, *names, **settings), source=tagged, monolingual=True)[0]
        for names in ([name], [name, "word_blank"])
    )
    assert before_another == last and all(line.startswith("<2de> ") for line in last)
    assert sum(line.startswith(("<2de> <old>", "<2de> <mask>")) for line in last) > 20


def test_a_share_of_pairs_gets_the_tag(joint_tokenizer: Tokenizer) -> None:
    sources, targets = transformed(pipeline(joint_tokenizer, "tag", tag_symbol="<2de>", tag_share=0.5))
    tagged = [line.startswith("<2de> ") for line in sources]
    assert 15 < sum(tagged) < 45
    assert [line.removeprefix("<2de> ") for line in sources] == SOURCE
    assert targets == TARGET


# --- denoising --------------------------------------------------------------------------------------------------------


def test_spans_of_words_are_masked_in_monolingual_pairs(joint_tokenizer: Tokenizer) -> None:
    sources, targets = transformed(
        pipeline(joint_tokenizer, "span_masking"), source=SOURCE, target=SOURCE, monolingual=True
    )
    assert targets == SOURCE
    total = masked = spans = 0
    for source, target in zip(sources, targets, strict=True):
        words, left = target.split(), source.replace("⁇", " ⁇ ").split()
        kept = [word for word in left if word != "⁇"]
        rest = iter(words)
        assert all(word in rest for word in kept)  # a subsequence
        assert len(words) - len(kept) in (int(0.35 * len(words)), int(0.35 * len(words)) + 1)
        total, masked, spans = total + len(words), masked + len(words) - len(kept), spans + left.count("⁇")
    assert masked / total == pytest.approx(0.35, abs=0.03)
    assert 1.5 < masked / spans < 3.5  # the last span of a line is cut off at the share of the line


def test_translations_and_language_tokens_are_not_masked() -> None:
    model = with_language_tokens(train_model([*SOURCE, *TARGET], 400), "__en__", "__de__")
    tokenizer = Tokenizer(model)
    english, german = tokenizer.languages["en"], tokenizer.languages["de"]
    source = tokenizer.encode_source(SOURCE).prepend(english)
    transforms = pipeline(tokenizer, "span_masking", mask_share=0.9)
    noised, restored = applied(transforms, 0, PAIRS, source, source, monolingual=True)
    assert restored.ids.tolist() == source.ids.tolist()
    assert all(ids[0] == english and english not in ids[1:] and 0 in ids for ids in noised.split())
    for target in (tokenizer.encode_target(TARGET).prepend(german), source):  # a translation may be equal by chance
        for side, before in zip(applied(transforms, 0, PAIRS, source, target), (source, target), strict=True):
            assert side.ids.tolist() == before.ids.tolist()


def test_the_mask_is_a_piece_of_its_own_if_the_vocabulary_has_one() -> None:
    tokenizer = Tokenizer(train_model([*SOURCE, *TARGET], 400, tags=["<mask>"]))
    for symbol, piece in ((None, "▁<mask>"), ("<unk>", "<unk>")):
        transforms = pipeline(tokenizer, "span_masking", mask_symbol=symbol)
        source, _ = applied(transforms, 0, PAIRS, *[tokenizer.encode_source(SOURCE)] * 2, monolingual=True)
        pieces = tokenizer.source_pieces(source.ids.tolist())
        assert pieces.count(piece) > 60 and {"▁<mask>", "<unk>"} & set(pieces) == {piece}


def test_sentences_of_a_line_are_permuted() -> None:
    line = "a man runs. two dogs sleep! a child plays"
    tokenizer = Tokenizer(train_model([line, *SOURCE], 400))
    transforms = pipeline(tokenizer, "span_masking", mask_permute=True, mask_share=0.001)
    found = {transformed(transforms, epoch, [line], [line], True)[0][0] for epoch in range(40)}
    orders = {" ".join(order) for order in permutations(["a man runs.", "two dogs sleep!", "a child plays"])}
    assert found <= orders and len(found) > 3


# --- several transforms ----------------------------------------------------------------------------------------------

HALF: dict[str, dict[str, Any]] = {  # settings with which each transform changes many pairs
    "casing": {"casing_lower": 0.0, "casing_title": 0.5, "casing_upper": 0.0},
    "typos": {"typos": 0.5},
    "end_punctuation": {"end_punctuation": 0.5},
    "noise_lines": {"noise_lines": 0.5},
    "word_dropout": {"word_dropout": 0.3},
    "word_blank": {"word_blank": 0.3},
    "word_shuffle": {},
    "span_masking": {"mask_share": 0.5},
    "tag": {"tag_symbol": "<2de>", "tag_share": 0.5},
    "bpe_dropout": {"bpe_dropout": 0.5},
}
TEXT_LEVEL = ("casing", "typos", "end_punctuation", "noise_lines")
LINES = [f"{line} ." for line in SOURCE] * 4


@cache
def changes(tokenizer: Tokenizer, *names: str, monolingual: bool = True) -> tuple[dict[str, float], list[list[int]]]:
    """Returns the share of pairs that each transform changes, and the ids of both sides after all transforms."""
    settings = {key: value for name in names for key, value in HALF[name].items()}
    transforms = pipeline(tokenizer, *names, **settings)
    counts = dict.fromkeys(names, 0)

    def counting(name: str, transform: Transform) -> None:
        inner = transform.transform

        def counted(source: Any, target: Any, generator: np.random.Generator) -> tuple[Any, Any]:
            made = inner(source, target, generator)
            counts[name] += not all(map(np.array_equal, made, (source, target)))
            return made

        transform.transform = counted  # type: ignore[method-assign]

    for name, transform in transforms.transforms:
        counting(name, transform)
    encoded = tokenizer.encode_source(LINES)
    made = applied(transforms, 0, np.arange(len(LINES)), encoded, encoded, monolingual)
    return {name: count / len(LINES) for name, count in counts.items()}, [side.ids.tolist() for side in made]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), list(permutations(HALF, 2)))
def test_each_transform_has_its_own_rate_before_and_after_each_other(
    first: str, second: str, joint_tokenizer: Tokenizer
) -> None:
    rates, ids = changes(joint_tokenizer, first, second)
    for name in (first, second):
        # half of the pairs are lines of noise without merges; and noise does nothing more often on fewer words
        fewer = 0.55 if "noise_lines" in (first, second) else 0.2
        alone = changes(joint_tokenizer, name)[0][name]
        assert alone - fewer < rates[name] < alone + 0.1 and rates[name] > 0.15
    if (first in TEXT_LEVEL) != (second in TEXT_LEVEL):  # text comes first, so the order on the command line is free
        assert changes(joint_tokenizer, second, first)[1] == ids


@pytest.mark.parametrize("other", [name for name in HALF if name != "span_masking"])
def test_only_monolingual_pairs_are_masked_before_and_after_each_other_transform(
    other: str, joint_tokenizer: Tokenizer
) -> None:
    for names in ((other, "span_masking"), ("span_masking", other)):
        assert changes(joint_tokenizer, *names)[0]["span_masking"] > 0.95
        assert changes(joint_tokenizer, *names, monolingual=False)[0]["span_masking"] == 0


def test_a_blank_is_a_word_for_the_noise_after_it(joint_tokenizer: Tokenizer) -> None:
    transforms = pipeline(joint_tokenizer, "word_blank", "word_dropout", word_blank=1.0, word_dropout=0.5)
    sources, _ = transformed(transforms, source=["a b c d e f g h i j"] * 60)
    assert sum(line.count("⁇") for line in sources) == pytest.approx(300, rel=0.15)


# --- the random numbers are those of (seed, epoch, pair) --------------------------------------------------------------

ALL = ("casing", "typos", "end_punctuation", "noise_lines", "word_dropout", "word_blank", "word_shuffle", "bpe_dropout")


def test_a_pair_is_transformed_alike_alone_in_any_batch_and_on_any_thread(joint_tokenizer: Tokenizer) -> None:
    transforms = pipeline(joint_tokenizer, *ALL)
    source, target = joint_tokenizer.encode_source(SOURCE), joint_tokenizer.encode_target(TARGET)
    together = [list(map(np.ndarray.tolist, side.split())) for side in applied(transforms, 3, PAIRS, source, target)]

    def alone(row: int) -> list[list[int]]:
        sides = (Encoded(side.split()[row], side.lengths[row : row + 1]) for side in (source, target))
        return [side.ids.tolist() for side in applied(transforms, 3, PAIRS[row : row + 1], *sides)]

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(alone, [*range(60)] * 3))
    assert results == [list(pair) for pair in zip(*together, strict=True)] * 3


def test_epoch_seed_and_pair_each_change_the_noise_and_other_transforms_do_not(joint_tokenizer: Tokenizer) -> None:
    once, _ = transformed(pipeline(joint_tokenizer, "word_shuffle"))
    assert transformed(pipeline(joint_tokenizer, "word_shuffle"))[0] == once
    assert transformed(pipeline(joint_tokenizer, "word_shuffle"), epoch=1)[0] != once
    assert transformed(pipeline(joint_tokenizer, "word_shuffle", seed=2))[0] != once
    repeated, _ = transformed(pipeline(joint_tokenizer, "word_shuffle"), source=[SOURCE[0]] * 60)
    assert len(set(repeated)) > 5
    assert transformed(pipeline(joint_tokenizer, "bpe_dropout", "word_shuffle"))[0] == once


def test_a_sentence_of_eos_alone_passes(joint_tokenizer: Tokenizer) -> None:
    sources, targets = transformed(pipeline(joint_tokenizer, *ALL), source=["", "a man"], target=["", ""])
    assert sources[0] == "" and sources[1] and targets == ["", ""]


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("tag", {}, "--transforms tag needs --tag-symbol"),
        ("tag", {"tag_symbol": "<3fr>"}, "no tag '<3fr>'"),
        ("word_blank", {"word_blank_symbol": "<blank>"}, "--word-blank-symbol <blank> is"),
        ("span_masking", {"mask_symbol": "<blank>"}, "--mask-symbol <blank> is"),
        ("casing", {"casing_lower": 0.7, "casing_upper": 0.4}, "add up to 1.15"),
        ("word_dropout", {"word_dropout": 1.0}, "--word-dropout"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    name: str, settings: dict[str, Any], said: str, joint_tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=said):
        pipeline(joint_tokenizer, name, **settings)


def test_text_needs_a_tokenizer_that_decodes_to_what_it_encoded() -> None:
    words = Tokenizer(train_model(SOURCE + TARGET, 30, "word"))
    with pytest.raises(ValueError, match=r"--transforms casing .*no byte fallback"):
        pipeline(words, "casing")
    assert pipeline(words, "word_dropout")


@pytest.mark.parametrize(
    ("level", "made", "said"),
    [
        ("ids", None, "mine returned a NoneType"),
        ("ids", ([3, 4], "text"), "mine returned a str"),
        ("ids", ([3, 4], [5, 340]), "ids from 5 to 340"),
        ("ids", ([3, EOS], [5]), "without bos"),
        ("text", ("a", 3), "returned a int"),
        ("text", ("a", "two\nlines"), "text of several lines"),
    ],
)
def test_what_a_transform_returns_is_checked(level: Any, made: Any, said: str, joint_tokenizer: Tokenizer) -> None:
    class Mine(Transform):
        def transform(self, source: Any, target: Any, generator: np.random.Generator) -> Any:
            return made

    mine = Mine()
    mine.level = level  # type: ignore[misc]
    with pytest.raises(ValueError, match=said):
        transformed(TransformPipeline([("mine", mine)], joint_tokenizer, 1))


def test_a_transform_may_return_lists(joint_tokenizer: Tokenizer) -> None:
    class Reversed(Transform):
        def transform(self, source: Any, target: Any, generator: np.random.Generator) -> Any:
            return source[::-1].tolist(), target

    source, target = joint_tokenizer.encode_source(SOURCE), joint_tokenizer.encode_target(TARGET)
    made, _ = applied(TransformPipeline([("reversed", Reversed())], joint_tokenizer, 1), 0, PAIRS, source, target)
    assert made.ids.tolist() == [token for ids in source.split() for token in [*ids[:-1][::-1].tolist(), EOS]]
