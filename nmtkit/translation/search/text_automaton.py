"""An automaton over the tokens of a hypothesis, which tracks the required texts that the hypothesis contains.

The automaton reads characters, so that any tokens can spell a text. The bytes of an incomplete character wait for the
next token.
"""

import codecs
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.text.alignment import ZERO_WIDTH_JOINER, has_letter, is_joined
from nmtkit.text.glossary import is_attached, is_within_word
from nmtkit.translation.search.constraints import IMPOSSIBLE, RequiredText, SpelledPhrase, spelling_costs, text_bytes

# Maximum number of readings (see `TextAutomaton`) of a hypothesis. If there are more, which happens with about 7 texts,
# the most advanced readings stay.
READINGS = 64
LETTER, DIGIT, SIGN = "a", "0", "."  # a letter of a script with spaces; a digit; any other character

# a bit for each complete text; the index of the text that has begun; its characters so far, "" if no text has begun
Reading = tuple[int, int, str]


class AutomatonState(NamedTuple):
    """A state of the automaton after some tokens."""

    readings: tuple[frozenset[Reading], ...]  # the readings of each group of texts
    last: str  # the kind of the last character (LETTER, DIGIT or SIGN), or a joiner
    pending: bytes  # the bytes of an incomplete character


class SpelledAlternative:
    """An alternative of a required text, with the tokens that can spell the text. Positions are in bytes.

    The usual tokens are the tokens with which the tokenizer spells the text: `spelling.tokens`.
    """

    def __init__(self, spelling: SpelledPhrase, required: RequiredText) -> None:
        self.text, self.pieces = spelling.text, required.pieces
        self.data = text_bytes(self.text)
        self.spaced = self.data if self.data.startswith(b" ") else b" " + self.data  # the text with a space before it
        self.costs = spelling_costs(self.data, self.pieces)
        self.spaced_costs = spelling_costs(self.spaced, self.pieces)
        can_be_spaced = self.spaced_costs[0] < IMPOSSIBLE or required.whole_words
        self.begins_word = can_be_spaced and is_joined(LETTER + self.text[0], 1)
        # the smallest number of tokens for an occurrence that can follow any character
        self.cost = self.spaced_costs[0] if self.begins_word else min(self.spaced_costs[0], self.costs[0])
        texts = [self.pieces.texts[token] for token in spelling.tokens]
        position = _spaces(self.data) - _spaces(b"".join(texts))
        self.usual: dict[int, int] = {}  # position -> the token of `spelling.tokens` that begins there
        self.ends = []  # positions of the ends of these tokens
        for token, text in zip(spelling.tokens, texts, strict=True):
            self.usual[position] = token
            position += len(text)
            self.ends.append(min(position, len(self.data)))
        self.tokens_at = cache(self._tokens_at)

    def is_forced(self, last: str) -> bool:
        """Returns whether the search may force an occurrence after the character `last`.

        An occurrence inside a longer word counts, but the search forces such an occurrence only if the vocabulary
        cannot write the text at the beginning of a word.
        """
        return not (self.begins_word and is_joined(last + self.text[0], 1))

    def rest(self, begun: str, pending: bytes) -> int:
        """Returns the smallest number of tokens that complete the text after the characters `begun`."""
        position = len(text_bytes(begun))
        return self.costs[position + len(pending)] if self.data.startswith(pending, position) else IMPOSSIBLE

    def _tokens_at(self, position: int) -> list[int]:
        """Returns the tokens that can continue the text at a position. At position -1, tokens begin with a space."""
        data, costs, start = (self.spaced, self.spaced_costs, 0) if position < 0 else (self.data, self.costs, position)
        tokens = []
        for end in range(start + 1, min(len(data), start + self.pieces.longest) + 1):
            if costs[end] <= costs[start]:
                tokens += self.pieces.equal.get(data[start:end], [])
        return [*tokens, *([self.usual[position]] if position in self.usual else [])]

    def tokens_after(self, begun: str, pending: bytes) -> list[int]:
        position = len(text_bytes(begun))
        return self.tokens_at(position + len(pending)) if self.data.startswith(pending, position) else []


def _spaces(data: bytes) -> int:
    return len(data) - len(data.lstrip(b" "))


