"""The demo corpus is correct German and equals the output of its generator. Its test sentences are new."""

import bz2
import sys
from collections import Counter
from pathlib import Path

import pytest

from nmtkit.demo.run import CORPUS, read_corpus, write_corpus

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/demo_corpus"))
import demo_corpus
import grammar
import lexicon
from grammar import Adverbial, Clause, NounPhrase, Predicate, PronounPhrase

sys.path.pop(0)

NOUNS = {noun.english: noun for noun in (*lexicon.PEOPLE, *lexicon.THINGS, *lexicon.OPENABLE, *lexicon.PLACES)}
PRONOUNS = {pronoun.english: PronounPhrase(pronoun) for pronoun in lexicon.PRONOUNS}
ALL_VERBS = {
    verb.infinitive: verb
    for verb in (
        *lexicon.INTRANSITIVE,
        *lexicon.WITH_PERSON,
        *lexicon.WITH_THING,
        *lexicon.WITH_OPENABLE,
        *lexicon.DITRANSITIVE,
    )
}
STEMS = {**lexicon.OF_PEOPLE, **lexicon.OF_THINGS, **lexicon.OF_PLACES}


def phrase(text: str, number: int | None = None, relative: Predicate | None = None) -> NounPhrase:
    """Reads `the old man`; `the old man+` is a plural, and `- old man+` has no determiner."""
    determiner, *adjective, noun = text.split()
    return NounPhrase(
        NOUNS[noun.removesuffix("+")],
        determiner.strip("-"),
        noun.endswith("+"),
        (adjective[0], STEMS[adjective[0]]) if adjective else None,
        number,
        relative,
    )


@pytest.mark.parametrize(
    ("given", "case", "english", "german"),
    [
        ("the old man", "nominative", "the old man", "der alte Mann"),
        ("the old man", "accusative", "the old man", "den alten Mann"),
        ("the old man", "dative", "the old man", "dem alten Mann"),
        ("a old man", "nominative", "an old man", "ein alter Mann"),
        ("a old man", "dative", "an old man", "einem alten Mann"),
        ("a young woman", "nominative", "a young woman", "eine junge Frau"),
        ("a young woman", "dative", "a young woman", "einer jungen Frau"),
        ("my happy child", "nominative", "my happy child", "mein glückliches Kind"),
        ("my happy child", "accusative", "my happy child", "mein glückliches Kind"),
        ("our clever girl", "dative", "our clever girl", "unserem klugen Mädchen"),
        ("our friendly aunt+", "accusative", "our friendly aunts", "unsere freundlichen Tanten"),
        ("this expensive car", "nominative", "this expensive car", "dieses teure Auto"),
        ("this green apple+", "dative", "these green apples", "diesen grünen Äpfeln"),
        ("every new lamp", "accusative", "every new lamp", "jede neue Lampe"),
        ("every boy", "accusative", "every boy", "jeden Jungen"),
        ("the boy", "dative", "the boy", "dem Jungen"),
        ("a neighbour", "accusative", "a neighbour", "einen Nachbarn"),
        ("the tall doctor+", "dative", "the tall doctors", "den großen Ärzten"),
        ("the car+", "dative", "the cars", "den Autos"),
        ("many small window+", "accusative", "many small windows", "viele kleine Fenster"),
        ("many famous queen+", "dative", "many famous queens", "vielen berühmten Königinnen"),
        ("- red flower+", "nominative", "red flowers", "rote Blumen"),
        ("- tired uncle+", "dative", "tired uncles", "müden Onkeln"),
    ],
)
def test_articles_and_adjectives_agree(given: str, case: str, english: str, german: str) -> None:
    assert phrase(given).english() == english
    assert phrase(given).german(case) == german


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (1, "one", "eins"),
        (12, "twelve", "zwölf"),
        (16, "sixteen", "sechzehn"),
        (17, "seventeen", "siebzehn"),
        (20, "twenty", "zwanzig"),
        (21, "twenty-one", "einundzwanzig"),
        (30, "thirty", "dreißig"),
        (66, "sixty-six", "sechsundsechzig"),
        (77, "seventy-seven", "siebenundsiebzig"),
        (90, "ninety", "neunzig"),
    ],
)
def test_numbers_are_written_out(number: int, english: str, german: str) -> None:
    assert lexicon.cardinal(number) == (english, german)


