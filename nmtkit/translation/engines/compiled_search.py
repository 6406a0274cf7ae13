"""Greedy search, beam search and sampling of compiled Transformers for many sentences, as functions compiled by Numba.

A thread searches several sentences at a time, each in a slot. The open hypotheses of all slots are rows of the same
matrix product. When the search of a sentence is over, the next sentence takes the slot. The search has the same rules
as the search of PyTorch, and finds the same hypotheses in fp32. The result of a row does not depend on the other rows,
so a sentence gets the same hypotheses in any batch, and several threads can take sentences from the same list.
"""

from typing import Any, NamedTuple

import numpy as np

from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.translation.engines.compiled_code import Array, compiled, inner
from nmtkit.translation.engines.compiled_kernels import (
    OUTPUTS,
    block_maxima,
    kernels,
    logarithms,
    mixed,
    next_above,
    sum_of_exponentials,
    taken,
)
from nmtkit.translation.engines.compiled_model import NO_FLOOR, encode, record, step
from nmtkit.translation.engines.compiled_products import filled, linear, pack_shortlist
from nmtkit.translation.engines.compiled_rules import (
    INFINITY,
    AvoidedTexts,
    Ragged,
    Settings,
    draw,
    forbid,
    forbid_others,
    forbid_repeats,
    forbid_text,
    list_of,
)

kernels.build()  # Numba links the functions below with the kernels

ENCODED = 192  # source tokens that are encoded together; the last sentence may exceed this number
LOGITS = 16  # rows whose logits are computed together, so that they stay in the cache of the processor
NO_SENTENCE = -1


class SourceSentences(NamedTuple):
    """The source sentences of a search, with the limits and the constraints of each output."""

    sources: Ragged
    max_lengths: Array  # longest output, in tokens without eos
    language_tokens: Array  # tokens at the start of the prefix that do not count in lengths and scores
    prefixes: Ragged
    allowed: Ragged  # tokens that can follow the prefix; an empty list allows all tokens
    columns: Ragged  # sorted target pieces of the shortlists; without shortlists, all lists are empty
    avoided: Ragged  # indices of the avoided texts
    texts: AvoidedTexts
    uniform: Ragged  # random numbers for sampling: positions x samples


# Fields of a slot: the index of the sentence, the number of tokens of each open hypothesis, and the number of the best
# continuations of these hypotheses.
SLOT = record("sentence length count")


class SearchState(NamedTuple):
    """The models, and the arrays in which a search keeps its slots and its open hypotheses.

    V is the size of the target vocabulary or, with shortlists, at least the length of the longest shortlist.
    """

    models: Array  # records MODEL
    spaces: Array  # records SPACE, one for each model, like `caches`
    caches: Array  # records CACHE
    # models x COLUMNS: the output projection of each model, as a row of a table of linear layers. For searches with
    # shortlists, the weights of each piece are a row of the weight matrix (`WeightTables.output_rows`).
    outputs: Array
    tables: Array  # models x slots x COLUMNS: packed output projections of the shortlists
    slots: Array  # records SLOT
    rows: Array  # records ROW: the rows of a step
    before: Array  # slots x beam: log probabilities of the open hypotheses
    newest: Array  # slots x beam: the newest token of each open hypothesis
    parents: Array  # slots x beam: the hypothesis of the previous step that each open hypothesis continues
    best_scores: Array  # slots x 2 beam: log probabilities of the best continuations, best first
    best_hypotheses: Array
    best_tokens: Array
    logits: Array  # models x LOGITS x V
    maxima: Array  # maxima of blocks of logits
    weights: Array  # V: probabilities of the tokens, when a sample is drawn
    places: Array  # hypotheses x capacity: the place of each token of a hypothesis in the cache
    tokens: Array  # the token at each place
    totals: Array  # the log probability of the hypothesis that ends at each place
    old_places: Array  # beam x capacity
    recorded: Array  # places x source tokens: attention weights; empty if they are not requested
    counter: Array  # the number of sentences that searches have taken; shared by all threads


class Results(NamedTuple):
    """The best finished hypotheses of each sentence, best first. Unused entries have the score -inf.

    The tokens, length, gains and attention weights of rank r of a sentence have the index order[sentence, r].
    """

    scores: Array  # sentences x nbest, float64
    log_probabilities: Array  # float64
    lengths: Array
    order: Array
    tokens: Array  # sentences x nbest x (longest maximum length + 1)
    gains: Array  # the log probabilities of these tokens and of eos; empty if they are not requested
    attention: Ragged  # for each sentence: nbest x (maximum length + 1) x source tokens; empty if not requested