class SpelledText:
    """A required text, prepared for the search: its alternatives, and the tokens that can spell each alternative."""

    def __init__(self, required: RequiredText) -> None:
        self.whole_words = required.whole_words
        self.alternatives = [SpelledAlternative(each, required) for each in required.alternatives]
        self.texts = {each.text for each in self.alternatives}
        self.signs = {text[0] for text in self.texts if not has_letter(text)}
        self.beginnings = {text[:end] for text in self.texts for end in range(1, len(text) + 1)}
        self.length = min(len(each.ends) for each in self.alternatives)  # usual tokens of the shortest alternative
        # the smallest number of tokens for an occurrence that can follow any character
        self.cost = min(each.cost for each in self.alternatives)
        self.containing: list[int] = []  # tokens that contain the text, if no tokens spell the text alone
        if self.cost == IMPOSSIBLE:
            self.cost = 1
            self.containing = [token for text in self.texts for token in required.pieces.contains(text_bytes(text))]

    def can_begin(self, char: str, last: str) -> bool:
        """Returns whether an occurrence can begin with `char` after the character `last`."""
        if not self.whole_words:
            return True
        return not is_joined(last + char, 1) and (char in self.signs or not is_attached(last, char))

    def begun(self, begun: str) -> Iterator[SpelledAlternative]:
        """Yields the alternatives that begin with `begun`."""
        return (each for each in self.alternatives if each.text.startswith(begun))

    def rest(self, begun: str, pending: bytes) -> int:
        """Returns the smallest number of tokens that complete an occurrence after the characters `begun`."""
        return min(each.rest(begun, pending) for each in self.begun(begun))

    def usual_rest(self, begun: str) -> int:
        """Returns the number of usual tokens that end after the characters `begun`: the minimum of all alternatives."""
        position = len(text_bytes(begun))
        return min(sum(end > position for end in each.ends) for each in self.begun(begun))

    def cost_after(self, last: str, pending: bytes) -> int:
        """Returns the smallest number of tokens for an occurrence that begins after the character `last`."""
        free = [each.rest("", pending) for each in self.alternatives if each.is_forced(last)]
        return min([self.cost, *free])

    def first_tokens(self, last: str, pending: bytes) -> Iterator[int]:
        """Yields useful tokens for the beginning of an occurrence after the character `last`."""
        yield from self.containing
        for each in self.alternatives:
            if not pending:
                yield from each.tokens_at(-1)
            if each.is_forced(last):
                yield from each.tokens_after("", pending)


spelled_text = lru_cache(maxsize=256)(SpelledText)