@pytest.mark.parametrize(
    ("day", "month", "english", "german"),
    [
        (1, "May", "on the first of May", "am ersten Mai"),
        (3, "October", "on the third of October", "am dritten Oktober"),
        (7, "July", "on the seventh of July", "am siebten Juli"),
        (8, "June", "on the eighth of June", "am achten Juni"),
        (12, "January", "on the twelfth of January", "am zwölften Januar"),
        (19, "April", "on the nineteenth of April", "am neunzehnten April"),
        (20, "August", "on the twentieth of August", "am zwanzigsten August"),
        (21, "March", "on the twenty-first of March", "am einundzwanzigsten März"),
        (30, "December", "on the thirtieth of December", "am dreißigsten Dezember"),
    ],
)
def test_dates_are_written_out(day: int, month: str, english: str, german: str) -> None:
    assert lexicon.date(day, month) == (english, german)


@pytest.mark.parametrize(
    ("hour", "minute", "english", "german"),
    [
        (1, 0, "one o'clock", "ein Uhr"),
        (7, 30, "half past seven", "halb acht"),
        (12, 30, "half past twelve", "halb eins"),
        (7, 15, "a quarter past seven", "Viertel nach sieben"),
        (7, 45, "a quarter to eight", "Viertel vor acht"),
        (12, 50, "ten to one", "zehn vor eins"),
        (3, 20, "twenty past three", "zwanzig nach drei"),
        (4, 35, "four thirty-five", "vier Uhr fünfunddreißig"),
        (1, 21, "one twenty-one", "ein Uhr einundzwanzig"),
        (6, 1, "six oh one", "sechs Uhr eins"),
    ],
)
def test_clock_times_are_written_out(hour: int, minute: int, english: str, german: str) -> None:
    assert lexicon.clock(hour, minute) == (english, german)


def clause(subject: str, verb: str, direct: str = "", tense: str = "present", **rest: object) -> Clause:
    who = PRONOUNS.get(subject) or phrase(subject)
    what = PRONOUNS.get(direct) or (phrase(direct) if direct else None)
    return Clause(who, Predicate(ALL_VERBS[verb], tense, what, **rest))  # type: ignore[arg-type]


MONDAY = Adverbial("on Monday", "am Montag")
SLEEPS = clause("the child", "schlafen")

SENTENCES = [
    (
        grammar.statement(clause("the old man", "aufmachen", "the door", time=MONDAY)),
        "The old man opens the door on Monday.",
        "Der alte Mann macht am Montag die Tür auf.",
    ),
    (
        grammar.time_first(clause("the woman", "kaufen", "a new coat", time=MONDAY)),
        "On Monday the woman buys a new coat.",
        "Am Montag kauft die Frau einen neuen Mantel.",
    ),
    (
        grammar.time_first(clause("I", "einladen", "he", "past", time=MONDAY)),
        "On Monday I invited him.",
        "Am Montag habe ich ihn eingeladen.",
    ),
    (grammar.statement(clause("we", "abholen", "they")), "We pick them up.", "Wir holen sie ab."),
    (grammar.statement(clause("she", "suchen", "he", "past")), "She looked for him.", "Sie hat ihn gesucht."),
    (
        grammar.statement(clause("the doctor", "folgen", "the boy", "past")),
        "The doctor followed the boy.",
        "Der Arzt ist dem Jungen gefolgt.",
    ),
    (
        grammar.statement(clause("I", "helfen", "the woman+", "will")),
        "I will help the women.",
        "Ich werde den Frauen helfen.",
    ),
    (
        grammar.statement(clause("the aunt", "geben", "a red apple", recipient=phrase("the child"), time=MONDAY)),
        "The aunt gives the child a red apple on Monday.",
        "Die Tante gibt am Montag dem Kind einen roten Apfel.",
    ),
    (
        grammar.statement(clause("he", "zeigen", "the picture", "past", recipient=PRONOUNS["she"])),
        "He showed her the picture.",
        "Er hat ihr das Bild gezeigt.",
    ),
    (
        grammar.statement(clause("the baker", "arbeiten", where=grammar.location(phrase("the old garden")))),
        "The baker works in the old garden.",
        "Der Bäcker arbeitet im alten Garten.",
    ),
    (
        grammar.statement(clause("they", "verkaufen", "a clock", where=grammar.location(phrase("a church")))),
        "They sell a clock in a church.",
        "Sie verkaufen in einer Kirche eine Uhr.",
    ),
    (
        grammar.question(clause("the student", "mitbringen", "the book", "want to")),
        "Does the student want to bring along the book?",
        "Will der Student das Buch mitbringen?",
    ),
    (
        grammar.question(clause("he", "lachen", "", "past")),
        "Did he laugh?",
        "Hat er gelacht?",
    ),
    (
        grammar.reported(phrase("the man"), 0, clause("the boy", "zurückgeben", "the key")),
        "The man says that the boy gives back the key.",
        "Der Mann sagt, dass der Junge den Schlüssel zurückgibt.",
    ),
    (
        grammar.reported(PRONOUNS["I"], 3, clause("they", "einschlafen", "", "past")),
        "I know that they fell asleep.",
        "Ich weiß, dass sie eingeschlafen sind.",
    ),
    (
        grammar.reason(SLEEPS, "because", clause("the queen", "singen", "", "can")),
        "The child sleeps because the queen can sing.",
        "Das Kind schläft, weil die Königin singen kann.",
    ),
    (
        grammar.condition("when", SLEEPS, clause("we", "ankommen")),
        "When the child sleeps, we arrive.",
        "Wenn das Kind schläft, kommen wir an.",
    ),
    (
        grammar.attempt(phrase("the girl+"), clause("we", "zumachen", "every window").predicate),
        "The girls try to close every window.",
        "Die Mädchen versuchen, jedes Fenster zuzumachen.",
    ),
    (
        grammar.statement(
            Clause(
                phrase("the woman", relative=clause("we", "kaufen", "the car", "past").predicate),
                clause("we", "aufstehen").predicate,
            )
        ),
        "The woman who bought the car gets up.",
        "Die Frau, die das Auto gekauft hat, steht auf.",
    ),
    (
        grammar.statement(
            Clause(phrase("the uncle"), Predicate(ALL_VERBS["tragen"], "must", phrase("- heavy chair+", 21)))
        ),
        "The uncle must carry twenty-one heavy chairs.",
        "Der Onkel muss einundzwanzig schwere Stühle tragen.",
    ),
    (
        grammar.price(phrase("this bicycle"), 81),
        "This bicycle costs eighty-one euros.",
        "Dieses Fahrrad kostet einundachtzig Euro.",
    ),
    (
        grammar.age(phrase("my grandmother"), 93),
        "My grandmother is ninety-three years old.",
        "Meine Großmutter ist dreiundneunzig Jahre alt.",
    ),
]


