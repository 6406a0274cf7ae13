"""Measures `nmtkit clean` on a corpus with known noise: the share of pairs that are kept in each class, and the pace.

    python benchmarks/clean_quality.py multi30k/train.en.gz multi30k/train.de.gz --languages en de \\
        --other debian/en-da.train.tsv.gz
    python benchmarks/clean_quality.py debian/en-it.train.tsv.gz --languages en it --columns 4 5 --new-column 3 \\
        --other debian/en-da.train.tsv.gz
    python benchmarks/clean_quality.py multi30k/train.en.gz multi30k/train.de.gz --languages en de \\
        --other debian/en-da.train.tsv.gz --self-train --keep corpora \\
        --test multi30k/test_2016_flickr.en.gz multi30k/test_2016_flickr.de.gz

The noise has 15 classes, which are equally likely, and changes 46 % of the pairs. Pairs of the class `mendable` count
as good: they should be kept, and their text should be mended. All other classes are bad. Before the noise, pairs with
equal sides and pairs with a source of fewer than 3 words are left out. `--other` has lines of a third language. The
pace of a command counts the CPU time of the whole command, including its start and the fitting of filters.

`--opusfilter` also measures OpusFilter with its default limits: 11 filters, one of them Lingua, after the removal of
pairs that are equal except for case and punctuation.

`--keep` writes three texts into a folder: `noisy`, `cleaned` (with the last column of settings in the table) and
`clean`, which has the good pairs of `noisy` as they were before the noise. `--test` trains the same small Transformer
on each text, and reports BLEU. Finished trainings of the folder are used again.
"""

import argparse
import json
import pickle
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness import command, nmtkit

from nmtkit.cleaning.blocks import BlockScorer, StoredBlock
from nmtkit.cleaning.clean import PairSample, fit
from nmtkit.cleaning.config import DEFAULT_FILTERS, CleanConfig, filter_configs
from nmtkit.cleaning.filters import FILTERS, FilterContext
from nmtkit.data.corpora.corpus import Corpus, Pairs, locate
from nmtkit.data.corpora.pairs import pairs
from nmtkit.data.corpora.writer import CorpusWriter

Pair = tuple[str, str]
Preset = Literal["curated", "crawl"]
FINE = ("good", "mendable")
MENUS = (
    ("Home | News | About us | Contact | Login", "Start | Aktuell | Über uns | Kontakt | Login"),
    ("© 2019 Example Inc. All rights reserved.", "© 2019 Example Inc. All rights reserved."),
    ('<div class="nav"><a href="/index">Home</a></div>', '<div class="nav"><a href="/index">Start</a></div>'),
    ("Sign in » Register » Basket » Help", "Anmelden » Registrieren » Korb » Hilfe"),
)
TRAINING = [
    *("--arch", "transformer_tiny", "--encoder-layers", "3", "--decoder-layers", "3", "--batch-tokens", "2048"),
    *("--lr-scheduler", "polynomial", "--lr", "0.003", "--threads", "1"),
    *("--metrics", "none", "--save-interval", "none", "--validate-interval", "none"),
]


