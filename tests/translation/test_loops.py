"""Loops: lines whose translation repeats a text again and again are decoded again, in every engine and interface."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders import REAL_LINES, save_transformer, tiny_tokenizer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.data.tokenizers.tokenizer import EOS, UNK
from nmtkit.translation.search.constraints import Constraints
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.rules import LONGEST_RUN, is_loop, longest_run
from nmtkit.translation.search.types import Request, Segment, Translation

LINES = [*REAL_LINES, "", "right to life"]
SHORT = {"max_len_a": 0.0, "max_len_b": 24, "beam": 2}
FLAGS = ["--max-len-a", "0", "--max-len-b", "24", "--beam", "2"]


def run_in_plain_loops(text: str) -> int:
    """Returns the largest k such that a text stands k times in direct succession, or 1."""
    best = 1
    for start in range(len(text)):
        for size in range(1, len(text) - start + 1):
            count = 1
            while text[start + count * size :].startswith(text[start : start + size]):
                count += 1
            best = max(best, count)
    return best


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the path of a model with random weights, whose outputs are often loops."""
    return save_transformer(tmp_path_factory.mktemp("model") / "model.pt", languages=("en", "it", "de"))


@pytest.fixture(scope="module")
def plain_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_transformer(tmp_path_factory.mktemp("model") / "model.pt")


def test_the_longest_run_is_the_run_of_plain_loops() -> None:
    rng = random.Random(5)
    texts = ["", "a", "abab", "aabaab", "ab" * 40, "aaaab" * 6, "xyzxyzxy"]
    texts += ["".join(rng.choices("ab", k=rng.randint(1, 24))) for _ in range(300)]
    texts += ["".join(rng.choices("ab", k=3)) * rng.randint(1, 5) + "b" * rng.randint(0, 5) for _ in range(100)]
    assert [longest_run(text) for text in texts] == list(map(run_in_plain_loops, texts))
    assert [longest_run(text, 3) for text in texts] == [max(3, run_in_plain_loops(text)) for text in texts]


@pytest.mark.parametrize(
    ("source", "output", "prefix", "loop"),
    [
        ("a dog runs", "a dog a dog a dog", "", False),
        ("a dog runs", "a dog a dog a dog a dog", "", True),
        ("dog dog dog dog", "cat cat cat cat", "", False),  # the source repeats, too
        ("dog dog dog dog", "cat cat cat cat cat", "", True),
        ("a dog runs. a dog runs. a dog runs. a dog runs.", "cat. cat. cat. cat.", "", False),
        ("ha", "ha ha ha ha ha", "ha ha ha ha ha", False),  # the user wants the repetition
        ("ha", "ha ha ha ha ha ha", "ha ha ha ha ha", True),
        ("犬", "犬犬犬犬", "", True),
        ("犬犬犬犬", "猫猫猫猫", "", False),
        ("😀😀😀😀😀", "😀😀😀😀😀", "", False),
        ("0", "2000000", "", False),  # a number may be written in another way
        ("1 trillion", "1.000.000.000.000", "", False),
        ("1 trillion", "1 000 000 000 000", "", False),
        ("10 hoch 20", "1" + "0" * 20, "", False),
        ("0", "2" + "0" * 40, "", True),
        ("1, 2, 3", "1, 1, 1, 1, 1, 1, 1", "", True),
        ("0 1", "0 0 0 0 0", "", True),
        ("0.0.0.0 is an address", "0.0.0.0. ist eine Adresse", "", False),
        ("1 2 1 2 1 2 1 2", "1-2-1-2-1-2-1-2-", "", False),
        ("ff:ff:ff:ff:ff:ff", "ff:ff:ff:ff:ff:ff.", "", False),
        ("0:0:0:0:0:0:0:1", "0:0:0:0:0:0:0:1", "", False),
        ("0x00000000", "0x00000000", "", False),
        ("Introduction ........ 5", "Einleitung ............... 5", "", False),
        ("Introduction . . . . 5", "Einleitung ....... 5", "", False),
        ("Introduction … 5", "Einleitung .... 5", "", False),
        ("Introduction .... 5", "Einleitung " + "." * 60, "", True),
        ("Introduction .... 5", "Einleitung .... 5 dog dog dog dog", "", True),
        ("a -- b", "a ---- b", "", False),
        ("=====", "=====", "", False),
        ("| - | - | - | - |", "|-|-|-|-|-|", "", False),
        ("Name: ________", "Nome: __________", "", False),
        ("Hello!", "Hallo!!!!", "", True),
        ("Hello", "Hallo , , , , ,", "", True),
        ("😀", "😀😀😀😀", "", True),
        ("No, no, no, no", "nein nein nein nein", "", False),
        ("very, very, VERY, very good", "sehr sehr sehr sehr gut", "", False),
        ("hahahaha", "ha ha ha ha", "", False),
        ("哈哈哈哈", "ha ha ha ha", "", False),
        ("ฮ่าฮ่าฮ่าฮ่า", "哈哈哈哈", "", False),
        ("very good", "sehr sehr sehr sehr gut", "", True),
        ("", "", "", False),
    ],
)
def test_a_loop_repeats_more_often_than_three_times_the_source_and_the_prefix(source, output, prefix, loop) -> None:
    tokenizer = tiny_tokenizer()
    target, start = (tokenizer.encode_target([text]).ids[:-1].tolist() for text in (output, prefix))
    segment = Segment(tokenizer.encode_source([source]).ids.tolist(), Constraints(prefix=tuple(start)))
    assert is_loop(target, segment, tokenizer) == loop