@inner
def penalty(length: int, lenpen: float) -> Any:
    """Returns the same as `rules.length_penalty` for an output of `length` pieces, eos included."""
    return ((5.0 + length) / 6.0) ** lenpen


@compiled
def encode_sentences(state: SearchState, sources: Ragged, groups: Array) -> None:
    """Encodes source sentences. Several threads call this function, and share the groups of sentences.

    A thread takes the next free group, encodes it, and returns when no group is free. `groups` holds the index of the
    first sentence of each group, and as its last element the number of all sentences.
    """
    while True:
        group = taken(state.counter.ctypes.data)
        if group >= len(groups) - 1:
            return
        starts = sources.starts[groups[group] : groups[group + 1] + 1]
        for index in range(len(state.models)):
            encode(state.models[index], state.spaces[index], state.caches[index], sources.values, starts)


@compiled
def search(state: SearchState, sentences: SourceSentences, results: Results, settings: Settings) -> bool:
    """Searches until no sentence is left and all slots are free. Returns False if the cache needs more positions."""
    has_shortlists = len(sentences.columns.values) > 0
    while True:
        fill_slots(state, sentences, settings)
        count = collect_rows(state, sentences, settings)
        if count <= 0:
            return count == 0
        models = len(state.models)
        for index in range(models):
            step(state.models[index], state.spaces[index], state.caches[index], state.rows, count,
                 np.float32(1) / np.float32(models))  # fmt: skip
        first = part = 0
        while first + part < count:
            first, part = first + part, min(LOGITS, count - first - part)
            slot = state.rows[first].hypothesis // settings.beam
            vocabulary = state.models[0].vocabulary
            if has_shortlists:  # the rows of a single sentence
                rest, part = part, 1
                while part < rest and state.rows[first + part].hypothesis // settings.beam == slot:
                    part += 1
                sentence = state.slots[slot].sentence
                vocabulary = sentences.columns.starts[sentence + 1] - sentences.columns.starts[sentence]
            columns = (vocabulary + OUTPUTS - 1) // OUTPUTS * OUTPUTS
            for index in range(models):
                space, logits = state.spaces[index], state.logits[index]
                table = state.tables[index, slot] if has_shortlists else state.outputs[index]
                linear(
                    table.ctypes.data, 0, part, space.x + 4 * space.width * first, 4 * space.width, space.rounded,
                    space.rounded_width, space.scales, logits.ctypes.data, logits.shape[1], NO_FLOOR, 0,
                )  # fmt: skip
            continue_rows(state, sentences, settings, first, part, vocabulary, columns)
        finish_step(state, sentences, results, settings)


@inner
def fill_slots(state: SearchState, sentences: SourceSentences, settings: Settings) -> None:
    """Takes sentences for the free slots."""
    for slot in range(len(state.slots)):
        if state.slots[slot].sentence != NO_SENTENCE:
            continue
        sentence = taken(state.counter.ctypes.data)
        if sentence >= len(sentences.max_lengths):
            return
        state.slots[slot].sentence, state.slots[slot].length = sentence, 0
        for i in range(settings.beam):
            state.before[slot, i] = -INFINITY if i and not settings.sampling else 0.0
            state.newest[slot, i], state.parents[slot, i] = BOS, i if settings.sampling else 0
        columns = list_of(sentences.columns, sentence)
        for index in range(len(state.models) if len(columns) else 0):
            pack_shortlist(state.outputs[index], columns, state.tables[index, slot])


@inner
def collect_rows(state: SearchState, sentences: SourceSentences, settings: Settings) -> int:
    """Makes a row of each open hypothesis. Returns the number of rows, or -1 if the cache needs more positions."""
    capacity, count = state.places.shape[1], 0
    places, recorded, recorded_size = state.places.ctypes.data, 0, 0
    if len(state.recorded):
        recorded, recorded_size = state.recorded.ctypes.data, 4 * state.recorded.shape[1]
    for slot in range(len(state.slots)):
        sentence, length = state.slots[slot].sentence, state.slots[slot].length
        state.slots[slot].count = 0
        if sentence == NO_SENTENCE:
            continue
        if length == capacity:
            return -1
        columns, first = list_of(sentences.columns, sentence), sentences.sources.starts[sentence]
        size = sentences.sources.starts[sentence + 1] - first
        for i in range(settings.beam):
            if state.before[slot, i] > -INFINITY:
                hypothesis, token = slot * settings.beam + i, state.newest[slot, i]
                place = hypothesis * capacity + length
                state.places[hypothesis, length], state.tokens[place] = place, token
                state.totals[place] = state.before[slot, i]
                row = state.rows[count]
                row.token = columns[token] if len(columns) else token
                row.length, row.hypothesis, row.place = length, hypothesis, place
                row.parent = slot * settings.beam + state.parents[slot, i]
                row.memory, row.memory_size, row.places = first, size, places + 8 * capacity * hypothesis
                row.recorded = 0
                if recorded_size:
                    row.recorded = recorded + recorded_size * place
                    filled(row.recorded, 0, size, 0)
                count += 1
    return count


