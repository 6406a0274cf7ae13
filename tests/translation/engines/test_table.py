"""A table of engines and options: each cell is the expected result, or an error that names the option.

A new engine needs a column, and a new option of a search, a text, a model or a request needs a row. The expected
result is the result of the plain modules of PyTorch, which must agree with a beam search in plain loops.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import fragments, save_ending_transformer, tiny_transformer
from click.testing import CliRunner

import nmtkit
from nmtkit.cli import main
from nmtkit.config.plugins import is_own
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint, to_checkpoint, vocabulary_of
from nmtkit.translation.engines import AUTO, ENGINES
from nmtkit.translation.engines.engine import NOT_COMPILED
from nmtkit.translation.lines import as_object
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.shortlist import Shortlist
from nmtkit.translation.search.types import Request, Translation

LINES = [*fragments()[::5], "", "The EQUAL {name} <b>of human</b> rights. No one http://a.b/c 12!"]
BASE = {"beam": 3, "nbest": 1, "lenpen": 0.0, "max_len_a": 0.0, "max_len_b": 8}
LANGUAGES = ("en", "de", "it")
TOLERANCE = {"ctranslate2": 0.05}  # of numbers; the distributions of CTranslate2 leave out <unk>


@dataclasses.dataclass(frozen=True)
class Row:
    """The settings of a row. `changes` says whether the settings change the result."""

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    request: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of each request
    load: dict[str, Any] = dataclasses.field(default_factory=dict)  # settings of the model
    languages: bool = False  # whether the model has several languages
    by_hand: bool = False  # whether `expected_hypotheses` supports the settings
    changes: bool = True


SAMPLING = {"sampling": True, "beam": 4, "nbest": 3}
ROWS = {
    "beam": Row({"beam": 1}, by_hand=True, changes=False),
    "nbest": Row({"nbest": 3}, by_hand=True),
    "lenpen": Row({"lenpen": 1.0}, by_hand=True),
    "lenpen below 0": Row({"lenpen": -0.7}, by_hand=True),
    "max_len_a": Row({"max_len_a": 0.1, "max_len_b": 0}, by_hand=True),
    "max_len_b": Row({"max_len_b": 2}, by_hand=True),
    "min_len": Row({"min_len": 6}, by_hand=True),
    "no_repeat_ngram": Row({"no_repeat_ngram": 1, "min_len": 7}, by_hand=True),
    "keep_loops": Row({"keep_loops": True, "min_len": 20, "max_len_b": 20}, by_hand=True),
    "unkpen": Row({"unkpen": 0.0, "min_len": 7}, by_hand=True),
    "diverse_groups": Row({"beam": 4, "nbest": 4, "diverse_groups": 2}),
    "diversity": Row({"beam": 4, "nbest": 4, "diverse_groups": 4, "diversity": 3.0}),
    "sampling": Row(SAMPLING),
    "temperature": Row(SAMPLING | {"temperature": 2.0}),
    "top_k": Row(SAMPLING | {"top_k": 4}),
    "top_p": Row(SAMPLING | {"top_p": 0.7}),
    "seed": Row(SAMPLING | {"seed": 9}),
    "shortlist": Row({"shortlist": True}),
    "logits_processors": Row({"logits_processors": ["lm_fusion"], "lm": "lm.pt", "lm_weight": 2.0}),
    "mbr": Row({"beam": 4, "nbest": 4, "mbr": "chrf"}),
    "mbr of samples": Row(SAMPLING | {"mbr": "bleu"}),
    "alignment": Row({"alignment": "soft"}),
    "alignment of pieces": Row({"alignment": "hard"}),
    "alignment of words": Row({"alignment": "words"}),
    "quality": Row({"quality": True}),
    "replace_unknown": Row({"replace_unknown": True}, changes=False),
    "source_lang": Row({"source_lang": "de", "target_lang": "en"}, languages=True),
    "target_lang": Row({"source_lang": "en", "target_lang": "it"}, languages=True),
    "pivot": Row({"source_lang": "en", "target_lang": "it", "pivot": "de"}, languages=True),
    "prefix": Row(request={"prefix": "born free"}),
    "prefix with a space": Row(request={"prefix": "born "}),
    "avoided": Row(request={"avoided": ["e", "al"]}),
    "required": Row(request={"required": ["free"]}),
    "ordered_constraints": Row({"ordered_constraints": True}, {"required": ["free", "All"]}),
    "reference": Row(request={"reference": "born free"}),
    "split_sentences": Row({"split_sentences": "en"}),
    "markup": Row({"markup": "html"}),
    "truecase_caps": Row({"truecase_caps": True}, changes=False),
    "protect_spans": Row({"protect_spans": True}),
    "protect": Row({"protect": [r"\{name\}"]}),
    "glossary": Row({"glossary": "terms.tsv"}),
    "max_source_len": Row(load={"max_source_len": 5}),
    "long_lines": Row(load={"max_source_len": 5, "long_lines": "cut"}),
    "max_tokens": Row(load={"max_tokens": 40}, changes=False),
    "ensemble": Row(load={"paths": ("model.pt", "second.pt")}),
}  # fmt: skip
# Options without a row, and the place of their tests.
ELSEWHERE = {
    "processor_configs": "the row of logits_processors",
    "score_reference": "the row of reference",
    "source": "every row",
    "ids": "test_generate.py: a dataset gives the translations of its text",
    "engine": "the columns",
    "precision": "test_numba_engine.py, test_translator.py: each precision has its own results",
    "device": "the tests of slots on a GPU",
    "threads": "test_numba_engine.py: several threads",
}
# The rows that are errors, by engine. In all other cells, the result is the result of PyTorch.
OTHER_SEARCHES = {"nbest", "lenpen", "lenpen below 0", "min_len", "no_repeat_ngram", "unkpen", "diverse_groups"}
OTHER_SEARCHES |= {"diversity", "sampling", "temperature", "top_k", "top_p", "seed", "shortlist", "logits_processors"}
OTHER_SEARCHES |= {"keep_loops", "mbr", "mbr of samples"}
ERRORS = {
    AUTO: set(),
    "torch": set(),
    "slots": set(),
    "numba": set(),
    "ctranslate2": OTHER_SEARCHES | {"ensemble", "source_lang", "target_lang", "pivot"},
}


def test_every_engine_has_a_column_and_every_option_a_row() -> None:
    own = {name for name in ENGINES.names() if is_own(ENGINES[name].factory)}
    assert set(ERRORS) == {AUTO, *own}
    configs: tuple[Any, ...] = (SearchOptions, TextOptions, TranslatorOptions, DeviceOptions, Request)
    options = {field.name for config in configs for field in dataclasses.fields(config)}
    assert options == options & {*ROWS, *ELSEWHERE}, "add a row for the new option"
    assert set().union(*ERRORS.values()) <= set(ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, a second model, a model of several languages, a language model and a glossary."""
    folder = tmp_path_factory.mktemp("table")
    for name in ("model", "second"):
        save_ending_transformer(folder / f"{name}.pt", **({"d_ff": 40} if name == "second" else {}))
    save_ending_transformer(folder / "languages.pt", languages=LANGUAGES)
    contents = checkpoint.load(folder / "model.pt")
    tokenizer = from_checkpoint(folder / "model.pt")[1]
    size, piece = tokenizer.target_size, np.array([5])
    shortlist = Shortlist.from_entries(piece, piece, np.arange(0, size, 2), size, size).state()
    checkpoint_file.save(folder / "model.pt", contents | {"shortlist": shortlist})
    lm = tiny_transformer(vocabulary_of(tokenizer), encoder_layers=0, sharpness=4.0)
    checkpoint_file.save(folder / "lm.pt", to_checkpoint(lm, "transformer_lm_tiny", lm.config, tokenizer, [], 1))
    (folder / "terms.tsv").write_text("equal\tfree|spirit\nrights\tborn\n")
    return folder