def test_unknown_words_are_not_equal() -> None:
    segment = Segment([7, EOS])
    assert not is_loop([UNK] * 9, segment, tiny_tokenizer())
    assert is_loop([UNK, 7] * 2 + [7] * 4, segment, tiny_tokenizer())


def looping(lines: Sequence[Translation], path: Path) -> list[bool]:
    """Returns whether each line has a run of more than 3 pieces, and more than the words of its source."""
    return [
        (run := run_in_plain_loops("".join(map(chr, line.hypotheses[0].tokens)))) > 3
        and run > run_in_plain_loops("".join(filter(str.isalnum, line.source.lower())))
        for line in lines
    ]


@pytest.mark.parametrize("engine", ["torch", "numba", "slots", "ctranslate2"])
def test_every_engine_decodes_exactly_the_loops_again(plain_path: Path, engine: str) -> None:
    pytest.importorskip("numba" if engine == "numba" else "ctranslate2" if engine == "ctranslate2" else "torch")
    settings = SHORT | {"lenpen": 0.0, **({"nbest": 2} if engine != "ctranslate2" else {})}
    nbest = {"nbest": settings.pop("nbest", 1)}
    torch = nmtkit.load(plain_path, engine="torch", device="cpu")
    first = torch.translate(LINES, keep_loops=True, **settings, **nbest)
    second = torch.translate(LINES, no_repeat_ngram=3, **settings, **nbest)
    loops = looping(first, plain_path)
    assert 3 <= sum(loops) < len(LINES)
    model = nmtkit.load(plain_path, engine=engine, device="cpu")
    found = model._translator.translate(LINES, **settings, **({} if engine == "ctranslate2" else nbest))
    assert [line.decoded_again for line in found] == loops
    for line, own, again, loop in zip(found, first, second, loops, strict=True):
        expected = again if loop else own
        assert [each.text for each in line.hypotheses] == [each.text for each in expected.hypotheses]
        assert {each.no_repeat_ngram for each in line.hypotheses} == {LONGEST_RUN if loop else None}
    assert not any(looping(found, plain_path))


def test_samples_and_searches_without_repetitions_are_never_decoded_again(plain_path: Path) -> None:
    model = nmtkit.load(plain_path, engine="torch", device="cpu")
    for settings in ({"sampling": True, "temperature": 0.1}, {"no_repeat_ngram": 9, "beam": 2}, {"keep_loops": True}):
        lines = model.translate(LINES, nbest=1, **(SHORT | {"beam": 4} | settings))
        assert any(looping(lines, plain_path)) and not any(line.decoded_again for line in lines)
    for option in ({"sampling": True}, {"no_repeat_ngram": 2}, {"score_reference": True}):
        with pytest.raises(ValueError, match="--keep-loops"):
            SearchOptions(keep_loops=True, **option)