@inner
def continue_rows(
    state: SearchState, sentences: SourceSentences, settings: Settings, first: int, number: int, vocabulary: int,
    columns: int,
) -> None:  # fmt: skip
    """Adds the continuations of `number` hypotheses to the best continuations of their sentences.

    With sampling, the continuations are drawn; otherwise, the most probable continuations are added. The hypotheses are
    the rows from `first` on. `state.logits` has a row of `columns` logits for each hypothesis.
    """
    for row in range(number):
        hypothesis = state.rows[first + row].hypothesis
        slot, i = hypothesis // settings.beam, hypothesis % settings.beam
        sentence, length, x = state.slots[slot].sentence, state.slots[slot].length, state.logits[0, row]
        prefix, language_tokens = list_of(sentences.prefixes, sentence), sentences.language_tokens[sentence]
        only = -1
        if length < len(prefix):
            only = prefix[length]
        elif length >= sentences.max_lengths[sentence]:
            only = EOS
        normalizer = normalize_logits(
            x.ctypes.data, state.logits.strides[0], len(state.models), columns, state.maxima.ctypes.data
        )
        if not np.isfinite(normalizer):  # the logits overflowed
            continue
        offset = state.before[slot, i] - normalizer
        if length < language_tokens:
            x[only], offset = 0, state.before[slot, i]
        elif length >= len(prefix):  # a prefix is not subject to the rules
            forbid(x, length, language_tokens, settings)
            allowed = list_of(sentences.allowed, sentence)
            if length == len(prefix) and len(allowed):
                forbid_others(x, vocabulary, allowed)
            for text in list_of(sentences.avoided, sentence):
                forbid_text(x, text, sentences.texts, state.places[hypothesis], state.tokens, length,
                            list_of(sentences.columns, sentence))  # fmt: skip
            if settings.no_repeat and length >= settings.no_repeat:
                forbid_repeats(x, state.places[hypothesis], state.tokens, length, settings.no_repeat)
        if settings.sampling and only < 0:
            uniform = sentences.uniform.values[sentences.uniform.starts[sentence] + length * settings.beam + i]
            only = draw(x, vocabulary, state.maxima, settings, uniform, state.weights)
        state.slots[slot].count = add_continuations(
            x, state.maxima, vocabulary, offset, only, i, state.slots[slot].count, state.best_scores[slot],
            state.best_hypotheses[slot], state.best_tokens[slot],
        )  # fmt: skip


@inner
def normalize_logits(x: int, model_size: int, models: int, columns: int, maxima: int) -> float:
    """Returns the logarithm of the sum of exponentials of a row of logits, and writes the maxima of its blocks.

    Logits of the next model follow after `model_size` bytes. With several models, the logarithms of their mean
    probabilities replace the logits of the first model, and the result is 0.
    """
    normalizer, share = 0.0, np.float32(1) / np.float32(models)
    for index in range(models):
        logits = x + model_size * index
        largest = block_maxima(logits, columns, maxima)
        normalizer = largest + np.log(sum_of_exponentials(logits, columns, largest))
        if models > 1:
            if not np.isfinite(normalizer):
                return normalizer
            mixed(logits, columns, np.float32(normalizer), share, x, index == 0)
    if models > 1:
        logarithms(x, columns)
        block_maxima(x, columns, maxima)
        return 0.0
    return normalizer