@pytest.fixture(params=[AUTO, *ENGINES.names()])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param in ("numba", "ctranslate2"):
        pytest.importorskip(request.param)
    return request.param


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> str:
    if request.param == "split_sentences":
        pytest.importorskip("sentencex")
    return request.param


@functools.cache
def loaded(folder: Path, engine: str | None, row: str) -> nmtkit.Model:
    """Loads the model of a row with an engine, or with the plain modules of PyTorch."""
    settings = dict(ROWS[row].load)
    names = settings.pop("paths", ("languages.pt",) if ROWS[row].languages else ("model.pt",))
    settings |= {"trainable": True} if engine is None else {"engine": engine}
    return nmtkit.load([folder / name for name in names], device="cpu", **settings)


def kept(folder: Path, engine: str | None, row: str) -> nmtkit.Model:
    """Returns a model that rows with the same settings of the model share."""
    same = (
        name for name, other in ROWS.items() if (other.load, other.languages) == (ROWS[row].load, ROWS[row].languages)
    )
    return loaded(folder, engine, next(same))


def requests_of(row: str) -> list[Request]:
    return [Request(line, **ROWS[row].request) for line in LINES]


def settings_of(folder: Path, row: str) -> dict[str, Any]:
    files = {name: folder / name for name in ("lm.pt", "terms.tsv")}
    return BASE | {
        name: files.get(value, value) if isinstance(value, str) else value for name, value in ROWS[row].settings.items()
    }


