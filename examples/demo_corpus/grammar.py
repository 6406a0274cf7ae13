"""A synchronous grammar: each phrase is built once and rendered in English and in German.

The translation is not word by word: German marks gender, case and number on articles and adjectives, puts the finite
verb second in a main clause and last in a subordinate clause, and splits separable verbs. Each phrase also lists its
combinations of words; the corpus holds some combinations out of training.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lexicon import CONJUNCTIONS, MODALS, REPORTING, Noun, Pronoun, Verb, cardinal

Combination = tuple[str, str]

# Endings by case, for masculine, feminine, neuter and plural
_GENDERS = "mfnp"
_STRONG = {
    "nominative": ("er", "e", "es", "e"),
    "accusative": ("en", "e", "es", "e"),
    "dative": ("em", "er", "em", "en"),
}
_THE = {
    "nominative": ("der", "die", "das", "die"),
    "accusative": ("den", "die", "das", "die"),
    "dative": ("dem", "der", "dem", "den"),
}
_WEAK = {"nominative": ("e", "e", "e", "en"), "accusative": ("en", "e", "e", "en"), "dative": ("en",) * 4}
_MIXED = {"nominative": ("er", "e", "es", "en"), "accusative": ("en", "e", "es", "en"), "dative": ("en",) * 4}

_DER_WORDS = {"this": "dies", "every": "jed"}
_EIN_WORDS = {"a": "ein", "my": "mein", "our": "unser"}
DEFINITE = ("the", "this", "every", "my", "our")


@dataclass(frozen=True)
class NounPhrase:
    """A noun with its determiner and adjective, such as "the old man" or "twenty heavy chairs".

    `determiner` is the, a, this, every, my, our, many or empty. A `number` above one replaces the determiner.
    `relative` is a relative clause about the noun: "the woman who sold the car".
    """

    noun: Noun
    determiner: str = "the"
    plural: bool = False
    adjective: tuple[str, str] | None = None  # English, German stem
    number: int | None = None
    relative: "Predicate | None" = None

    @property
    def person(self) -> str:
        return "plural" if self.plural else "third"

    @property
    def definite(self) -> bool:
        return self.number is None and self.determiner in DEFINITE

    def combinations(self) -> Iterator[Combination]:
        if self.adjective:
            yield self.adjective[0], self.noun.english
        if self.number is not None:
            yield cardinal(self.number)[0], self.noun.english
        if self.relative:
            yield from self.relative.combinations()

    def english(self, case: str = "nominative") -> str:
        words = [self.adjective[0]] if self.adjective else []
        words.append(self.noun.english_plural if self.plural else self.noun.english)
        determiner = self.determiner
        if self.number is not None:
            determiner = cardinal(self.number)[0]
        elif determiner == "a" and words[0][0] in "aeiou":
            determiner = "an"
        elif determiner == "this" and self.plural:
            determiner = "these"
        phrase = " ".join([determiner, *words]) if determiner else " ".join(words)
        return f"{phrase} who {self.relative.english(self.person)}" if self.relative else phrase

    def german(self, case: str) -> str:
        """Returns the phrase in a case. Relative clauses end in a comma, which `sentence` drops before a full stop."""
        gender = _GENDERS.index("p" if self.plural else self.noun.gender)
        article, ending = self._article(case, gender)
        words = [article] if article else []
        if self.adjective:
            words.append(self.adjective[1] + ending)
        words.append(self._noun(case))
        if self.relative:
            words[-1] += ","
            words.append(f"{_THE['nominative'][gender]} {self.relative.german_final(self.person)},")
        return " ".join(words)

    def _article(self, case: str, gender: int) -> tuple[str, str]:
        """Returns the determiner, and the ending of an adjective after this determiner."""
        if self.number is not None:
            return cardinal(self.number)[1], _STRONG[case][gender]
        if self.determiner == "the":
            return _THE[case][gender], _WEAK[case][gender]
        if self.determiner in _DER_WORDS:
            return _DER_WORDS[self.determiner] + _STRONG[case][gender], _WEAK[case][gender]
        if self.determiner in _EIN_WORDS:
            bare = (case == "nominative" and gender in (0, 2)) or (case == "accusative" and gender == 2)
            return _EIN_WORDS[self.determiner] + ("" if bare else _STRONG[case][gender]), _MIXED[case][gender]
        assert self.plural
        return ("viel" + _STRONG[case][gender] if self.determiner == "many" else ""), _STRONG[case][gender]

    def _noun(self, case: str) -> str:
        if not self.plural:
            return self.noun.oblique if self.noun.oblique and case != "nominative" else self.noun.german
        form = self.noun.german_plural
        return form + "n" if case == "dative" and form[-1] not in "ns" else form


@dataclass(frozen=True)
class PronounPhrase:
    pronoun: Pronoun

    @property
    def person(self) -> str:
        return self.pronoun.person

    def combinations(self) -> Iterator[Combination]:
        return iter(())

    def english(self, case: str = "nominative") -> str:
        return self.pronoun.english if case == "nominative" else self.pronoun.english_object

    def german(self, case: str) -> str:
        return {"nominative": self.pronoun.german, "accusative": self.pronoun.accusative}.get(case, self.pronoun.dative)


Phrase = NounPhrase | PronounPhrase


@dataclass(frozen=True)
class Adverbial:
    """A time, place, companion or amount. Its form is the same in every position."""

    english: str
    german: str
    parts: tuple[Combination, ...] = ()

    def combinations(self) -> Iterator[Combination]:
        return iter(self.parts)


def location(noun_phrase: NounPhrase) -> Adverbial:
    """Returns "in the old garden", "im alten Garten"."""
    german = f"in {noun_phrase.german('dative')}"
    if german.startswith("in dem "):
        german = "im " + german.removeprefix("in dem ")
    return Adverbial(f"in {noun_phrase.english()}", german, tuple(noun_phrase.combinations()))


def company(phrase: Phrase) -> Adverbial:
    return Adverbial(f"with {phrase.english('dative')}", f"mit {phrase.german('dative')}", tuple(phrase.combinations()))


@dataclass(frozen=True)
class Predicate:
    """A verb with its objects and adverbials. `tense` is present, past, or a key of `MODALS`."""

    verb: Verb
    tense: str = "present"
    direct: Phrase | None = None
    recipient: Phrase | None = None
    time: Adverbial | None = None
    where: Adverbial | None = None

    def combinations(self) -> Iterator[Combination]:
        for part in (self.direct, self.recipient, self.time, self.where):
            if part:
                yield from part.combinations()
        if isinstance(self.direct, NounPhrase):
            yield _join(self.verb.english, self.verb.particle), self.direct.noun.english

    # English

    def english(self, person: str, time: bool = True) -> str:
        """Returns the predicate for a subject of the given person; `time=False` omits the time."""
        if self.tense == "past":
            return self._english_rest(self.verb.english_past, time)
        if self.tense in MODALS:
            modal = "wants to" if self.tense == "want to" and person == "third" else self.tense
            return f"{modal} {self.english_plain(time)}"
        return self._english_rest(self.verb.english_third if person == "third" else self.verb.english, time)

    def english_plain(self, time: bool = True) -> str:
        """Returns the predicate with the bare infinitive."""
        return self._english_rest(self.verb.english, time)

    def english_question(self, subject: Phrase) -> str:
        if self.tense in MODALS and self.tense != "want to":
            return f"{self.tense} {subject.english()} {self.english_plain()}"
        helper = "did" if self.tense == "past" else "does" if subject.person == "third" else "do"
        return f"{helper} {subject.english()} {'want to ' * (self.tense == 'want to')}{self.english_plain()}"

    def _english_rest(self, form: str, time: bool) -> str:
        words = [form]
        if isinstance(self.direct, PronounPhrase) and not self.verb.preposition:
            words += [self.direct.english("accusative"), self.verb.particle]
        else:
            recipient = self.recipient.english("dative") if self.recipient else ""
            words += [self.verb.particle, recipient, self.direct.english("accusative") if self.direct else ""]
        words += [adverbial.english for adverbial in (self.where, self.time if time else None) if adverbial]
        return _join(*words)

    # German

    def german_finite(self, person: str) -> str:
        """Returns the finite verb of a main clause, without the separable prefix."""
        if self.tense == "past":
            forms = ("habe", "hat", "haben") if self.verb.auxiliary == "haben" else ("bin", "ist", "sind")
        elif self.tense in MODALS:
            third, plural = MODALS[self.tense]
            forms = ("werde" if third == "wird" else third, third, plural)
        else:
            forms = (self.verb.german.removesuffix("n"), self.verb.finite, self.verb.german)
        return forms[("first", "third", "plural").index(person)]

    def german_middle(self, time: bool = True) -> str:
        """Returns the words between the two parts of the verb.

        Their order is: pronouns, time, dative and definite objects, place, indefinite objects.
        """
        case = self.verb.case
        phrases = [(self.recipient, "dative"), (self.direct, case)]
        pronouns = [phrase.german(case) for phrase, case in phrases if isinstance(phrase, PronounPhrase)]
        early: list[str] = []
        late: list[str] = []
        for phrase, case in phrases:
            if isinstance(phrase, NounPhrase):
                (early if case == "dative" or phrase.definite else late).append(phrase.german(case))
        when = self.time.german if self.time and time else ""
        return _join(*pronouns, when, *early, self.where.german if self.where else "", *late)

    def german_closing(self) -> str:
        """Returns the second part of the verb, at the end of the clause: prefix, participle or infinitive."""
        if self.tense == "past":
            return self.verb.participle
        return self.verb.infinitive if self.tense in MODALS else self.verb.prefix

    def german_final(self, person: str) -> str:
        """Returns the predicate with the finite verb last, as in subordinate clauses."""
        joint = "" if self.tense == "present" else " "
        return _join(self.german_middle(), self.german_closing() + joint + self.german_finite(person))

    def german_infinitive(self) -> str:
        """Returns the predicate as an infinitive with zu: "die Tür aufzumachen"."""
        return _join(self.german_middle(), self.verb.to_infinitive)


@dataclass(frozen=True)
class Clause:
    subject: Phrase
    predicate: Predicate

    def combinations(self) -> Iterator[Combination]:
        yield from self.subject.combinations()
        yield from self.predicate.combinations()

    def english(self) -> str:
        return f"{self.subject.english()} {self.predicate.english(self.subject.person)}"

    def german(self) -> str:
        """Returns the clause with the subject first and the verb second."""
        predicate, finite = self.predicate, self.predicate.german_finite(self.subject.person)
        return _join(self.subject.german("nominative"), finite, predicate.german_middle(), predicate.german_closing())

    def german_inverted(self, time: bool = True) -> str:
        """Returns the clause with the verb first, as in a question or after an initial time."""
        predicate, finite = self.predicate, self.predicate.german_finite(self.subject.person)
        return _join(
            finite, self.subject.german("nominative"), predicate.german_middle(time), predicate.german_closing()
        )

    def german_subordinate(self) -> str:
        """Returns the clause with the verb last."""
        return _join(self.subject.german("nominative"), self.predicate.german_final(self.subject.person))


@dataclass(frozen=True)
class Pair:
    """An English sentence, its German translation, and the combinations of words in it."""

    english: str
    german: str
    combinations: frozenset[Combination]


def sentence(english: str, german: str, *parts: Phrase | Predicate | Clause | Adverbial, end: str = ".") -> Pair:
    """Returns the capitalised pair with `end` appended. Double commas after nested relative clauses become one."""
    german = german.replace(",,", ",").removesuffix(",")
    combinations = frozenset(combination for part in parts for combination in part.combinations())
    return Pair(english[0].upper() + english[1:] + end, german[0].upper() + german[1:] + end, combinations)


def statement(clause: Clause) -> Pair:
    """Returns "The man sings on Monday.", "Der Mann singt am Montag."."""
    return sentence(clause.english(), clause.german(), clause)


def time_first(clause: Clause) -> Pair:
    """Returns "On Monday the man sings.", "Am Montag singt der Mann."."""
    predicate = clause.predicate
    assert predicate.time
    english = f"{predicate.time.english} {clause.subject.english()} {predicate.english(clause.subject.person, False)}"
    return sentence(english, f"{predicate.time.german} {clause.german_inverted(time=False)}", clause)


def question(clause: Clause) -> Pair:
    """Returns "Does the man sing?", "Singt der Mann?"."""
    return sentence(clause.predicate.english_question(clause.subject), clause.german_inverted(), clause, end="?")


def reported(speaker: Phrase, verb: int, clause: Clause) -> Pair:
    """Returns "The man says that …", "Der Mann sagt, dass …"; `verb` is an index of `REPORTING`."""
    plain, third, *german = REPORTING[verb]
    finite = german[("first", "third", "plural").index(speaker.person)]
    return sentence(
        f"{speaker.english()} {third if speaker.person == 'third' else plain} that {clause.english()}",
        f"{speaker.german('nominative')} {finite}, dass {clause.german_subordinate()}",
        speaker,
        clause,
    )


def reason(main: Clause, conjunction: str, clause: Clause) -> Pair:
    """Returns a sentence with the main clause first: "…, weil …"."""
    return sentence(
        f"{main.english()} {conjunction} {clause.english()}",
        f"{main.german()}, {CONJUNCTIONS[conjunction]} {clause.german_subordinate()}",
        main,
        clause,
    )


def condition(conjunction: str, clause: Clause, main: Clause) -> Pair:
    """Returns a sentence with the subordinate clause first: "Wenn der Mann schläft, singt die Frau."."""
    return sentence(
        f"{conjunction} {clause.english()}, {main.english()}",
        f"{CONJUNCTIONS[conjunction]} {clause.german_subordinate()}, {main.german_inverted()}",
        clause,
        main,
    )


def attempt(subject: Phrase, predicate: Predicate) -> Pair:
    """Returns "The boy tries to open the door.", "Der Junge versucht, die Tür aufzumachen."."""
    forms = {"first": ("try", "versuche"), "third": ("tries", "versucht"), "plural": ("try", "versuchen")}
    english, german = forms[subject.person]
    return sentence(
        f"{subject.english()} {english} to {predicate.english_plain()}",
        f"{subject.german('nominative')} {german}, {predicate.german_infinitive()}",
        subject,
        predicate,
    )


def price(thing: NounPhrase, euros: int) -> Pair:
    """Returns "The car costs ten euros.", "Das Auto kostet zehn Euro."."""
    english, german = cardinal(euros)
    amount = Adverbial(f"{english} euros", f"{german} Euro", ((english, "euro " + thing.noun.english),))
    return sentence(
        f"{thing.english()} {'cost' if thing.plural else 'costs'} {amount.english}",
        f"{thing.german('nominative')} {'kosten' if thing.plural else 'kostet'} {amount.german}",
        thing,
        amount,
    )


def age(person: NounPhrase, years: int) -> Pair:
    """Returns "The man is ten years old.", "Der Mann ist zehn Jahre alt."."""
    english, german = cardinal(years)
    amount = Adverbial(f"{english} years", f"{german} Jahre", ((english, "year " + person.noun.english),))
    return sentence(
        f"{person.english()} is {amount.english} old",
        f"{person.german('nominative')} ist {amount.german} alt",
        person,
        amount,
    )


def _join(*words: str) -> str:
    return " ".join(filter(None, words))
