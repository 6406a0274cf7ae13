"""Sentence pairs drawn from the grammar, split so that the test asks for combinations that training never showed.

A combination is an adjective with a noun, a verb with its object, a number with what it counts, a day with a month, an
hour with its minutes. About one in ten is held out: a training sentence contains none of these, a held-out one at
least one. So no held-out sentence can be found in training, nor pieced together from remembered phrases alone.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from nmtkit.demo import grammar, numerals
from nmtkit.demo import lexicon as words
from nmtkit.demo.grammar import Adverbial, Clause, Combination, NounPhrase, Pair, Phrase, Predicate, PronounPhrase

T = TypeVar("T")

TRAIN, VALID, TEST = 12_000, 200, 400  # sentence pairs
HELD_OUT = 0.1  # share of combinations


@dataclass(frozen=True)
class Corpus:
    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]


def held_out(combination: Combination) -> bool:
    """Whether this combination is kept from training; a function of its words alone."""
    digest = hashlib.sha256(" + ".join(combination).encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


def generate(seed: int = 1, train: int = TRAIN, valid: int = VALID, test: int = TEST) -> Corpus:
    """Distinct sentences, the same for the same arguments."""
    draw = Draw(Random(seed))
    seen: set[str] = set()
    kept: list[Pair] = []
    unseen: list[Pair] = []
    while len(kept) < train or len(unseen) < valid + test:
        pair = draw.pair()
        new = any(map(held_out, pair.combinations))
        into, wanted = (unseen, valid + test) if new else (kept, train)
        if len(into) < wanted and pair.english not in seen:
            seen.add(pair.english)
            into.append(pair)
    return Corpus(kept, unseen[:valid], unseen[valid:])


def write(corpus: Corpus, folder: Path) -> None:
    """`train.en`, `train.de`, `valid.en`, … in `folder`, which exists."""
    for name in ("train", "valid", "test"):
        pairs: list[Pair] = getattr(corpus, name)
        (folder / f"{name}.en").write_text("".join(f"{pair.english}\n" for pair in pairs), encoding="utf-8")
        (folder / f"{name}.de").write_text("".join(f"{pair.german}\n" for pair in pairs), encoding="utf-8")


class Draw:
    """Draws phrases and sentences; every choice comes from `random`."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def one(self, items: Sequence[T]) -> T:
        return items[self.random.randrange(len(items))]

    # phrases

    def noun_phrase(self, nouns: Sequence[words.Noun], adjectives: dict[str, str], counted: float = 0.2) -> NounPhrase:
        """`counted` is how often a number stands before it."""
        noun = self.one(nouns)
        adjective = self.one(list(adjectives.items())) if self.chance(0.5) else None
        if self.chance(counted):
            return NounPhrase(noun, "", True, adjective, number=self.random.randint(2, 99))
        plural = self.chance(0.3)
        determiner = self.one(
            ("the", "the", "the", "my", "our", "this", *(("many", "") if plural else ("a", "a", "a", "every")))
        )
        return NounPhrase(noun, determiner, plural, adjective)

    def people(self) -> NounPhrase:
        return self.noun_phrase(words.PEOPLE, words.OF_PEOPLE, counted=0.1)

    def subject(self, pronouns: float = 0.25) -> Phrase:
        return PronounPhrase(self.one(words.PRONOUNS)) if self.chance(pronouns) else self.people()

    def other_person(self, subject: Phrase) -> Phrase:
        """An object: never the speaker seen by himself."""
        if self.chance(0.75):
            return self.people()
        own = {"I", "we"} if isinstance(subject, PronounPhrase) and subject.pronoun.english in ("I", "we") else set()
        return PronounPhrase(self.one([pronoun for pronoun in words.PRONOUNS if pronoun.english not in own]))

    def thing(self) -> NounPhrase:
        return self.noun_phrase(words.THINGS, words.OF_THINGS)

    def time(self, tense: str) -> Adverbial:
        """A day, a time of day, both, or a word such as yesterday that fits the tense."""
        kind = self.random.random()
        if kind < 0.25:
            fitting = [("today", "heute"), ("in the evening", "am Abend"), ("in the morning", "am Morgen")]
            fitting += {
                "past": [("yesterday", "gestern")],
                "present": [("now", "jetzt"), ("every day", "jeden Tag")],
            }.get(tense, [("tomorrow", "morgen")])
            return Adverbial(*self.one(fitting))
        if kind < 0.45:
            return self.day()
        if kind < 0.8:
            return self.hour()
        day, hour = self.day(), self.hour()
        return Adverbial(f"{day.english} {hour.english}", f"{day.german} {hour.german}", day.parts + hour.parts)

    def day(self) -> Adverbial:
        if self.chance(0.4):
            english, german = self.one(list(words.WEEKDAYS.items()))
            return Adverbial(f"on {english}", f"am {german}")
        day, month = self.random.randint(1, 31), self.one(list(words.MONTHS))
        longest = 29 if month == "February" else 30 if month in ("April", "June", "September", "November") else 31
        if day > longest:
            day -= 10
        return Adverbial(*numerals.date(day, month), ((numerals.english_ordinal(day), month),))

    def hour(self) -> Adverbial:
        hour = self.random.randint(1, 12)
        minute = self.random.randint(1, 59) if self.chance(0.3) else 5 * self.random.randint(0, 11)
        english, german = numerals.clock(hour, minute)
        return Adverbial(f"at {english}", f"um {german}", ((f"hour {hour}", f"minute {minute}"),))

    # clauses

    def clause(self, tenses: Sequence[str] = ("present", "past", "modal"), adverbials: float = 0.5) -> Clause:
        subject = self.subject()
        return Clause(subject, self.predicate(subject, tenses, adverbials))

    def predicate(self, subject: Phrase, tenses: Sequence[str], adverbials: float) -> Predicate:
        """`adverbials` is how often there is a time, and half as often a place or company."""
        tense = self.one(tenses)
        if tense == "modal":
            tense = self.one(list(words.MODALS))
        time = self.time(tense) if self.chance(adverbials) else None
        where = None
        if self.chance(adverbials / 2):
            at = self.noun_phrase(words.PLACES, words.OF_PLACES, counted=0)
            where = grammar.company(self.people()) if self.chance(0.3) else grammar.place(at)
        kind = self.random.random()
        if kind < 0.2:
            return Predicate(self.one(words.INTRANSITIVE), tense, time=time, where=where)
        if kind < 0.45:
            person = self.other_person(subject)
            return Predicate(self.one(words.WITH_PERSON), tense, person, time=time, where=where)
        if kind < 0.75:
            return Predicate(self.one(words.WITH_THING), tense, self.thing(), time=time, where=where)
        if kind < 0.85:
            openable = self.noun_phrase(words.OPENABLE, words.OF_THINGS)
            return Predicate(self.one(words.WITH_OPENABLE), tense, openable, time=time, where=where)
        recipient = self.other_person(subject)
        return Predicate(self.one(words.DITRANSITIVE), tense, self.thing(), recipient, time=time, where=where)

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
            (0.04, self.age),
        )
        return self.random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()

    def time_first(self) -> Pair:
        clause = self.clause(adverbials=0.4)
        predicate = clause.predicate
        timed = Predicate(
            predicate.verb,
            predicate.tense,
            predicate.direct,
            predicate.recipient,
            predicate.time or self.time(predicate.tense),
            predicate.where,
        )
        return grammar.time_first(Clause(clause.subject, timed))

    def reported(self) -> Pair:
        return grammar.reported(
            self.subject(0.4), self.random.randrange(len(words.REPORTING)), self.clause(adverbials=0.3)
        )

    def reason(self) -> Pair:
        tenses = ("present", "past")
        conjunction = self.one(("because", "although"))
        return grammar.reason(self.clause(tenses, adverbials=0.15), conjunction, self.clause(adverbials=0.15))

    def condition(self) -> Pair:
        conjunction = self.one(("when", "although", "because"))
        tenses = ("present",) if conjunction == "when" else ("present", "past")
        return grammar.condition(conjunction, self.clause(tenses, adverbials=0.15), self.clause(tenses, adverbials=0))

    def attempt(self) -> Pair:
        subject = self.subject()
        return grammar.attempt(subject, self.predicate(subject, ("present",), adverbials=0.2))

    def relative(self) -> Pair:
        person = NounPhrase(self.one(words.PEOPLE), self.one(("the", "a", "my")))
        known = NounPhrase(person.noun, person.determiner, relative=self.predicate(person, ("present", "past"), 0.1))
        return grammar.statement(Clause(known, self.predicate(person, ("present", "past", "modal"), 0.2)))

    def age(self) -> Pair:
        who = NounPhrase(self.one(words.PEOPLE), self.one(("the", "my", "our", "this")))
        return grammar.age(who, self.random.randint(2, 99))
