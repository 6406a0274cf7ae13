"""Encodes texts in batches of similar length, and returns the encoder states of each text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures import Architecture
from nmtkit.models.architectures.hidden_states import encoder_states
from nmtkit.translation.translator import batch_ends


def source_ids(
    tokenizer: Tokenizer, texts: Sequence[str], source_lang: str | None = None, target_lang: str | None = None
) -> list[list[int]]:
    """Returns the ids of each text. An empty text has only eos.

    If the encoder reads a language token, this token is the first id of every other text.

    Raises ValueError if the language that the encoder reads is missing or unknown.
    """
    if tokenizer.languages and not tokenizer.has_target_languages_only and target_lang is None:
        target_lang = next(iter(tokenizer.languages))  # any language will do, because only the decoder reads it
    first, _ = tokenizer.language_ids(source_lang, target_lang, ("source_lang", "target_lang"))
    encoded = tokenizer.encode_source(texts).lists()
    return [[*first, *ids] if len(ids) > 1 else ids for ids in encoded]


def states_of(
    model: Architecture, sentences: Sequence[Sequence[int]], all_layers: bool, max_tokens: int, device: torch.device
) -> list[list[Tensor]]:
    """Returns the encoder states of each sentence: tensors [S, D] in fp32 on the CPU.

    With `all_layers`, the list of a sentence has all tensors of `hidden_states.encoder_states`. Otherwise the list has
    only the output of the encoder. S is the number of source pieces of the sentence, eos included, and D is the width
    of the model. A batch has at most `max_tokens` tokens.
    """
    order = sorted(range(len(sentences)), key=lambda index: -len(sentences[index]))
    ends = batch_ends([len(sentences[index]) for index in order], max_tokens, 1)
    states: dict[int, list[Tensor]] = {}  # by index of the sentence
    for start, end in zip([0, *ends], ends, strict=False):
        indices = order[start:end]
        packed = Packed.from_lists([list(sentences[index]) for index in indices], device)
        if all_layers:
            outputs = [packed.with_values(values) for values in encoder_states(model, packed)]
        else:
            outputs = [model.encode(packed)]
        of_texts = zip(*(output.split() for output in outputs), strict=True)
        states |= {index: [x.float().cpu() for x in each] for index, each in zip(indices, of_texts, strict=True)}
    return [states[index] for index in range(len(sentences))]