def translated(model: nmtkit.Model, folder: Path, row: str) -> list[Any]:
    """Returns the results of a row as JSON: translations, or the log probabilities of references."""
    if "reference" in ROWS[row].request:
        return model.score(LINES, [ROWS[row].request["reference"]] * len(LINES))
    found: list[Translation] = model.translate(requests_of(row), **settings_of(folder, row))
    return [json.loads(json.dumps(as_object(each), default=dataclasses.asdict)) for each in found]


@functools.cache
def expected(folder: Path, row: str) -> list[Any]:
    return translated(kept(folder, None, row), folder, row)


@functools.cache
def unchanged(folder: Path, languages: bool) -> list[Any]:
    """Returns the results without the settings of a row."""
    options = BASE | ({"source_lang": "en", "target_lang": "de"} if languages else {})
    model = loaded(folder, None, "target_lang" if languages else "beam")
    return [json.loads(json.dumps(as_object(each))) for each in model.translate(LINES, **options)]


def assert_equal(found: Any, wanted: Any, tolerance: float, place: str = "") -> None:
    """Compares results. Numbers may differ by `tolerance`."""
    if isinstance(wanted, float) and isinstance(found, float):
        assert found == pytest.approx(wanted, abs=tolerance, rel=tolerance), place
    elif isinstance(wanted, dict | list) and type(found) is type(wanted):
        pairs = [(key, found.get(key), wanted.get(key)) for key in {*found, *wanted}] if isinstance(wanted, dict) else [
            (index, *pair) for index, pair in enumerate(zip(found, wanted, strict=True))
        ]  # fmt: skip
        for key, one, other in pairs:
            assert_equal(one, other, tolerance, f"{place}.{key}")
    else:
        assert found == wanted, place


@pytest.mark.slow
def test_a_cell_is_the_result_of_pytorch_or_an_error(
    folder: Path, engine: str, row: str, caplog: pytest.LogCaptureFixture
) -> None:
    if row in ERRORS[engine]:
        with pytest.raises(ValueError, match="|".join(names_of(row))):
            translated(kept(folder, engine, row), folder, row)
        return
    model = kept(folder, engine, row)
    decoder = model._translator.decoder
    decoder.told.clear()
    with caplog.at_level("INFO", "nmtkit"):
        found = translated(model, folder, row)
    assert_equal(found, expected(folder, row), TOLERANCE.get(engine, 2e-3))
    told = [record.getMessage() for record in caplog.records if "torch, because" in record.getMessage()]
    named = [*names_of(row), NOT_COMPILED]
    if ROWS[row].languages or {"prefix", "avoided"} & set(ROWS[row].request):
        named.append("--prefix")  # PyTorch searches segments with such constraints, or with the token of a language
    assert all(any(name in message for name in named) for message in told)


def names_of(row: str) -> list[str]:
    """Returns the flags of a row. An error must name a flag, and an error about an ensemble the number of models."""
    flags = [f"--{name.replace('_', '-')}" for name in (*ROWS[row].settings, *ROWS[row].load)]
    return ["one model"] if row == "ensemble" else flags


@pytest.mark.slow
def test_the_settings_of_a_row_change_the_result(folder: Path, row: str) -> None:
    if ROWS[row].changes and "reference" not in ROWS[row].request:
        assert expected(folder, row) != unchanged(folder, ROWS[row].languages)


def typed(folder: Path, row: str, tmp_path: Path) -> list[str]:
    """Returns the flags of `generate` for a row, without default values. Each field of the requests has a file."""
    words: list[str] = []
    for name, value in (settings_of(folder, row) | ROWS[row].load).items():
        if name == "paths" or value == getattr(SearchOptions(), name, None):
            continue
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        words += [flag] if value is True else [word for each in values for word in (flag, str(each))]
    fields = {"required": "--constraints", "avoided": "--avoid", "prefix": "--prefix", "reference": "--reference"}
    for field, value in ROWS[row].request.items():
        file = tmp_path / field
        text = "\t".join(value) if isinstance(value, list) else value
        file.write_text(f"{text}\n" * len(LINES))
        words += [fields[field], str(file)]
    if "--reference" in words:
        return [*words[len(words) - 2 :], "--score-reference", "--lenpen", "0"]
    return words


