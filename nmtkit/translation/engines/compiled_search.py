"""Beam search of a compiled Transformer for many sentences, as one function compiled by Numba.

All open hypotheses of all sentences are rows of one product. When the search of a sentence is over, the next sentence
takes its place. The search finds the same hypotheses as torch's beam search, with the same rules, and a sentence has
the same hypotheses alone and beside any other sentences, because each row is computed alike in any product.
"""

from typing import Any, NamedTuple

import numpy as np

from nmtkit.data.tokenizers.tokenizer import BOS, EOS, UNK
from nmtkit.translation.engines.compiled_code import compiled, inner
from nmtkit.translation.engines.compiled_kernels import OUTPUTS, block_maxima, kernels, sum_of_exponentials
from nmtkit.translation.engines.compiled_model import (
    NO_FLOOR,
    Array,
    Caches,
    CompiledTransformer,
    StepRows,
    encode,
    product,
    space_for,
    step,
)
from nmtkit.translation.engines.compiled_shortlists import Output, memory_of_shortlists, pack_shortlist

kernels.build()  # Numba links the functions below with the kernels

ENCODED = 192  # source tokens that are encoded together; the last sentence may exceed this number
LOGITS = 16  # rows whose logits are computed together, so that they stay in the cache of the processor
STEPS = 32  # positions for which memory is reserved at first
INFINITY = np.inf


class SourceSentences(NamedTuple):
    """The source sentences of a search, with the limits and the prefix of each output."""

    ids: Array  # tokens of all sentences
    starts: Array  # index of the first token of each sentence, then the number of tokens
    max_lengths: Array  # longest output, in tokens without eos
    prefixes: Array  # tokens of all prefixes
    prefix_starts: Array
    language_tokens: Array  # tokens at the start of the prefix that do not count in lengths and scores
    columns: Array  # sorted target pieces of the shortlists of all sentences; without shortlists, empty
    column_starts: Array


class Settings(NamedTuple):
    slots: int  # sentences that are searched at the same time
    beam: int
    nbest: int
    lenpen: float
    min_length: int
    unknown_penalty: float  # subtracted from the log probability of <unk>; infinite: <unk> is forbidden
    no_repeat: int  # n-grams of this size occur once at most; 0: any number of times


class Results(NamedTuple):
    """The best finished hypotheses of each sentence, best first. Free places have the score -inf."""

    scores: Array  # sentences x nbest, float64
    log_probabilities: Array  # float64
    lengths: Array
    tokens: Array  # sentences x nbest x longest length


@inner
def penalty(length: int, lenpen: float) -> Any:
    """Returns the same as `rules.length_penalty` for an output of `length` pieces, eos included."""
    return ((5.0 + length) / 6.0) ** lenpen