@pytest.mark.slow
def test_prefixes_and_constraints_hold_in_the_second_search(plain_path: Path) -> None:
    model = nmtkit.load(plain_path, engine="torch", device="cpu")
    first = model.translate(LINES, nbest=1, keep_loops=True, **SHORT)
    index = looping(first, plain_path).index(True)
    again = model.translate(LINES[index], nbest=1, **SHORT)
    assert again.decoded_again
    avoided = again.hypotheses[0].pieces[-1].replace("▁", " ")
    without = model.translate(Request(LINES[index], avoided=[avoided]), nbest=1, **SHORT)
    assert avoided not in f" {without.text} " and not any(looping([without], plain_path))
    begun = model.translate(Request(LINES[index], prefix="born born born born"), nbest=1, **SHORT)
    assert begun.text.startswith("born born born born")
    required = model.translate(Request(LINES[index], required=["free"]), nbest=1, **SHORT)
    assert "free" in required.text
    repeated = model.translate(Request(LINES[index], required=["free free free free free"]), nbest=1, **SHORT)
    assert "free free free free free" in repeated.text


@pytest.mark.slow
def test_the_command_counts_the_loops_once_and_marks_them(path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{line}\n" for line in LINES))
    languages = ["--source-lang", "it", "--target-lang", "de"]
    flags = ["generate", "--path", str(path), *languages, "--input", str(text), *FLAGS, "--format", "jsonl"]

    def generated(*more: str) -> tuple[list[tuple[str, int | None]], str]:
        result = CliRunner().invoke(main, [*flags, *more])
        assert result.exit_code == 0, result.stderr
        best = [json.loads(line)["hypotheses"][0] for line in result.stdout.splitlines()]
        return [(each["text"], each.get("no_repeat_ngram")) for each in best], " ".join(result.stderr.split())

    objects, messages = generated()
    loops = sum(again == LONGEST_RUN for _, again in objects)
    first = nmtkit.load(path).translate(LINES, nbest=1, source_lang="it", target_lang="de", keep_loops=True, **SHORT)
    assert loops == sum(looping(first, path)) > 0
    assert messages.count(f"{loops} of {len(LINES)} lines") == 1 and "--keep-loops" in messages
    kept, messages = generated("--keep-loops")
    assert "--keep-loops" not in messages and not any(again for _, again in kept)
    workers, messages = generated("--workers", "2")
    assert workers == objects and messages.count(f"{loops} of {len(LINES)} lines") == 1
    _, messages = generated("--output-dir", str(tmp_path / "shards"), "--shard-lines", "4")
    assert messages.count(f"{loops} of {len(LINES)} lines") == 1
    through, messages = generated("--pivot", "en")
    assert f"{sum(again == LONGEST_RUN for _, again in through)} of {len(LINES)} lines" in messages


@pytest.mark.slow
def test_a_loop_in_one_step_of_a_pivot_translation_marks_the_line(path: Path) -> None:
    model = nmtkit.load(path)
    through = model.translate(LINES, nbest=1, source_lang="it", target_lang="de", pivot="en", **SHORT)
    first = model.translate(LINES, nbest=1, source_lang="it", target_lang="en", **SHORT)
    second = model.translate([line.text for line in first], nbest=1, source_lang="en", target_lang="de", **SHORT)
    expected = [one.decoded_again or two.decoded_again for one, two in zip(first, second, strict=True)]
    assert [line.decoded_again for line in through] == expected and any(line.decoded_again for line in first)


def test_a_loop_in_one_part_of_a_line_marks_the_line(plain_path: Path) -> None:
    model = nmtkit.load(plain_path, engine="torch", device="cpu", max_source_len=6)
    assert model.translate(" ".join(LINES), nbest=1, **SHORT).decoded_again


def test_documents_are_decoded_again(plain_path: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("".join(f"<p>{line}</p>\n" for line in LINES))
    result = CliRunner().invoke(main, ["generate", "--path", str(plain_path), "--input", str(page), *FLAGS])
    assert result.exit_code == 0 and "--keep-loops" in result.stderr
    assert result.stdout.count("<p>") == len(LINES)