@inner
def add_continuations(
    logits: Array, maxima: Array, vocabulary: int, offset: float, only: int, hypothesis: int, count: int,
    scores: Array, hypotheses: Array, tokens: Array,
) -> int:  # fmt: skip
    """Adds the most probable continuations of a hypothesis to the best continuations of its sentence, which are sorted.

    The log probability of a continuation is the logit of its new token plus `offset`. If `only` is not negative, the
    hypothesis continues with this token. Tokens with the logit -inf are left out. Returns the number of continuations.
    """
    size, x, block_maxima = len(scores), logits.ctypes.data, maxima.ctypes.data
    limit = scores[size - 1] - offset - 1e-3 if count == size else -INFINITY  # smaller logits are not among the best
    blocks, block = (vocabulary + OUTPUTS - 1) // OUTPUTS, 0
    while True:
        if only < 0:
            block = next_above(block_maxima, block, blocks, limit)
        if block == blocks:
            return count
        token, stop = block * OUTPUTS, min((block + 1) * OUTPUTS, vocabulary)
        if only >= 0:
            token, stop, block = only, only + 1, blocks - 1
        while True:
            token = next_above(x, token, stop, limit)
            if token == stop:
                break
            score = logits[token] + offset
            if score < INFINITY and (count < size or score > scores[size - 1]):
                count = min(count + 1, size)
                rank = count - 1
                while rank and scores[rank - 1] < score:
                    scores[rank], hypotheses[rank] = scores[rank - 1], hypotheses[rank - 1]
                    tokens[rank] = tokens[rank - 1]
                    rank -= 1
                scores[rank], hypotheses[rank], tokens[rank] = score, hypothesis, token
                if count == size:
                    limit = scores[size - 1] - offset - 1e-3
            token += 1
        block += 1


@inner
def finish_step(state: SearchState, sentences: SourceSentences, results: Results, settings: Settings) -> None:
    """Finishes continuations that end. The best continuations that do not end become the open hypotheses.

    Frees the slots of sentences in which no open hypothesis can become one of the best finished hypotheses.
    """
    beam, worst = settings.beam, settings.nbest - 1
    for slot in range(len(state.slots)):
        sentence, length = state.slots[slot].sentence, state.slots[slot].length
        if sentence == NO_SENTENCE:
            continue
        pieces = length - sentences.language_tokens[sentence]
        for i in range(beam):
            state.before[slot, i] = -INFINITY
        row, open_score = 0, -INFINITY
        for i in range(state.slots[slot].count):
            score, hypothesis = state.best_scores[slot, i], state.best_hypotheses[slot, i]
            token = state.best_tokens[slot, i]
            if token != EOS:
                if row < beam:
                    target = hypothesis if settings.sampling else row
                    state.before[slot, target], state.parents[slot, target] = score, hypothesis
                    state.newest[slot, target] = token
                    open_score = max(open_score, score)
                    row += 1
            elif i < beam:
                final = score / penalty(pieces + 1, settings.lenpen)
                if final > results.scores[sentence, worst]:
                    finish(state, sentences, results, slot, final, score, hypothesis)
        threshold = results.scores[sentence, worst]
        longest = sentences.max_lengths[sentence] - sentences.language_tokens[sentence]
        within_reach = open_score / max(penalty(longest + 1, settings.lenpen), penalty(pieces + 2, settings.lenpen))
        if within_reach <= threshold or (beam == 1 and threshold > -INFINITY):
            state.slots[slot].sentence = NO_SENTENCE
            continue
        state.slots[slot].length = length + 1
        moved = False
        for i in range(row if not settings.sampling else 0):
            moved = moved or state.parents[slot, i] != i
        if moved:
            first = slot * beam
            for i in range(beam):
                for position in range(length + 1):
                    state.old_places[i, position] = state.places[first + i, position]
            for i in range(row):
                for position in range(length + 1):
                    state.places[first + i, position] = state.old_places[state.parents[slot, i], position]


@inner
def finish(
    state: SearchState, sentences: SourceSentences, results: Results, slot: int, score: float, log_probability: float,
    hypothesis: int,
) -> None:  # fmt: skip
    """Adds a hypothesis to the results of its sentence, in place of the worst result."""
    sentence, length = state.slots[slot].sentence, state.slots[slot].length
    scores, order = results.scores[sentence], results.order[sentence]
    rank = len(scores) - 1
    index = order[rank]
    while rank and scores[rank - 1] < score:
        scores[rank], order[rank] = scores[rank - 1], order[rank - 1]
        results.log_probabilities[sentence, rank] = results.log_probabilities[sentence, rank - 1]
        rank -= 1
    scores[rank], order[rank], results.log_probabilities[sentence, rank] = score, index, log_probability
    results.lengths[sentence, index] = length
    places = state.places[slot * state.before.shape[1] + hypothesis]
    for position in range(length):
        results.tokens[sentence, index, position] = state.tokens[places[position + 1]]
    for position in range(length + 1 if len(results.gains) else 0):
        total = log_probability if position == length else state.totals[places[position + 1]]
        results.gains[sentence, index, position] = total - state.totals[places[position]]
    if len(state.recorded):
        size = sentences.sources.starts[sentence + 1] - sentences.sources.starts[sentence]
        target = results.attention.starts[sentence] + index * (sentences.max_lengths[sentence] + 1) * size
        for position in range(length):
            for token in range(size):
                results.attention.values[target] = state.recorded[places[position], token]
                target += 1
