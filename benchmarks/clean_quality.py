"""Measures `nmtkit clean` on a corpus with known noise: the share of pairs that are kept in each class, and the pace.

    python benchmarks/clean_quality.py multi30k/train.en.gz multi30k/train.de.gz --languages en de \\
        --other debian/en-da.train.tsv.gz
    python benchmarks/clean_quality.py debian/en-it.train.tsv.gz --languages en it --columns 4 5 --new-column 3 \\
        --other debian/en-da.train.tsv.gz
    python benchmarks/clean_quality.py multi30k/train.en.gz multi30k/train.de.gz --languages en de \\
        --other debian/en-da.train.tsv.gz --self-train --keep corpora

`--keep` writes the text before noise (`clean.en`, `clean.de`), with noise (`noisy`) and after cleaning (`cleaned`), so
that models of the three texts can be compared.

The noise has 15 classes and touches 46 % of the pairs, in equal parts. Pairs of the class `mendable` count as good:
they should be kept, and their text should be mended. All other classes are bad. Pairs whose sides are equal in the
corpus are left out before. `--other` has lines of a third language.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from nmtkit.cli.clean import filter_presets, scorer_of
from nmtkit.corpora.clean_config import DEFAULT_FILTERS, CleanConfig
from nmtkit.corpora.cleaning import Sample, clean, fit
from nmtkit.corpora.corpus import Corpus, Pairs, locate
from nmtkit.corpora.filters import FILTERS, FilterContext
from nmtkit.corpora.pairs import pairs
from nmtkit.corpora.scored_blocks import Worker
from nmtkit.corpora.writer import CorpusWriter

Pair = tuple[str, str]
TOUCHED = 0.46
MENUS = (
    ("Home | News | About us | Contact | Login", "Start | Aktuell | Über uns | Kontakt | Login"),
    ("© 2019 Example Inc. All rights reserved.", "© 2019 Example Inc. All rights reserved."),
    ('<div class="nav"><a href="/index">Home</a></div>', '<div class="nav"><a href="/index">Start</a></div>'),
    ("Sign in » Register » Basket » Help", "Anmelden » Registrieren » Korb » Hilfe"),
)


class Noise:
    """Makes a bad pair of a good pair. `good` has all good pairs, and `foreign` has lines of a third language."""

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


def noisy(good: list[Pair], foreign: list[str], seed: int) -> list[tuple[str, Pair]]:
    """Returns pairs with their class. Duplicates come after the pair that they repeat."""
    noise = Noise(good, foreign, seed)
    classes = noise.classes()
    result: list[tuple[str, Pair]] = []
    clean_pairs: list[Pair] = []
    for source, target in good:
        name = noise.random.choice(list(classes)) if noise.random.random() < TOUCHED else "good"
        if name in ("duplicate", "near_duplicate"):
            if not clean_pairs:
                continue
            source, target = noise.random.choice(clean_pairs)
        pair = classes[name](source, target) if name != "good" else (source, target)
        if name in ("shuffled_words", "replaced_words", "truncated", "copied") and pair == (source, target):
            name = "good"
        if name == "good":
            clean_pairs.append(pair)
        result.append((name, pair))
    return result


def rate(corpus: Corpus, config: CleanConfig, names: tuple[str, ...]) -> float:
    """Returns the number of pairs that one process mends and scores in a second of CPU time, after fitting."""
    context = FilterContext(config.source_lang, config.target_lang)
    presets = filter_presets(names, config.preset)
    filters = {name: FILTERS[name].factory(preset, context) for name, preset in presets.items()}
    sample = Sample(config.sample, config.seed)
    for part in pairs(corpus):
        sample.add(part)
    fit(filters, sample.pairs(), True)
    import pickle

    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(list(filters.values()), True)
        seconds, count = 0.0, 0
        for index, part in enumerate(pairs(corpus, 4096)):
            path = Path(folder) / str(index)
            path.write_bytes(pickle.dumps(part))
            start = time.process_time()
            worker.score(path)
            if index == 1:
                seconds, count = 0.0, 0  # the first block builds tables
            seconds += time.process_time() - start
            count += len(part)
    return count / seconds


def keep(folder: Path, languages: tuple[str, str], good: list[Pair], rows: list[tuple[str, Pair]], out: Path) -> None:
    """Writes the corpora `clean`, `noisy` and `cleaned` into a folder, as two files each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kept in (("clean", good), ("noisy", [pair for _, pair in rows])):
        with CorpusWriter(str(folder / name), languages) as writer:
            writer.write(Pairs([pair[0] for pair in kept], [pair[1] for pair in kept], [{}] * len(kept)))
    with CorpusWriter(str(folder / "cleaned"), languages) as writer:
        for part in pairs(locate(str(out), *languages)):
            writer.write(Pairs(part.sources, part.targets, [{}] * len(part)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", nargs="+", help="one file, or the source and the target file")
    parser.add_argument("--languages", nargs=2, required=True)
    parser.add_argument("--columns", nargs=2)
    parser.add_argument("--new-column", help="use only rows with 0 in this column")
    parser.add_argument("--other", required=True, help="a .tsv whose fifth column is in a third language")
    parser.add_argument("--pairs", type=int, default=29_000)
    parser.add_argument("--preset", default="curated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--self-train", action="store_true", help="also score pairs by two small models")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the three texts into this folder")
    arguments = parser.parse_args()
    source_lang, target_lang = arguments.languages = tuple(arguments.languages)
    if len(arguments.corpus) == 2:
        corpus = Corpus(*map(Path, arguments.corpus))
    else:
        corpus = locate(arguments.corpus[0], source_lang, target_lang, tuple(arguments.columns))
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
    rows = noisy(good, foreign, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with CorpusWriter(str(path / "noisy.jsonl"), (source_lang, target_lang)) as writer:
            writer.write(Pairs([pair[0] for _, pair in rows], [pair[1] for _, pair in rows],
                               [{"class": name} for name, _ in rows]))  # fmt: skip
        rules = tuple(name for name in DEFAULT_FILTERS if name != "alignment")
        tables = []
        titles = ["rules and language", "and alignment", *(["and models"] if arguments.self_train else [])]
        for title in titles:
            names = rules if title == titles[0] else DEFAULT_FILTERS
            config = CleanConfig(source_lang=source_lang, target_lang=target_lang, output=str(path / "out.jsonl"),
                                 dropped=str(path / "dropped.jsonl"), filters=names, preset=arguments.preset,
                                 self_train=title == "and models", workers=1)  # fmt: skip
            presets = filter_presets(names, arguments.preset)
            clean(config, [str(path / "noisy.jsonl")], presets, scorer=scorer_of(config))
            kept, lost = (
                [others for part in pairs(locate(str(path / name), source_lang, target_lang)) for others in part.extras]
                for name in ("out.jsonl", "dropped.jsonl")
            )
            noisy_corpus = locate(str(path / "noisy.jsonl"), source_lang, target_lang)
            if arguments.keep is not None and title == titles[-1]:
                keep(arguments.keep, arguments.languages, good, rows, path / "out.jsonl")
            tables.append(
                (
                    Counter(each["class"] for each in kept),
                    0 if config.uses_models else rate(noisy_corpus, config, names),
                )
            )
            reasons = Counter((each["class"], each["reason"]) for each in lost)
    totals = Counter(name for name, _ in rows)
    print(f"| class | pairs | kept by {' | '.join(titles)} | first reasons |")
    print("|---" * (len(titles) + 3) + "|")
    for name in ("good", *Noise(good, foreign, 1).classes()):
        found = sorted(((count, reason) for (cls, reason), count in reasons.items() if cls == name), reverse=True)[:3]
        cells = [f"{counts[name] / max(1, totals[name]):.1%}" for counts, _ in tables]
        print(f"| {name} | {totals[name]:,} | {' | '.join(cells)} | {', '.join(f'{r} {c:,}' for c, r in found)} |")
    fine = ("good", "mendable")
    for title, (counts, pace) in zip(titles, tables, strict=True):
        kept_good = sum(counts[name] for name in fine) / sum(totals[name] for name in fine)
        bad = sum(count for name, count in totals.items() if name not in fine)
        kept_bad = sum(count for name, count in counts.items() if name not in fine)
        speed = f", {pace:,.0f} pairs per second of CPU time" if pace else ""
        print(f"{title}: {kept_good:.2%} of the good kept, {1 - kept_bad / bad:.1%} of the bad dropped{speed}")


if __name__ == "__main__":
    main()
