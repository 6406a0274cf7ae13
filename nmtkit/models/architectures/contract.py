"""Checks of the forward pass of an architecture on two random sentences.

`check_forward` runs before the training of an architecture from a plug-in. `nmtkit.contracts` has further checks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from nmtkit.data.packed import Layout, Packed
from nmtkit.models.architectures.interface import Architecture, Vocabulary

SOURCE_LENGTHS, TARGET_LENGTHS = (5, 3), (8, 6)
CHANGED_FROM = 4  # position from which the words of the first target sentence are changed
FIRST_WORD = 3  # smaller ids are <unk>, bos and eos
TOLERANCE = 1e-4  # largest allowed change, as a share of the largest feature; rounding errors are smaller


class ContractError(ValueError):
    """A component violates its interface. The message names the returned and the expected value."""


def described(value: object) -> str:
    """Describes a return value for messages: "a Tensor of shape [2, 3]", "None", "a dict"."""
    if isinstance(value, Tensor):
        return f"a Tensor of shape {list(value.shape)}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def check_sums(title: str, values: Mapping[str, object]) -> None:
    """Raises ContractError unless each value is a tensor without dimensions. `title` names the component."""
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dim():
            raise ContractError(
                f"{title} returned {described(value)} for {name!r}; it must be a tensor without dimensions, a sum"
            )


def words(lengths: tuple[int, ...], size: int, seed: int, longest: int | None = None) -> Packed:
    """Returns random sentences of the given lengths, but at most `longest` words, with word ids below `size`."""
    generator = torch.Generator().manual_seed(seed)
    first = min(FIRST_WORD, size - 1)
    limited = [min(length, longest or length) for length in lengths]
    return Packed.from_lists(
        [torch.randint(first, size, (length,), generator=generator).tolist() for length in limited]
    )


@contextmanager
def evaluated(model: Architecture) -> Iterator[None]:
    """Puts the model in evaluation mode without gradients, and restores its mode and the random state afterwards."""
    training = model.training
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model.eval()
        try:
            yield
        finally:
            model.train(training)


def check_forward(model: Architecture, vocabulary: Vocabulary) -> None:
    """Raises ContractError if the forward pass of a model on the CPU breaks the contract.

    The checks are shapes, causality, and independence of the sentences of a batch: 7 passes over 14 target words.
    """
    source = words(SOURCE_LENGTHS, vocabulary.source, 5, model.max_source_positions)
    target = words(TARGET_LENGTHS, vocabulary.target, 6, model.max_target_positions)
    with evaluated(model):
        check_shapes(model, source, target, vocabulary)
        check_causality(model, source, target, vocabulary)
        check_sentences_apart(model, source, target, vocabulary)


def check_shapes(model: Architecture, source: Packed, target: Packed, vocabulary: Vocabulary) -> None:
    """Raises ContractError if `encode`, `decode`, `forward` or `output_projection` returns a wrong type or shape."""
    name = type(model).__name__
    memory: object = model.encode(source)
    sentences, tokens, width = source.layout.sentences, target.layout.tokens, vocabulary.target
    if not isinstance(memory, Packed):
        raise ContractError(
            f"{name}.encode returned {described(memory)}; it must return a Packed: values [S, …] on a layout of the "
            "source's sentences, such as source.with_values(states)"
        )
    layout = memory.layout
    if not isinstance(layout, Layout) or layout.sentences != sentences or len(memory.values) != layout.tokens:
        raise ContractError(
            f"{name}.encode returned values of shape {list(memory.values.shape)} on a layout of {layout.sentences} "
            f"sentences and {layout.tokens} tokens, for {sentences} source sentences of {source.layout.tokens} tokens; "
            "the layout must have the same number of sentences, and the values must have one row for each token of "
            "the layout"
        )
    for method, features in (("decode", model.decode(memory, target)), ("forward", model(source, target))):
        check_features(f"{name}.{method}", features, tokens)
    if not isinstance(getattr(model, "output_projection", None), torch.nn.Module):
        raise ContractError(f"{name} has no output_projection; set self.output_projection = nn.Linear(D, {width})")
    logits = model.output_projection(features)
    if list(logits.shape) != [tokens, width]:
        raise ContractError(
            f"{name}.output_projection returned {described(logits)} for features {list(features.shape)}; it must "
            f"return logits [T, V] of shape [{tokens}, {width}]: vocabulary.target is {width}"
        )


def check_features(name: str, features: object, tokens: int) -> None:
    """Raises ContractError unless `features` is a Tensor [T, D] with a row for each of `tokens` target tokens."""
    if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != tokens:
        padded = isinstance(features, Tensor) and features.dim() == 3
        raise ContractError(
            f"{name} returned {described(features)} for {tokens} target tokens; it must return features [T, D] "
            f"with one row for each token: a shape of [{tokens}, D]"
            + ("; Packed.from_padded(features, layout).values drops the padding" if padded else "")
        )


def check_causality(model: Architecture, source: Packed, target: Packed, vocabulary: Vocabulary) -> None:
    """Raises ContractError if features depend on later target words or are not finite."""
    first = min(CHANGED_FROM, int(target.layout.lengths[0]) - 1)
    before, after = model(source, target), model(source, _with_other_words(target, first, vocabulary.target))
    if not before.isfinite().all():
        raise ContractError(f"{type(model).__name__} returned features that are not finite before any training")
    change = _change(before[:first], after[:first])
    if change > TOLERANCE:
        raise ContractError(
            f"{type(model).__name__} reads later target words, so its perplexity will be too low and its BLEU 0. If "
            f"the words from position {first} on change, earlier features change by {change:.1%} of the largest "
            "feature. At each position, decode must use only the target tokens up to this position (with a causal "
            "mask, or a recurrence from left to right)"
        )


def check_sentences_apart(model: Architecture, source: Packed, target: Packed, vocabulary: Vocabulary) -> None:
    """Raises ContractError if the features of a sentence depend on another sentence of the batch."""
    second = int(target.layout.lengths[0])  # index of the first token of the second sentence
    before = model(source, target)
    for side, features in (
        ("source", model(_with_other_words(source, 0, vocabulary.source), target)),
        ("target", model(source, _with_other_words(target, 0, vocabulary.target))),
    ):
        change = _change(before[second:], features[second:])
        if change > TOLERANCE:
            raise ContractError(
                f"{type(model).__name__} mixes the sentences of a batch: a change of one {side} sentence changes the "
                f"features of the next sentence by {change:.1%} of the largest feature, so translations depend on "
                "their batch. Layers that read neighbouring tokens must know where sentences end (layout.cu_seqlens, "
                "layout.mask)"
            )


def _with_other_words(sentences: Packed, first: int, size: int) -> Packed:
    """Returns a copy whose first sentence has other words from position `first` on. Their ids are below `size`."""
    changed, length = sentences.values.clone(), int(sentences.layout.lengths[0])
    changed[first:length] = (changed[first:length] + 1) % size
    return sentences.with_values(changed)


def _change(before: Tensor, after: Tensor) -> float:
    """Returns the largest absolute difference as a share of the largest absolute value."""
    if not before.numel():
        return 0.0
    largest = float(before.abs().max().clamp(min=1e-12))
    return float((before - after).abs().max()) / largest