@inner
def encode_all(model: CompiledTransformer, sentences: SourceSentences, everything: Array) -> Array:
    """Returns keys and values of the memories of all sentences, in groups of about ENCODED tokens."""
    sizes, starts = model.sizes, sentences.starts
    total = starts[-1]
    longest = 0
    for sentence in range(len(starts) - 1):
        longest = max(longest, starts[sentence + 1] - starts[sentence])
    space = space_for(model, min(total, ENCODED + longest), longest)
    memory = np.empty((sizes.decoder_layers, total, (2 * sizes.width + 63) // 64 * 64), np.float32)
    first = 0
    while first < len(starts) - 1:
        end = first + 1
        while end < len(starts) - 1 and starts[end] - starts[first] < ENCODED:
            end += 1
        start = starts[first]
        encode(
            model, space, sentences.ids[start : starts[end]], starts[first : end + 1] - start, everything, memory, start
        )
        first = end
    return memory


@inner
def insert(
    scores: Array, hypotheses: Array, tokens: Array, count: int, score: float, hypothesis: int, token: int
) -> None:
    """Inserts a continuation, so that the first `count` continuations are sorted. The last one of them is lost."""
    rank = count - 1
    while rank and scores[rank - 1] < score:
        scores[rank], hypotheses[rank], tokens[rank] = scores[rank - 1], hypotheses[rank - 1], tokens[rank - 1]
        rank -= 1
    scores[rank], hypotheses[rank], tokens[rank] = score, hypothesis, token


@inner
def add_continuations(
    logits: Array,
    vocabulary: int,
    maxima: Array,
    offset: float,
    only: int,
    hypothesis: int,
    count: int,
    scores: Array,
    hypotheses: Array,
    tokens: Array,
) -> int:
    """Adds the most probable continuations of a hypothesis to the best continuations of its sentence.

    The log probability of a continuation is the logit of its new token plus `offset`. If `only` is not negative, the
    hypothesis continues with this token. Tokens with the logit -inf are left out. `maxima` are the maxima of blocks of
    logits. Returns the number of continuations, of which there were `count` before.
    """
    size = len(scores)
    if only >= 0:
        score = logits[only] + offset
        if np.isfinite(score) and (count < size or score > scores[size - 1]):
            count = min(count + 1, size)
            insert(scores, hypotheses, tokens, count, score, hypothesis, only)
        return count
    limit = scores[size - 1] - offset - 1e-3 if count == size else -INFINITY  # smaller logits are not among the best
    for block in range((vocabulary + OUTPUTS - 1) // OUTPUTS):
        if not maxima[block] > limit:
            continue
        for token in range(block * OUTPUTS, min((block + 1) * OUTPUTS, vocabulary)):
            if not logits[token] > limit:
                continue
            if count < size or logits[token] + offset > scores[size - 1]:
                count = min(count + 1, size)
                insert(scores, hypotheses, tokens, count, logits[token] + offset, hypothesis, token)
            if count == size:
                limit = scores[size - 1] - offset - 1e-3
    return count


@inner
def finish(
    results: Results, sentence: int, score: float, log_probability: float, places: Array, tokens: Array, length: int
) -> None:
    """Adds a hypothesis of `length` tokens to the results of a sentence."""
    scores, outputs = results.scores[sentence], results.tokens[sentence]
    rank = len(scores) - 1
    while rank and scores[rank - 1] < score:
        scores[rank] = scores[rank - 1]
        results.log_probabilities[sentence, rank] = results.log_probabilities[sentence, rank - 1]
        results.lengths[sentence, rank] = results.lengths[sentence, rank - 1]
        for index in range(outputs.shape[1]):
            outputs[rank, index] = outputs[rank - 1, index]
        rank -= 1
    scores[rank], results.log_probabilities[sentence, rank] = score, log_probability
    results.lengths[sentence, rank] = length
    for index in range(length):
        outputs[rank, index] = tokens[places[index + 1]]


@compiled
def search(model: CompiledTransformer, output: Output, sentences: SourceSentences, settings: Settings) -> Results:
    """Returns the best hypotheses of each sentence."""
    sizes, starts, beam = model.sizes, sentences.starts, settings.beam
    number = len(starts) - 1
    slots = min(settings.slots, number)
    hypotheses = slots * beam
    longest_source = 0
    for sentence in range(number):
        longest_source = max(longest_source, starts[sentence + 1] - starts[sentence])
    longest = 0
    for sentence in range(number):
        longest = max(longest, sentences.max_lengths[sentence] + 1)
    everything = np.arange(longest_source)
    memory = encode_all(model, sentences, everything)
    results = Results(
        np.full((number, settings.nbest), -INFINITY),
        np.full((number, settings.nbest), -INFINITY),
        np.zeros((number, settings.nbest), np.int64),
        np.zeros((number, settings.nbest, longest), np.int32),
    )
    capacity = min(STEPS, longest)
    keys_and_values, places, cached_tokens = cache_for(model, hypotheses, capacity)
    states = np.zeros((sizes.decoder_layers, 2, hypotheses if model.options.recurrent else 0, sizes.width), np.float32)
    old_places = np.empty((beam, longest), np.int64)
    space = space_for(model, hypotheses, max(longest_source, longest))
    has_shortlists = len(sentences.columns) > 0
    vocabulary = sizes.vocabulary
    if has_shortlists:
        vocabulary = 0
        for sentence in range(number):
            vocabulary = max(vocabulary, sentences.column_starts[sentence + 1] - sentences.column_starts[sentence])
    shortlists = memory_of_shortlists(model, output, slots if has_shortlists else 0, vocabulary)
    outputs = shortlists.table if has_shortlists else model.linears[len(model.linears) - 1 :]
    logits = np.empty((LOGITS, (vocabulary + OUTPUTS - 1) // OUTPUTS * OUTPUTS), np.float32)
    maxima = np.empty(logits.shape[1] // OUTPUTS, np.float32)

    rows = StepRows(
        np.zeros(hypotheses, np.int64), np.zeros(hypotheses, np.int64), np.zeros(hypotheses, np.int64),
        np.zeros(hypotheses, np.int64), np.zeros(hypotheses, np.int64), np.zeros(hypotheses, np.int64),
    )  # fmt: skip
    sentence_of = np.full(slots, -1)  # the sentence of each slot; -1: none
    lengths = np.zeros(slots, np.int64)  # tokens of the open hypotheses
    before = np.full((slots, beam), -INFINITY)  # log probabilities of the open hypotheses
    newest, parents = np.zeros((slots, beam), np.int64), np.zeros((slots, beam), np.int64)
    counts = np.zeros(slots, np.int64)
    best_scores = np.empty((slots, 2 * beam))
    best_hypotheses, best_tokens = np.zeros((slots, 2 * beam), np.int64), np.zeros((slots, 2 * beam), np.int64)
    following = 0  # the next sentence
    while True:
        count = 0
        for slot in range(slots):
            if sentence_of[slot] < 0 and following < number:
                sentence_of[slot], lengths[slot] = following, 0
                for i in range(beam):
                    before[slot, i], newest[slot, i], parents[slot, i] = -INFINITY if i else 0.0, BOS, 0
                for layer in range(sizes.decoder_layers if model.options.recurrent else 0):
                    for i in range(sizes.width):
                        states[layer, 0, slot * beam, i] = 0
                if has_shortlists:
                    begin, end = sentences.column_starts[following], sentences.column_starts[following + 1]
                    pack_shortlist(output, sentences.columns[begin:end], shortlists, slot)
                following += 1
            sentence = sentence_of[slot]
            if sentence < 0:
                continue
            length = lengths[slot]
            if length == capacity:
                keys_and_values, places, cached_tokens = longer_cache(keys_and_values, places, cached_tokens)
                capacity *= 2
            for i in range(beam):
                if before[slot, i] > -INFINITY:
                    hypothesis = slot * beam + i
                    place = hypothesis * capacity + length
                    token = newest[slot, i]
                    places[hypothesis, length], cached_tokens[place] = place, token
                    if has_shortlists:
                        token = sentences.columns[sentences.column_starts[sentence] + token]
                    rows.tokens[count], rows.lengths[count], rows.slots[count] = token, length, hypothesis
                    rows.parents[count] = slot * beam + parents[slot, i]
                    rows.memory_starts[count] = starts[sentence]
                    rows.memory_sizes[count] = starts[sentence + 1] - starts[sentence]
                    count += 1
            counts[slot] = 0
        if not count:
            return results
        step(model, space, rows, count, Caches(keys_and_values, places, states, memory), everything)
        first = part = 0
        while first + part < count:
            first, part = first + part, min(LOGITS, count - first - part)
            table = 0
            if has_shortlists:  # the rows of a single sentence
                table, rest = rows.slots[first] // beam, part
                part = 1
                while part < rest and rows.slots[first + part] // beam == table:
                    part += 1
                begin = sentences.column_starts[sentence_of[table]]
                vocabulary = sentences.column_starts[sentence_of[table] + 1] - begin
            product(outputs, space, space.x[first:], part, table, logits, NO_FLOOR, 0)
            columns = (vocabulary + OUTPUTS - 1) // OUTPUTS * OUTPUTS
            for row in range(part):
                hypothesis = rows.slots[first + row]
                slot, i = hypothesis // beam, hypothesis % beam
                sentence, length, x = sentence_of[slot], lengths[slot], logits[row]
                start = sentences.prefix_starts[sentence]
                prefix = sentences.prefix_starts[sentence + 1] - start
                only = -1
                if length < prefix:
                    only = sentences.prefixes[start + length]
                elif length >= sentences.max_lengths[sentence]:
                    only = EOS
                offset = before[slot, i]
                if length < sentences.language_tokens[sentence]:
                    x[only] = 0
                else:
                    largest = block_maxima(x.ctypes.data, columns, maxima.ctypes.data)
                    offset -= largest + np.log(sum_of_exponentials(x.ctypes.data, columns, largest))
                    if length >= prefix:  # a prefix is not subject to the rules below
                        x[BOS] = -INFINITY
                        x[UNK] -= settings.unknown_penalty
                        if length - sentences.language_tokens[sentence] < settings.min_length:
                            x[EOS] = -INFINITY
                        if settings.no_repeat and length >= settings.no_repeat:
                            forbid_repeats(x, places[hypothesis], cached_tokens, length, settings.no_repeat)
                if np.isfinite(offset):  # else the logits overflowed
                    counts[slot] = add_continuations(
                        x, vocabulary, maxima, offset, only, i, counts[slot], best_scores[slot], best_hypotheses[slot],
                        best_tokens[slot],
                    )  # fmt: skip
        for slot in range(slots):
            sentence = sentence_of[slot]
            if sentence < 0:
                continue
            length, row = lengths[slot], 0
            pieces = length - sentences.language_tokens[sentence]
            for i in range(beam):
                before[slot, i] = -INFINITY
            worst = settings.nbest - 1
            for i in range(counts[slot]):
                score, hypothesis, token = best_scores[slot, i], best_hypotheses[slot, i], best_tokens[slot, i]
                if token != EOS:
                    if row < beam:
                        before[slot, row], parents[slot, row], newest[slot, row] = score, hypothesis, token
                        row += 1
                elif i < beam:
                    final = score / penalty(pieces + 1, settings.lenpen)
                    if final > results.scores[sentence, worst]:
                        finish(results, sentence, final, score, places[slot * beam + hypothesis], cached_tokens, length)
            threshold = results.scores[sentence, worst]
            longest_pieces = sentences.max_lengths[sentence] - sentences.language_tokens[sentence]
            longest_penalty = penalty(longest_pieces + 1, settings.lenpen)
            open_score = -INFINITY
            for i in range(row):
                open_score = max(open_score, before[slot, i])
            within_reach = open_score / max(longest_penalty, penalty(pieces + 2, settings.lenpen))
            if within_reach <= threshold or (beam == 1 and threshold > -INFINITY):
                sentence_of[slot] = -1
                continue
            lengths[slot] = length + 1
            moved = False
            for i in range(row):
                moved = moved or parents[slot, i] != i
            if moved:
                for i in range(beam):
                    for position in range(length + 1):
                        old_places[i, position] = places[slot * beam + i, position]
                for i in range(row):
                    for position in range(length + 1):
                        places[slot * beam + i, position] = old_places[parents[slot, i], position]


@inner
def forbid_repeats(logits: Array, places: Array, tokens: Array, length: int, size: int) -> None:
    """Forbids the tokens that would complete a second occurrence of `size` successive tokens of a hypothesis."""
    for start in range(1, length - size + 2):  # the token at position 0 is bos
        same = True
        for index in range(size - 1):
            same = same and tokens[places[start + index]] == tokens[places[length - size + 2 + index]]
        if same:
            logits[tokens[places[start + size - 1]]] = -INFINITY


@inner
def cache_for(model: CompiledTransformer, hypotheses: int, capacity: int) -> tuple[Array, Array, Array]:
    """Returns memory for keys and values, for the places of the tokens of hypotheses, and for these tokens."""
    sizes = model.sizes
    size = 0 if model.options.recurrent else hypotheses * capacity
    return (
        np.empty((sizes.decoder_layers, size, 2 * sizes.width), np.float32),
        np.zeros((hypotheses, capacity), np.int64),
        np.zeros(hypotheses * capacity, np.int64),
    )


@inner
def longer_cache(keys_and_values: Array, places: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Returns copies of the memory of `cache_for` for twice as many positions."""
    hypotheses, capacity = places.shape
    layers, size, width = keys_and_values.shape
    wide = np.empty((layers, 2 * size, width), np.float32)
    wide_places, wide_tokens = np.zeros((hypotheses, 2 * capacity), np.int64), np.zeros(2 * len(tokens), np.int64)
    for hypothesis in range(hypotheses):
        old, new = hypothesis * capacity, 2 * hypothesis * capacity
        for position in range(capacity):
            place = places[hypothesis, position]
            wide_places[hypothesis, position] = place + place // capacity * capacity
            wide_tokens[new + position] = tokens[old + position]
            for layer in range(layers if size else 0):
                for i in range(width):
                    wide[layer, new + position, i] = keys_and_values[layer, old + position, i]
    return wide, wide_places, wide_tokens