class Noise:
    """Adds noise to a good pair. `good` has all good pairs, and `foreign` has lines of a third language."""

    def __init__(self, good: list[Pair], foreign: list[str], seed: int) -> None:
        self.random = random.Random(seed)
        self.good, self.foreign = good, foreign
        self.words = [word for _, target in self.random.sample(good, min(2000, len(good))) for word in target.split()]

    def classes(self) -> dict[str, Callable[[str, str], Pair]]:
        names = ("copied", "swapped", "wrong_language", "misaligned", "truncated", "overlong", "shuffled_words",
                 "replaced_words", "near_duplicate", "duplicate", "numbers", "repeated", "boilerplate", "empty",
                 "mendable")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def copied(self, source: str, target: str) -> Pair:
        return (source, source) if self.random.random() < 0.5 else (target, target)

    def swapped(self, source: str, target: str) -> Pair:
        return target, source

    def wrong_language(self, source: str, target: str) -> Pair:
        foreign = self.random.choice(self.foreign)
        return (source, foreign) if self.random.random() < 0.5 else (foreign, target)

    def misaligned(self, source: str, target: str) -> Pair:
        return source, self.random.choice(self.good)[1]

    def truncated(self, source: str, target: str) -> Pair:
        words = target.split()
        return source, " ".join(words[: max(1, int(len(words) * self.random.uniform(0.2, 0.5)))])

    def overlong(self, source: str, target: str) -> Pair:
        return source, f"{target} {self.random.choice(self.good)[1]}"

    def shuffled_words(self, source: str, target: str) -> Pair:
        words = target.split()
        self.random.shuffle(words)
        return source, " ".join(words)

    def replaced_words(self, source: str, target: str) -> Pair:
        words = target.split()
        for index in self.random.sample(range(len(words)), (len(words) + 1) // 2):
            words[index] = self.random.choice(self.words)
        return source, " ".join(words)

    def duplicate(self, source: str, target: str) -> Pair:
        return source, target

    def near_duplicate(self, source: str, target: str) -> Pair:
        change = self.random.choice((str.upper, lambda text: text.rstrip(".") + "!", lambda text: f"- {text}"))
        return change(source), change(target)

    def numbers(self, source: str, target: str) -> Pair:
        first, second = self.random.sample(range(13, 9000), 2)
        return f"{source} ({first})", f"{target} ({second})"

    def repeated(self, source: str, target: str) -> Pair:
        words = target.split()
        start = self.random.randrange(max(1, len(words) - 2))
        return source, " ".join(words + words[start : start + 3] * self.random.randint(4, 8))

    def boilerplate(self, source: str, target: str) -> Pair:
        return self.random.choice(MENUS)

    def empty(self, source: str, target: str) -> Pair:
        return self.random.choice(((source, ""), ("", target), (source, "..."), ("-", target)))

    def mendable(self, source: str, target: str) -> Pair:
        def broken(text: str) -> str:
            choice = self.random.randrange(4)
            if choice == 0 and not text.isascii():
                return text.encode().decode("cp1252", "replace") if _is_cp1252(text) else text + "\u200b"
            return ("  ".join(text.split(" ")) if choice == 1 else text.replace(" ", " \u200b", 1) if choice == 2
                    else text.replace("'", "&#39;").replace('"', "&quot;") + " &amp;")  # fmt: skip

        return broken(source), broken(target)


def _is_cp1252(text: str) -> bool:
    try:
        text.encode().decode("cp1252")
    except UnicodeDecodeError:
        return False
    return True


@dataclass(frozen=True)
class Row:
    """A pair of the noisy corpus: its class, its text, and the good pair from which it was made."""

    name: str
    pair: Pair
    original: Pair


def noisy(good: list[Pair], foreign: list[str], seed: int, touched: float) -> list[Row]:
    """Adds noise to the fraction `touched` of the pairs. Duplicates come after the pair that they repeat."""
    noise = Noise(good, foreign, seed)
    classes = noise.classes()
    result: list[Row] = []
    clean_pairs: list[Pair] = []
    for source, target in good:
        name = noise.random.choice(list(classes)) if noise.random.random() < touched else "good"
        if name in ("duplicate", "near_duplicate"):
            if not clean_pairs:
                continue
            source, target = noise.random.choice(clean_pairs)
        pair = classes[name](source, target) if name != "good" else (source, target)
        if name in ("shuffled_words", "replaced_words", "truncated", "copied") and pair == (source, target):
            name = "good"
        if name == "good":
            clean_pairs.append(pair)
        result.append(Row(name, pair, (source, target)))
    return result


def write(
    path: str, languages: tuple[str, str], rows: list[Pair], extras: list[dict[str, object]] | None = None
) -> None:
    with CorpusWriter(path, languages) as writer:
        writer.write(Pairs([row[0] for row in rows], [row[1] for row in rows], extras or [{}] * len(rows)))


@dataclass
class Result:
    """The number of pairs that a system keeps in each class, and the pace of the whole command and of the scoring."""

    kept: Counter[str]
    pace: float  # pairs per second of CPU time
    scoring: float = 0  # pairs per second of CPU time, without start and fitting; 0: not measured


def rate(corpus: Corpus, config: CleanConfig, names: tuple[str, ...]) -> float:
    """Returns the number of pairs that one process mends and scores in a second of CPU time, after fitting."""
    context = FilterContext(config.source_lang, config.target_lang)
    presets = filter_configs(names, config.preset)
    filters = {name: FILTERS[name].factory(preset, context) for name, preset in presets.items()}
    sample = PairSample(config.sample, config.seed)
    for part in pairs(corpus):
        sample.add(list(zip(part.sources, part.targets, strict=True)))
    fit(filters, sample, True)
    with tempfile.TemporaryDirectory() as folder:
        worker = BlockScorer(list(filters.values()), True)
        seconds, count = 0.0, 0
        for index, part in enumerate(pairs(corpus, 4096)):
            path = Path(folder) / str(index)
            path.write_bytes(pickle.dumps(part))
            start = time.process_time()
            worker.score(StoredBlock(0, path))
            if index == 1:
                seconds, count = 0.0, 0  # the first block builds tables
            seconds += time.process_time() - start
            count += len(part)
    return count / seconds


def column(path: Path, languages: tuple[str, str], name: str) -> list[str]:
    return [str(others[name]) for part in pairs(locate(str(path), *languages)) for others in part.extras]


def run_clean(
    folder: Path,
    languages: tuple[str, str],
    filters: tuple[str, ...],
    preset: Preset,
    flags: list[str],
    count: int,
) -> tuple[Result, Counter[tuple[str, str]]]:
    """Cleans the corpus `noisy.jsonl` of a folder to `out.jsonl`.

    `count` is the number of pairs. Also returns the number of dropped pairs for each class and reason.
    """
    files = {name: folder / f"{name}.jsonl" for name in ("noisy", "out", "dropped")}
    source, target = languages
    finished = nmtkit(
        "clean", "-s", source, "-t", target, str(files["noisy"]), "--output", str(files["out"]), "--dropped",
        str(files["dropped"]), "--filters", ",".join(filters), "--preset", preset, "--workers", "1", *flags,
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    result = Result(Counter(column(files["out"], languages, "class")), count / finished.core_seconds)
    if not flags:
        config = CleanConfig(source_lang=source, target_lang=target, output="", filters=filters, preset=preset)
        result.scoring = rate(locate(str(files["noisy"]), *languages), config, filters)
    reasons = [column(files["dropped"], languages, name) for name in ("class", "reason")]
    return result, Counter(zip(*reasons, strict=True))


def run_opusfilter(executable: str, folder: Path, languages: tuple[str, str], rows: list[Row]) -> Result:
    """Filters the rows with OpusFilter, in one process."""
    write(str(folder / "in"), languages, [row.pair for row in rows])
    names = {name: [f"{name}.{language}" for language in languages] for name in ("in", "unique", "out")}
    filters = [
        *("LengthFilter", "LengthRatioFilter", "LongWordFilter", "HtmlTagFilter", "AlphabetRatioFilter"),
        {"CharacterScoreFilter": {"scripts": ["Latin", "Latin"]}}, {"LinguaFilter": {"languages": languages}},
        *("TerminalPunctuationFilter", "NonZeroNumeralsFilter", "SimilarityFilter", "RepetitionFilter"),
    ]  # fmt: skip
    unique = {"inputs": names["in"], "outputs": names["unique"], "lowercase": True, "letters_only": True}
    filtered = {
        "inputs": names["unique"], "outputs": names["out"],
        "filters": [each if isinstance(each, dict) else {each: {}} for each in filters],
    }  # fmt: skip
    steps = [{"type": "remove_duplicates", "parameters": unique}, {"type": "filter", "parameters": filtered}]
    config = {"common": {"output_directory": str(folder), "default_n_jobs": 1}, "steps": steps}
    (folder / "opusfilter.yaml").write_text(json.dumps(config))  # JSON is YAML
    finished = command([executable, str(folder / "opusfilter.yaml")], OMP_NUM_THREADS="1")
    sides = [(folder / name).read_text(encoding="utf-8").split("\n")[:-1] for name in names["out"]]
    kept = list(zip(*sides, strict=True))
    counts: Counter[str] = Counter()
    for row in rows:  # OpusFilter keeps the order of the rows, and keeps the first of several equal pairs
        if sum(counts.values()) < len(kept) and kept[sum(counts.values())] == tuple(map(str.rstrip, row.pair)):
            counts[row.name] += 1
    assert sum(counts.values()) == len(kept), "a kept pair of OpusFilter is not a pair of the text"
    return Result(counts, len(rows) / finished.core_seconds)


def texts(corpus: Corpus) -> list[Pair]:
    return [pair for part in pairs(corpus) for pair in zip(part.sources, part.targets, strict=True)]


def train(folder: Path, languages: tuple[str, str], test: Corpus, updates: int) -> None:
    """Trains a model on each of the texts `noisy`, `cleaned` and `clean` of a folder. Prints the BLEU of each model."""
    write(str(folder / "test"), languages, texts(test))
    source, target = (str(folder / f"test.{language}") for language in languages)
    bleu = {}
    print(f"\n| text | pairs | BLEU after {updates:,} updates |\n|---|---:|---:|")
    for name in ("noisy", "cleaned", "clean"):
        data, run = folder / f"data-{name}", folder / f"run-{name}-{updates}"
        if not data.exists():
            nmtkit("preprocess", "-s", languages[0], "-t", languages[1], "--trainpref", str(folder / name),
                   "--destdir", str(data), "--vocab-size", "4000", "--workers", "1")  # fmt: skip
        if not (run / "last.pt").exists():
            steps = ["--max-update", str(updates), "--warmup-updates", str(max(1, updates // 4))]
            nmtkit("train", str(data), *TRAINING, *steps, "--save-dir", str(run))
        output, score = run / "test.txt", run / "score.json"
        nmtkit("generate", "--path", str(run / "last.pt"), "--input", source, "--output", str(output), "--threads", "1")
        nmtkit("score", "--sys", str(output), "--ref", target, "--metric", "bleu", "--format", "json", stdout=score)
        bleu[name] = json.loads(score.read_text())[0]["score"]
        count = len((folder / f"{name}.{languages[0]}").read_bytes().split(b"\n")) - 1
        print(f"| {name} | {count:,} | {bleu[name]:.2f} |", flush=True)
    lost = bleu["clean"] - bleu["noisy"]
    if lost > 0:
        print(f"{(bleu['cleaned'] - bleu['noisy']) / lost:.0%} of the lost {lost:.2f} BLEU come back")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="+", help="one file, or the source and the target file")
    parser.add_argument("--languages", nargs=2, required=True)
    parser.add_argument("--columns", nargs=2)
    parser.add_argument("--new-column", help="use only rows with 0 in this column")
    parser.add_argument("--other", required=True, help="a .tsv whose fifth column is in a third language")
    parser.add_argument("--pairs", type=int, default=29_000)
    parser.add_argument("--touched", type=float, default=0.46, help="fraction of the pairs that get noise")
    parser.add_argument("--preset", default="curated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--self-train", action="store_true", help="also score pairs by two small models")
    parser.add_argument("--opusfilter", metavar="COMMAND", help="path of the command opusfilter in its environment")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the three texts into this folder")
    parser.add_argument(
        "--test", nargs=2, type=Path, metavar="FILE", help="train on the texts of --keep; score on these files"
    )
    parser.add_argument("--updates", type=int, default=700, help="updates of each training of --test")
    arguments = parser.parse_args()
    if arguments.test and not arguments.keep:
        parser.error("--test needs --keep")
    languages = source_lang, target_lang = arguments.languages[0], arguments.languages[1]
    if len(arguments.corpus) == 2:
        corpus = Corpus(Path(arguments.corpus[0]), Path(arguments.corpus[1]))
    else:
        corpus = locate(arguments.corpus[0], source_lang, target_lang, arguments.columns and tuple(arguments.columns))
    good: list[Pair] = []
    for part in pairs(corpus):
        for source, target, others in zip(part.sources, part.targets, part.extras, strict=True):
            if (
                len(source.split()) >= 3
                and source != target
                and (others.get(f"column {arguments.new_column}", "0") == "0")
            ):
                good.append((source, target))
    good = good[: arguments.pairs]
    foreign = [line for part in pairs(locate(arguments.other, "en", "da", ("4", "5"))) for line in part.targets
               if 4 <= len(line.split()) <= 40][:5000]  # fmt: skip
    rows = noisy(good, foreign, arguments.seed, arguments.touched)
    totals = Counter(row.name for row in rows)
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write(str(folder / "noisy.jsonl"), languages, [row.pair for row in rows], [{"class": row.name} for row in rows])
        rules = tuple(name for name in DEFAULT_FILTERS if name not in ("alignment", "word_order"))
        settings: dict[str, tuple[tuple[str, ...], list[str]]] = {
            "rules and language": (rules, []), "and alignment": ((*rules, "alignment"), []),
            "and word order": (DEFAULT_FILTERS, []),
            **({"and models": (DEFAULT_FILTERS, ["--self-train"])} if arguments.self_train else {}),
        }  # fmt: skip
        if arguments.opusfilter:
            (folder / "opusfilter").mkdir(exist_ok=True)
            results["OpusFilter"] = run_opusfilter(arguments.opusfilter, folder / "opusfilter", languages, rows)
        for title, (filters, flags) in settings.items():
            results[title], reasons = run_clean(folder, languages, filters, arguments.preset, flags, len(rows))
        if arguments.keep:
            write(str(folder / "noisy"), languages, [row.pair for row in rows])
            write(str(folder / "clean"), languages, [row.original for row in rows if row.name in FINE])
            write(str(folder / "cleaned"), languages, texts(locate(str(folder / "out.jsonl"), *languages)))
    print(f"| class | pairs | kept by {' | '.join(results)} | first reasons |")
    print("|---" * (len(results) + 3) + "|")
    for name in ("good", *Noise(good, foreign, 1).classes()):
        found = sorted(((count, reason) for (cls, reason), count in reasons.items() if cls == name), reverse=True)[:3]
        cells = [f"{result.kept[name] / max(1, totals[name]):.1%}" for result in results.values()]
        print(f"| {name} | {totals[name]:,} | {' | '.join(cells)} | {', '.join(f'{r} {c:,}' for c, r in found)} |")
    for title, result in results.items():
        kept_good = sum(result.kept[name] for name in FINE) / sum(totals[name] for name in FINE)
        bad = sum(count for name, count in totals.items() if name not in FINE)
        kept_bad = sum(count for name, count in result.kept.items() if name not in FINE)
        scoring = f", {result.scoring:,.0f} without start and fitting" if result.scoring else ""
        print(f"{title}: {kept_good:.2%} of the good kept, {1 - kept_bad / bad:.1%} of the bad dropped, "
              f"{result.pace:,.0f} pairs per second of CPU time{scoring}")  # fmt: skip
    if arguments.test:
        train(arguments.keep, languages, Corpus(arguments.test[0], arguments.test[1]), arguments.updates)


if __name__ == "__main__":
    main()