@pytest.mark.parametrize(("pair", "english", "german"), SENTENCES, ids=[german for _, _, german in SENTENCES])
def test_sentences_read_as_written_by_hand(pair: grammar.Pair, english: str, german: str) -> None:
    assert pair.english == english
    assert pair.german == german


@pytest.fixture(scope="module")
def small() -> demo_corpus.Corpus:
    return demo_corpus.generate(seed=3, train=3000, valid=50, test=100)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_corpus(small: demo_corpus.Corpus) -> None:
    assert demo_corpus.generate(seed=3, train=3000, valid=50, test=100) == small
    assert demo_corpus.generate(seed=4, train=3000, valid=50, test=100) != small


def test_held_out_sentences_use_combinations_absent_from_training(small: demo_corpus.Corpus) -> None:
    known = {combination for pair in small.train for combination in pair.combinations}
    for pair in (*small.valid, *small.test):
        assert any(demo_corpus.held_out(combination) and combination not in known for combination in pair.combinations)


@pytest.mark.slow
def test_the_corpus_in_the_package_is_the_corpus_that_the_generator_makes() -> None:
    assert bz2.decompress(CORPUS.read_bytes()) == bz2.decompress(demo_corpus.packed(demo_corpus.generate()))


def test_every_word_of_the_test_sentences_stands_in_training() -> None:
    corpus = read_corpus()
    for side in (0, 1):
        words = {
            subset: {word for pair in pairs for word in pair[side].lower().strip(".?").replace(",", "").split()}
            for subset, pairs in corpus.items()
        }
        assert len(words["train"]) > 200 and not (words["valid"] | words["test"]) - words["train"]


def test_sentences_are_distinct_and_one_english_sentence_has_one_translation(small: demo_corpus.Corpus) -> None:
    pairs = [*small.train, *small.valid, *small.test]
    assert max(Counter(pair.english for pair in pairs).values()) == 1


def test_the_corpus_is_written_as_parallel_files(tmp_path: Path) -> None:
    write_corpus(read_corpus(), tmp_path)
    for name, count in (("train", 12_000), ("valid", 200), ("test", 400)):
        for language in ("en", "de"):
            assert len((tmp_path / f"{name}.{language}").read_text(encoding="utf-8").splitlines()) == count
    assert (tmp_path / "test.de").read_text(encoding="utf-8").splitlines()[7] == read_corpus()["test"][7][1]
