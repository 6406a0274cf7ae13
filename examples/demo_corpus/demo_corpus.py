"""Makes the parallel corpus of `nmtkit demo`: sentence pairs sampled from a grammar of English and German.

    python examples/demo_corpus/demo_corpus.py nmtkit/demo/corpus.tsv.bz2

The test set uses combinations of words that the training set lacks. A combination is an adjective with a noun, a verb
with its object, a number with the noun it counts, a day with a month, or an hour with its minutes. About one
combination in ten is held out: a training sentence contains none of the held-out combinations, and a valid or test
sentence contains at least one. So a test sentence never occurs in the training set and cannot be assembled from
phrases of the training set.
"""

import bz2
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TypeVar

import grammar
import lexicon as words
from grammar import Adverbial, Clause, Combination, NounPhrase, Pair, Phrase, Predicate, PronounPhrase

T = TypeVar("T")

TRAIN, VALID, TEST = 12_000, 200, 400  # sentence pairs
HELD_OUT = 0.1  # share of combinations that are held out
TENSES = ("present", "past", "modal")


@dataclass(frozen=True)
class Corpus:
    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]


def held_out(combination: Combination) -> bool:
    """Returns whether the combination is kept out of training. The answer depends only on the words."""
    digest = hashlib.sha256(" + ".join(combination).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


def generate(seed: int = 1, train: int = TRAIN, valid: int = VALID, test: int = TEST) -> Corpus:
    """Returns distinct sentence pairs. The same arguments always give the same corpus."""
    sampler = Sampler(Random(seed))
    seen: set[str] = set()
    known: list[Pair] = []
    unknown: list[Pair] = []
    while len(known) < train or len(unknown) < valid + test:
        pair = sampler.pair()
        pairs, size = (unknown, valid + test) if any(map(held_out, pair.combinations)) else (known, train)
        if len(pairs) < size and pair.english not in seen:
            seen.add(pair.english)
            pairs.append(pair)
    return Corpus(known, unknown[:valid], unknown[valid:])


def packed(corpus: Corpus) -> bytes:
    """Returns the corpus as the demo reads it: compressed lines of subset, English and German, separated by tabs."""
    subsets = {"train": corpus.train, "valid": corpus.valid, "test": corpus.test}
    lines = [f"{name}\t{pair.english}\t{pair.german}\n" for name, pairs in subsets.items() for pair in pairs]
    return bz2.compress("".join(lines).encode())


class Sampler:
    """Samples phrases, clauses and sentences. `random` makes every choice."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def happens(self, probability: float) -> bool:
        return self.random.random() < probability

    def choose(self, items: Sequence[T]) -> T:
        return items[self.random.randrange(len(items))]

    # phrases

    def noun_phrase(self, nouns: Sequence[words.Noun], adjectives: dict[str, str], counted: float = 0.2) -> NounPhrase:
        """Samples a noun phrase; `counted` is the probability of a number before the noun."""
        noun = self.choose(nouns)
        adjective = self.choose(list(adjectives.items())) if self.happens(0.5) else None
        if self.happens(counted):
            return NounPhrase(noun, "", True, adjective, number=self.random.randint(2, 99))
        plural = self.happens(0.3)
        determiners = (
            "the",
            "the",
            "the",
            "my",
            "our",
            "this",
            *(("many", "") if plural else ("a", "a", "a", "every")),
        )
        return NounPhrase(noun, self.choose(determiners), plural, adjective)

    def people(self) -> NounPhrase:
        return self.noun_phrase(words.PEOPLE, words.OF_PEOPLE, counted=0.1)

    def thing(self) -> NounPhrase:
        return self.noun_phrase(words.THINGS, words.OF_THINGS)

    def person(self, *determiners: str) -> NounPhrase:
        return NounPhrase(self.choose(words.PEOPLE), self.choose(determiners))

    def subject(self, pronouns: float = 0.25) -> Phrase:
        return PronounPhrase(self.choose(words.PRONOUNS)) if self.happens(pronouns) else self.people()

    def other_person(self, subject: Phrase) -> Phrase:
        """Samples a person as object; excludes "me" and "us" if the subject is "I" or "we"."""
        if self.happens(0.75):
            return self.people()
        speaker = (
            {"I", "we"} if isinstance(subject, PronounPhrase) and subject.pronoun.english in ("I", "we") else set()
        )
        return PronounPhrase(self.choose([pronoun for pronoun in words.PRONOUNS if pronoun.english not in speaker]))

    def time(self, tense: str) -> Adverbial:
        """Samples a day, a time of day, both, or a word that fits the tense, such as "yesterday"."""
        kind = self.random.random()
        if kind < 0.25:
            fitting = [("today", "heute"), ("in the evening", "am Abend"), ("in the morning", "am Morgen")]
            fitting += {
                "past": [("yesterday", "gestern")],
                "present": [("now", "jetzt"), ("every day", "jeden Tag")],
            }.get(tense, [("tomorrow", "morgen")])
            return Adverbial(*self.choose(fitting))
        if kind < 0.45:
            return self.day()
        if kind < 0.8:
            return self.hour()
        day, hour = self.day(), self.hour()
        return Adverbial(f"{day.english} {hour.english}", f"{day.german} {hour.german}", day.parts + hour.parts)

    def day(self) -> Adverbial:
        if self.happens(0.4):
            english, german = self.choose(list(words.WEEKDAYS.items()))
            return Adverbial(f"on {english}", f"am {german}")
        day, month = self.random.randint(1, 31), self.choose(list(words.MONTHS))
        longest = 29 if month == "February" else 30 if month in ("April", "June", "September", "November") else 31
        if day > longest:
            day -= 10
        return Adverbial(*words.date(day, month), ((words.ordinal(day)[0], month),))

    def hour(self) -> Adverbial:
        hour = self.random.randint(1, 12)
        minute = self.random.randint(1, 59) if self.happens(0.3) else 5 * self.random.randint(0, 11)
        english, german = words.clock(hour, minute)
        return Adverbial(f"at {english}", f"um {german}", ((f"hour {hour}", f"minute {minute}"),))

    # clauses

    def clause(self, tenses: Sequence[str] = TENSES, adverbials: float = 0.5) -> Clause:
        subject = self.subject()
        return Clause(subject, self.predicate(subject, tenses, adverbials))

    def predicate(self, subject: Phrase, tenses: Sequence[str], adverbials: float) -> Predicate:
        """Samples a predicate. It has a time with probability `adverbials`, a place or companion with half of it."""
        tense = self.choose(tenses)
        if tense == "modal":
            tense = self.choose(list(words.MODALS))
        time = self.time(tense) if self.happens(adverbials) else None
        where = None
        if self.happens(adverbials / 2):
            location = self.noun_phrase(words.PLACES, words.OF_PLACES, counted=0)
            where = grammar.company(self.people()) if self.happens(0.3) else grammar.location(location)
        kind = self.random.random()
        direct: Phrase | None = None
        recipient: Phrase | None = None
        if kind < 0.2:
            verb = self.choose(words.INTRANSITIVE)
        elif kind < 0.45:
            direct = self.other_person(subject)
            verb = self.choose(words.WITH_PERSON)
        elif kind < 0.75:
            verb, direct = self.choose(words.WITH_THING), self.thing()
        elif kind < 0.85:
            direct = self.noun_phrase(words.OPENABLE, words.OF_THINGS)
            verb = self.choose(words.WITH_OPENABLE)
        else:
            recipient = self.other_person(subject)
            verb, direct = self.choose(words.DITRANSITIVE), self.thing()
        return Predicate(verb, tense, direct, recipient, time, where)

    # sentences

    def pair(self) -> Pair:
        kinds: tuple[tuple[float, Callable[[], Pair]], ...] = (
            (0.3, lambda: grammar.statement(self.clause(adverbials=0.6))),
            (0.2, self.time_first),
            (0.08, lambda: grammar.question(self.clause())),
            (0.08, self.reported),
            (0.08, self.reason),
            (0.07, self.condition),
            (0.05, self.attempt),
            (0.06, self.relative),
            (0.04, lambda: grammar.price(self.thing(), self.random.randint(2, 99))),
            (0.04, lambda: grammar.age(self.person("the", "my", "our", "this"), self.random.randint(2, 99))),
        )
        return self.random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()

    def time_first(self) -> Pair:
        clause = self.clause(adverbials=0.4)
        time = clause.predicate.time or self.time(clause.predicate.tense)
        return grammar.time_first(replace(clause, predicate=replace(clause.predicate, time=time)))

    def reported(self) -> Pair:
        speaker, verb = self.subject(0.4), self.random.randrange(len(words.REPORTING))
        return grammar.reported(speaker, verb, self.clause(adverbials=0.3))

    def reason(self) -> Pair:
        conjunction = self.choose(("because", "although"))
        return grammar.reason(self.clause(TENSES[:2], 0.15), conjunction, self.clause(adverbials=0.15))

    def condition(self) -> Pair:
        conjunction = self.choose(("when", "although", "because"))
        tenses = TENSES[:1] if conjunction == "when" else TENSES[:2]
        return grammar.condition(conjunction, self.clause(tenses, 0.15), self.clause(tenses, adverbials=0))

    def attempt(self) -> Pair:
        subject = self.subject()
        return grammar.attempt(subject, self.predicate(subject, TENSES[:1], adverbials=0.2))

    def relative(self) -> Pair:
        person = self.person("the", "a", "my")
        described = replace(person, relative=self.predicate(person, TENSES[:2], 0.1))
        return grammar.statement(Clause(described, self.predicate(person, TENSES, 0.2)))


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(packed(generate()))
