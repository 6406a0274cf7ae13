"""The words of the demo corpus in English and German, with their irregular forms; numbers, dates and clock times.

Every English word has exactly one German translation, so each English sentence has exactly one correct translation.
Several English words may share a German word.
"""

from dataclasses import dataclass


def translations(text: str) -> dict[str, str]:
    """Reads "old alt, small klein" as a dictionary from English to German."""
    return {english: german for english, german in (entry.split() for entry in text.split(","))}


@dataclass(frozen=True)
class Noun:
    """A noun. `oblique` is the accusative and dative singular of the n-declension (der Junge, den Jungen)."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: str  # m, f or n
    oblique: str | None = None


@dataclass(frozen=True)
class Verb:
    """A verb. `german` and `finite` (third person singular) lack the separable `prefix`; `participle` includes it.

    `auxiliary` forms the perfect; `case` is the case of a single object. A pronoun precedes the English `particle`
    ("picks him up") unless `preposition` is set ("looks for him").
    """

    english: str
    english_third: str
    english_past: str
    german: str
    finite: str
    participle: str
    prefix: str = ""
    auxiliary: str = "haben"
    case: str = "accusative"
    particle: str = ""
    preposition: bool = False

    @property
    def infinitive(self) -> str:
        return self.prefix + self.german

    @property
    def to_infinitive(self) -> str:
        """The infinitive with "zu", which follows the prefix of a separable verb: zu kaufen, abzuholen."""
        return f"{self.prefix}zu{self.german}" if self.prefix else f"zu {self.german}"


@dataclass(frozen=True)
class Pronoun:
    """A pronoun. `person` selects the verb form: first (singular), third (singular) or plural."""

    english: str
    english_object: str
    german: str
    accusative: str
    dative: str
    person: str


PEOPLE = (
    Noun("man", "men", "Mann", "Männer", "m"),
    Noun("woman", "women", "Frau", "Frauen", "f"),
    Noun("child", "children", "Kind", "Kinder", "n"),
    Noun("boy", "boys", "Junge", "Jungen", "m", "Jungen"),
    Noun("girl", "girls", "Mädchen", "Mädchen", "n"),
    Noun("doctor", "doctors", "Arzt", "Ärzte", "m"),
    Noun("teacher", "teachers", "Lehrerin", "Lehrerinnen", "f"),
    Noun("neighbour", "neighbours", "Nachbar", "Nachbarn", "m", "Nachbarn"),
    Noun("student", "students", "Student", "Studenten", "m", "Studenten"),
    Noun("grandmother", "grandmothers", "Großmutter", "Großmütter", "f"),
    Noun("uncle", "uncles", "Onkel", "Onkel", "m"),
    Noun("aunt", "aunts", "Tante", "Tanten", "f"),
    Noun("baker", "bakers", "Bäcker", "Bäcker", "m"),
    Noun("queen", "queens", "Königin", "Königinnen", "f"),
)

OPENABLE = (
    Noun("door", "doors", "Tür", "Türen", "f"),
    Noun("window", "windows", "Fenster", "Fenster", "n"),
    Noun("box", "boxes", "Kiste", "Kisten", "f"),
    Noun("letter", "letters", "Brief", "Briefe", "m"),
    Noun("suitcase", "suitcases", "Koffer", "Koffer", "m"),
)

MOVABLE = (
    Noun("book", "books", "Buch", "Bücher", "n"),
    Noun("apple", "apples", "Apfel", "Äpfel", "m"),
    Noun("flower", "flowers", "Blume", "Blumen", "f"),
    Noun("picture", "pictures", "Bild", "Bilder", "n"),
    Noun("key", "keys", "Schlüssel", "Schlüssel", "m"),
    Noun("lamp", "lamps", "Lampe", "Lampen", "f"),
    Noun("chair", "chairs", "Stuhl", "Stühle", "m"),
    Noun("table", "tables", "Tisch", "Tische", "m"),
    Noun("bag", "bags", "Tasche", "Taschen", "f"),
    Noun("coat", "coats", "Mantel", "Mäntel", "m"),
    Noun("bicycle", "bicycles", "Fahrrad", "Fahrräder", "n"),
    Noun("car", "cars", "Auto", "Autos", "n"),
    Noun("clock", "clocks", "Uhr", "Uhren", "f"),
    Noun("dress", "dresses", "Kleid", "Kleider", "n"),
    Noun("knife", "knives", "Messer", "Messer", "n"),
)

THINGS = (*MOVABLE, *OPENABLE[2:])  # without door and window, which cannot be moved

PLACES = (
    Noun("garden", "gardens", "Garten", "Gärten", "m"),
    Noun("city", "cities", "Stadt", "Städte", "f"),
    Noun("kitchen", "kitchens", "Küche", "Küchen", "f"),
    Noun("park", "parks", "Park", "Parks", "m"),
    Noun("school", "schools", "Schule", "Schulen", "f"),
    Noun("museum", "museums", "Museum", "Museen", "n"),
    Noun("village", "villages", "Dorf", "Dörfer", "n"),
    Noun("house", "houses", "Haus", "Häuser", "n"),
    Noun("church", "churches", "Kirche", "Kirchen", "f"),
    Noun("forest", "forests", "Wald", "Wälder", "m"),
)

# Adjectives, with the German stem to which the ending is added
OF_ANYTHING = translations("old alt, small klein, beautiful schön")
OF_PEOPLE = OF_ANYTHING | translations(
    "tall groß, young jung, tired müd, friendly freundlich, sick krank, happy glücklich, clever klug, famous berühmt"
)
OF_THINGS = OF_ANYTHING | translations(
    "big groß, new neu, red rot, green grün, blue blau, black schwarz, white weiß, heavy schwer, expensive teur, "
    "cheap billig"
)
OF_PLACES = OF_ANYTHING | translations("big groß, new neu, quiet ruhig, dark dunkl")

PRONOUNS = (
    Pronoun("I", "me", "ich", "mich", "mir", "first"),
    Pronoun("he", "him", "er", "ihn", "ihm", "third"),
    Pronoun("she", "her", "sie", "sie", "ihr", "third"),
    Pronoun("we", "us", "wir", "uns", "uns", "plural"),
    Pronoun("they", "them", "sie", "sie", "ihnen", "plural"),
)

# Verbs whose past equals their present (read, put) are excluded: "they read" would have two translations.
INTRANSITIVE = (
    Verb("sleep", "sleeps", "slept", "schlafen", "schläft", "geschlafen"),
    Verb("work", "works", "worked", "arbeiten", "arbeitet", "gearbeitet"),
    Verb("wait", "waits", "waited", "warten", "wartet", "gewartet"),
    Verb("laugh", "laughs", "laughed", "lachen", "lacht", "gelacht"),
    Verb("sing", "sings", "sang", "singen", "singt", "gesungen"),
    Verb("dance", "dances", "danced", "tanzen", "tanzt", "getanzt"),
    Verb("arrive", "arrives", "arrived", "kommen", "kommt", "angekommen", "an", "sein"),
    Verb("get", "gets", "got", "stehen", "steht", "aufgestanden", "auf", "sein", particle="up"),
    Verb("come", "comes", "came", "kommen", "kommt", "zurückgekommen", "zurück", "sein", particle="back"),
    Verb("fall", "falls", "fell", "schlafen", "schläft", "eingeschlafen", "ein", "sein", particle="asleep"),
)
OF_EITHER = (
    Verb("see", "sees", "saw", "sehen", "sieht", "gesehen"),
    Verb("find", "finds", "found", "finden", "findet", "gefunden"),
    Verb("draw", "draws", "drew", "zeichnen", "zeichnet", "gezeichnet"),
    Verb("look", "looks", "looked", "suchen", "sucht", "gesucht", particle="for", preposition=True),
)
WITH_PERSON = (
    *OF_EITHER,
    Verb("visit", "visits", "visited", "besuchen", "besucht", "besucht"),
    Verb("greet", "greets", "greeted", "begrüßen", "begrüßt", "begrüßt"),
    Verb("call", "calls", "called", "rufen", "ruft", "angerufen", "an"),
    Verb("invite", "invites", "invited", "laden", "lädt", "eingeladen", "ein"),
    Verb("pick", "picks", "picked", "holen", "holt", "abgeholt", "ab", particle="up"),
    Verb("help", "helps", "helped", "helfen", "hilft", "geholfen", case="dative"),
    Verb("thank", "thanks", "thanked", "danken", "dankt", "gedankt", case="dative"),
    Verb("follow", "follows", "followed", "folgen", "folgt", "gefolgt", auxiliary="sein", case="dative"),
    Verb("answer", "answers", "answered", "antworten", "antwortet", "geantwortet", case="dative"),
)
WITH_THING = (
    *OF_EITHER,
    Verb("buy", "buys", "bought", "kaufen", "kauft", "gekauft"),
    Verb("sell", "sells", "sold", "verkaufen", "verkauft", "verkauft"),
    Verb("carry", "carries", "carried", "tragen", "trägt", "getragen"),
    Verb("clean", "cleans", "cleaned", "putzen", "putzt", "geputzt"),
    Verb("repair", "repairs", "repaired", "reparieren", "repariert", "repariert"),
    Verb("bring", "brings", "brought", "bringen", "bringt", "mitgebracht", "mit", particle="along"),
    Verb("give", "gives", "gave", "geben", "gibt", "zurückgegeben", "zurück", particle="back"),
    Verb("throw", "throws", "threw", "werfen", "wirft", "weggeworfen", "weg", particle="away"),
)
WITH_OPENABLE = (
    Verb("open", "opens", "opened", "machen", "macht", "aufgemacht", "auf"),
    Verb("close", "closes", "closed", "machen", "macht", "zugemacht", "zu"),
)
DITRANSITIVE = (
    Verb("give", "gives", "gave", "geben", "gibt", "gegeben"),
    Verb("show", "shows", "showed", "zeigen", "zeigt", "gezeigt"),
    Verb("send", "sends", "sent", "schicken", "schickt", "geschickt"),
    Verb("lend", "lends", "lent", "leihen", "leiht", "geliehen"),
)

# English -> German third person singular and plural; the first person singular equals the third, except werde
MODALS = {
    "can": ("kann", "können"),
    "must": ("muss", "müssen"),
    "should": ("soll", "sollen"),
    "want to": ("will", "wollen"),
    "will": ("wird", "werden"),
}
# Verbs of saying: English plain form and third person; German first, third and plural person
REPORTING = (
    ("say", "says", "sage", "sagt", "sagen"),
    ("believe", "believes", "glaube", "glaubt", "glauben"),
    ("hope", "hopes", "hoffe", "hofft", "hoffen"),
    ("know", "knows", "weiß", "weiß", "wissen"),
)
CONJUNCTIONS = translations("because weil, although obwohl, when wenn")

WEEKDAYS = translations(
    "Monday Montag, Tuesday Dienstag, Wednesday Mittwoch, Thursday Donnerstag, Friday Freitag, Saturday Samstag, "
    "Sunday Sonntag"
)
MONTHS = translations(
    "January Januar, February Februar, March März, April April, May Mai, June Juni, July Juli, August August, "
    "September September, October Oktober, November November, December Dezember"
)

# --- numbers, dates and clock times: each function returns the English and the German words ---------------------------

# 0 to 19, then the tens from 20 on
_NUMBERS = list(
    translations("""
    zero null, one eins, two zwei, three drei, four vier, five fünf, six sechs, seven sieben, eight acht, nine neun,
    ten zehn, eleven elf, twelve zwölf, thirteen dreizehn, fourteen vierzehn, fifteen fünfzehn, sixteen sechzehn,
    seventeen siebzehn, eighteen achtzehn, nineteen neunzehn,
    twenty zwanzig, thirty dreißig, forty vierzig, fifty fünfzig, sixty sechzig, seventy siebzig, eighty achtzig,
    ninety neunzig""").items()
)
_ENGLISH_ORDINALS = translations(
    "one first, two second, three third, five fifth, eight eighth, nine ninth, twelve twelfth"
)
_GERMAN_ORDINALS = {1: "ersten", 3: "dritten", 7: "siebten", 8: "achten"}


def cardinal(number: int) -> tuple[str, str]:
    """Returns 0 to 99 in words: twenty-one, einundzwanzig."""
    if number < 20:
        return _NUMBERS[number]
    tens, ones = divmod(number, 10)
    english, german = _NUMBERS[18 + tens]  # entry 20 is twenty, entry 21 is thirty
    if not ones:
        return english, german
    return f"{english}-{_NUMBERS[ones][0]}", f"{'ein' if ones == 1 else _NUMBERS[ones][1]}und{german}"


def ordinal(number: int) -> tuple[str, str]:
    """Returns 1 to 99 as ordinals: twenty-first, einundzwanzigsten. The German form is the dative after "am"."""
    english, german = cardinal(number)
    head, hyphen, last = english.rpartition("-")
    last = last[:-1] + "ieth" if last.endswith("y") else _ENGLISH_ORDINALS.get(last, last + "th")
    return head + hyphen + last, _GERMAN_ORDINALS.get(number, german + ("ten" if number < 20 else "sten"))


def date(day: int, month: str) -> tuple[str, str]:
    """Returns "on the twenty-first of March", "am einundzwanzigsten März"; `month` is the English name."""
    english, german = ordinal(day)
    return f"on the {english} of {month}", f"am {german} {MONTHS[month]}"


def clock(hour: int, minute: int) -> tuple[str, str]:
    """Returns the time of day: "half past seven", "halb acht". `hour` is from 1 to 12.

    Full hours, halves, quarters and most multiples of five minutes are relative to an hour. Other times are two
    numbers.
    """
    following = cardinal(hour % 12 + 1)
    english, german = cardinal(hour)
    german_hour = "ein" if hour == 1 else german
    if minute == 0:
        return f"{english} o'clock", f"{german_hour} Uhr"
    if minute == 30:
        return f"half past {english}", f"halb {following[1]}"
    if minute in (5, 10, 15, 20, 40, 45, 50, 55):
        distance = min(minute, 60 - minute)
        amount = ("a quarter", "Viertel") if distance == 15 else cardinal(distance)
        if minute < 30:
            return f"{amount[0]} past {english}", f"{amount[1]} nach {german}"
        return f"{amount[0]} to {following[0]}", f"{amount[1]} vor {following[1]}"
    minutes = cardinal(minute)
    return f"{english} {'oh ' * (minute < 10)}{minutes[0]}", f"{german_hour} Uhr {minutes[1]}"