@pytest.mark.slow
def test_a_cell_of_the_command_line_is_the_result_of_python(
    folder: Path, engine: str, row: str, tmp_path: Path
) -> None:
    names = ROWS[row].load.get("paths", ("languages.pt",) if ROWS[row].languages else ("model.pt",))
    words = ["generate", "--engine", engine, "--device", "cpu", "--format", "jsonl"]
    words += [word for name in names for word in ("--path", str(folder / name))]
    source = tmp_path / "source"
    source.write_text("".join(f"{line}\n" for line in LINES))
    result = CliRunner().invoke(main, [*words, "--input", str(source), *typed(folder, row, tmp_path)])
    if row in ERRORS[engine] or (row == "reference" and engine == "ctranslate2"):  # --engine would have no effect
        named = "--score-reference", *names_of(row)
        assert result.exit_code == 2 and any(name in result.stderr for name in named), result.stderr
        return
    assert result.exit_code == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    if row == "reference":
        found = [each["hypotheses"][0]["log_probability"] for each in found]
    assert_equal(found, expected(folder, row), TOLERANCE.get(engine, 2e-3))


# --- an independent search --------------------------------------------------------------------------------------------


def expected_hypotheses(
    next_log_probabilities: Callable[[Sequence[int]], Sequence[float]], source: int, options: SearchOptions
) -> list[tuple[list[int], float]]:
    """Returns the best outputs of a beam search and their scores. `source` is the number of pieces of the source."""
    longest = max(options.min_len, int(options.max_len_a * source + options.max_len_b))
    penalty = [((5 + length) / 6) ** options.lenpen for length in range(longest + 3)]
    hypotheses: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    while hypotheses:
        continuations = []
        for log_probability, tokens in hypotheses:
            for token, gain in enumerate(next_log_probabilities(tokens)):
                n = options.no_repeat_ngram
                ngram = [*tokens, token][-n:] if n else []
                repeated = n and any(tokens[start : start + n] == ngram for start in range(len(tokens) - n + 1))
                short, full = len(tokens) < options.min_len, len(tokens) >= longest
                if token == BOS or (token == EOS and short) or (token != EOS and full) or repeated:
                    continue
                if token == UNK:
                    if options.unkpen is None:
                        continue
                    gain -= options.unkpen
                continuations.append((log_probability + gain, [*tokens, token]))
        continuations.sort(key=lambda pair: -pair[0])
        for rank, (log_probability, tokens) in enumerate(continuations[: 2 * options.beam]):
            if tokens[-1] == EOS and rank < options.beam:
                finished.append((log_probability / penalty[len(tokens)], tokens[:-1]))
        finished = sorted(finished, key=lambda pair: -pair[0])[: options.nbest]
        remaining = [pair for pair in continuations[: 2 * options.beam] if pair[1][-1] != EOS][: options.beam]
        threshold = finished[-1][0] if len(finished) == options.nbest else -math.inf
        best = max((log_probability for log_probability, _ in remaining), default=-math.inf)
        length = len(remaining[0][1]) + 1 if remaining else 0
        within_reach = best / max(penalty[min(length, longest + 1)], penalty[longest + 1]) > threshold
        greedy_is_over = options.beam == 1 and bool(finished)
        hypotheses = remaining if within_reach and not greedy_is_over else []
    return [(tokens, score) for score, tokens in finished]


@pytest.mark.slow
@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row.by_hand])
def test_the_search_of_pytorch_finds_the_hypotheses_of_plain_loops(folder: Path, row: str) -> None:
    model, options = kept(folder, None, row), SearchOptions(**BASE | ROWS[row].settings)
    module = model.architectures[0]
    for line, translation in zip(LINES[:4], expected(folder, row), strict=False):
        source = model.tokenizer.encode_source([line]).ids.tolist()

        @functools.cache
        def table(tokens: tuple[int, ...], source: list[int] = source) -> list[float]:
            with torch.no_grad():
                features = module(Packed.from_lists([source]), Packed.from_lists([[BOS, *tokens]]))
                return module.output_projection(features[-1]).double().log_softmax(-1).tolist()

        wanted = expected_hypotheses(lambda tokens: table(tuple(tokens)), len(source) - 1, options)
        pieces = [each["pieces"] for each in translation["hypotheses"]]
        assert pieces == [model.tokenizer.target_pieces(tokens) for tokens, _ in wanted]
        scores = [each["score"] for each in translation["hypotheses"]]
        assert scores == pytest.approx([score for _, score in wanted], abs=1e-3)