class TextAutomaton:
    """Tracks the required texts that a hypothesis contains. States are numbered from 0 in the order of their use.

    Different texts may overlap, but a text that is required twice must occur twice. If `ordered`, the texts must occur
    in their order without overlap. Terms of a glossary (whole words) must not overlap either. Texts that must not
    overlap form a group.

    A reading assigns characters of the hypothesis to the texts of a group. There can be several readings: if "cab" and
    "bed" are required in a group, the b in "cabed" can end the first text or begin the second text. A state has the
    readings of each group (a subset construction). If a text must be a whole word, a reading that has just
    completed the text contains the text. If the next character continues the word, the reading is dropped.
    """

    def __init__(self, required: Sequence[RequiredText], ordered: bool) -> None:
        self.required, self.ordered = required, ordered
        self.pieces = required[0].pieces
        self.texts = list(map(spelled_text, required))
        numbers: dict[RequiredText, int] = {}
        self.first_equal = [numbers.setdefault(text, index) for index, text in enumerate(required)]
        groups: dict[object, list[int]] = {}
        for index, text in enumerate(required):
            groups.setdefault("all" if ordered else text.whole_words or text.alternatives, []).append(index)
        self.groups = list(groups.values())
        self.numbers: dict[AutomatonState, int] = {}
        self.states: list[AutomatonState] = []
        self.next, self.useful, self.facts = cache(self._next), cache(self._useful), cache(self._facts)
        first = AutomatonState(tuple(frozenset({(0, 0, "")}) for _ in self.groups), SIGN, b"")
        self.number_of(self.after(first, b" "))  # a line begins like a word after a space

    def _next(self, state: int, token: int) -> int:
        """Returns the state after one more token. The token eos counts as a space."""
        return self.number_of(self.after(self.states[state], self.pieces.texts[token]))

    def holds(self, tokens: Sequence[int]) -> bool:
        """Returns whether a complete output contains all texts."""
        state = 0
        for token in (*tokens, EOS):
            state = self.next(state, token)
        return self.facts(state)[0] == 0

    def number_of(self, state: AutomatonState) -> int:
        if state not in self.numbers:
            self.numbers[state] = len(self.states)
            self.states.append(state)
        return self.numbers[state]

    def after(self, state: AutomatonState, data: bytes) -> AutomatonState:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        readings, last = state.readings, state.last
        for char in decoder.decode(state.pending + data):
            readings = tuple(
                self.kept({after for reading in each for after in self.readings_after(reading, char, group, last)})
                for each, group in zip(readings, self.groups, strict=True)
            )
            last = char if char == ZERO_WIDTH_JOINER else SIGN
            if is_joined(LETTER + char, 1):
                last = DIGIT if char.isnumeric() else LETTER
        return AutomatonState(readings, last, decoder.getstate()[0])

    def kept(self, readings: set[Reading]) -> frozenset[Reading]:
        """Removes a reading if another reading has begun the same text equally far, and has completed more texts.

        If there are more than READINGS readings, keeps only the most advanced readings.
        """
        if len(readings) == 1:
            return frozenset(readings)
        best = [
            (held, index, begun)
            for held, index, begun in readings
            if not any(held & other == held != other and rest == [index, begun] for other, *rest in readings)
        ]
        if len(best) > READINGS:
            best.sort(key=lambda reading: (not reading[2], reading[0].bit_count(), len(reading[2])))
        return frozenset(best[-READINGS:])

    # --- facts about a state ------------------------------------------------------------------------------------------

    def _facts(self, number: int) -> tuple[int, int]:
        """Returns the smallest number of further tokens that complete all texts, and the bank.

        The bank counts the usual tokens of required texts that the hypothesis already contains.
        """
        state = self.states[number]
        needed = gain = bank = 0
        for group, readings in zip(self.groups, state.readings, strict=True):
            missing = min(self.missing(reading, group) for reading in readings)
            needed += missing
            # each group may have begun a text, but the next tokens continue only one text: the largest saving counts
            gain = max(gain, missing - min(self.needed(reading, group, state) for reading in readings))
            total = sum(self.texts[index].length for index in group)
            bank += max(0, total - min(self.usual(reading, group) for reading in readings))
        return needed - gain, bank

    def missing(self, reading: Reading, group: Sequence[int]) -> int:
        """Returns the number of tokens for the texts of `group` that `reading` lacks.

        A text that has begun but is not complete counts as lacking.
        """
        held, index, begun = reading
        if begun in self.texts[index].texts:
            held |= 1 << index
        return sum(self.texts[i].cost for i in group if not held >> i & 1)

    def needed(self, reading: Reading, group: Sequence[int], state: AutomatonState) -> int:
        """Returns the number of tokens that complete all texts of `group`, after the characters of the begun text."""
        held, index, begun = reading
        if begun and begun not in self.texts[index].texts:
            others = sum(self.texts[i].cost for i in group if not held >> i & 1 and i != index)
            return others + min(self.texts[index].rest(begun, state.pending), self.texts[index].cost)
        held |= bool(begun) << index
        savings = [
            self.texts[i].cost - self.texts[i].cost_after(state.last, state.pending)
            for i in self.startable(held, group)
        ]
        return self.missing(reading, group) - max(savings, default=0)

    def usual(self, reading: Reading, group: Sequence[int]) -> int:
        held, index, begun = reading
        others = sum(self.texts[i].length for i in group if not held >> i & 1 and not (begun and i == index))
        return others + (self.texts[index].usual_rest(begun) if begun else 0)

    def _useful(self, number: int) -> list[int]:
        """Returns the tokens that begin or continue a text."""
        state = self.states[number]
        tokens: set[int] = set()
        for group, readings in zip(self.groups, state.readings, strict=True):
            for held, index, begun in readings:
                if begun:
                    tokens.update(*(each.tokens_after(begun, state.pending) for each in self.texts[index].begun(begun)))
                if not begun or begun in self.texts[index].texts:
                    for start in self.startable(held | bool(begun) << index, group):
                        tokens.update(self.texts[start].first_tokens(state.last, state.pending))
        return sorted(tokens)

    # --- readings -----------------------------------------------------------------------------------------------------

    def startable(self, held: int, group: Sequence[int]) -> Iterator[int]:
        """Yields the index of each text of a group that may begin at the next character.

        Bit i of `held` is 1 if text i is already in the output. If `ordered`, only the first text that the output
        lacks may begin. Of several equal texts, only the first is yielded.
        """
        seen: set[int] = set()
        for index in group:
            if not held >> index & 1 and self.first_equal[index] not in seen:
                yield index
                if self.ordered:
                    return
                seen.add(self.first_equal[index])

    def readings_after(self, reading: Reading, char: str, group: Sequence[int], last: str) -> Iterator[Reading]:
        """Yields the readings after one more character."""
        held, index, begun = reading
        if begun:
            yield from self.begun_with(held, index, begun + char)
            if begun not in self.texts[index].texts or is_joined(last + char, 1) or is_within_word(begun, "", char):
                return
            held |= 1 << index
        yield held, 0, ""
        for start in self.startable(held, group):
            if char in self.texts[start].beginnings and self.texts[start].can_begin(char, last):
                yield from self.begun_with(held, start, char)

    def begun_with(self, held: int, index: int, characters: str) -> Iterator[Reading]:
        """Yields the reading in which a text has begun with `characters`, if an alternative begins with them."""
        text = self.texts[index]
        if characters in text.texts and not text.whole_words:
            yield held | 1 << index, 0, ""
        elif characters in text.beginnings:
            yield held, index, characters
