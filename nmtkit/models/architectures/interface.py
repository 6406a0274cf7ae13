"""The interface of an architecture: `encode` and `decode`, an output projection, and for search `start` and `step`.

A new architecture subclasses `Architecture`, sets `self.output_projection`, and defines `encode` and `decode`. It then
trains with every criterion and decodes in every mode. By default, a search runs `decode` over the whole prefix at every
step (`PrefixState`). This works for any left-to-right decoder but is slow. An architecture that can continue from its
last step overrides `start` and `step`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from nmtkit.config import option
from nmtkit.config.registry import Registry
from nmtkit.data.packed import Layout, Packed
from nmtkit.models.layers import rows_of
from nmtkit.models.layers.static_kv_cache import CacheLengths, StaticMemory

# B sentences or slots of a search (a slot is for one sentence and its hypotheses), R hypotheses (rows) of each, N =
# B x R, S source tokens, T target tokens, L and M tokens of the longest target and source, H heads, D model width, V
# target vocabulary


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The sizes of the vocabularies. If `joint`, both sides have the same vocabulary and can share embeddings."""

    source: int
    target: int
    joint: bool


class TooLongError(ValueError):
    """Error for a source or target sequence with more tokens than the model has positions."""


class Architecture(nn.Module, ABC):
    """A sequence-to-sequence model. Registered factories are called as `factory(config, vocabulary)`."""

    output_projection: nn.Module  # features [T, D] -> logits [T, V]; for an nn.Linear, projection and loss are fused
    max_source_positions: int | None = None  # longest possible source in tokens; None: no limit
    max_target_positions: int | None = None
    shortlist: dict[str, Tensor] | None = None  # state of a translation.search.shortlist.Shortlist, from the checkpoint
    reads_source: bool = True  # False for a language model: the features depend only on the target
    directions: frozenset[tuple[str, str]] = frozenset()  # trained language pairs of a multilingual model, if recorded

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a training pass may skip parameters, as in LayerDrop (see torch's DistributedDataParallel)."""
        return False

    @abstractmethod
    def encode(self, source: Packed) -> Packed:
        """Returns the memory of source ids [S]: values [memory positions, …], with a layout of the same sentences.

        A sentence may have more or fewer memory positions than source tokens.
        """

    @abstractmethod
    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        """Returns features [T, D].

        The features of a token depend only on the memory of its sentence and on the target tokens up to this token.
        """

    def forward(self, source: Packed, target_input: Packed) -> Tensor:
        """Returns the features [T, D] of all target tokens, from which `output_projection` computes the logits."""
        return self.decode(self.encode(source), target_input)

    def check_length(self, title: str, tokens: int, side: Literal["source", "target"]) -> None:
        """Raises TooLongError if the model has too few positions for a sequence of `tokens` tokens.

        The tokens include eos. A decoder reads bos but not eos, so it needs the same number of positions.
        `title` names the sequence in the message.
        """
        limit = self.max_source_positions if side == "source" else self.max_target_positions
        if limit is not None and tokens > limit:
            raise TooLongError(
                f"{title} has {tokens - 1:,} pieces, but the model has {limit:,} positions, which is enough for "
                f"{limit - 1:,} pieces and eos"
            )

    def auxiliary_losses(self) -> dict[str, Tensor]:
        """Returns the auxiliary losses by name, and resets them.

        A loss is a value per target token: the mean over the training passes since the last call. The base class of
        criterions adds each loss, times the number of target tokens, to the loss of every criterion.
        """
        return {}

    def token_embeddings(self) -> list[nn.Module]:
        """Returns the embeddings of tokens: all `nn.Embedding` modules without "positions" at the end of their name."""
        modules = self.named_modules()
        return [x for name, x in modules if isinstance(x, nn.Embedding) and not name.endswith("positions")]

    def learning_rate_scale(self, kind: str) -> float:
        """Returns the factor on --lr for parameters of a kind: matrices, embeddings, vectors, or tensors (3+ axes)."""
        return 1.0

    def begin_update(self, generator: torch.Generator) -> None:
        """Draws random choices that all micro-batches of an update share, such as the layers to skip (LayerDrop).

        The trainer calls this method before the first micro-batch. `generator` is on the CPU, seeded by (seed, update),
        so all ranks draw the same numbers.
        """

    def attention_weights(self, source: Packed, target_input: Packed) -> dict[str, list[Tensor]]:
        """Returns attention weights by kind ("encoder", "decoder", "cross"), one tensor B H L M for each layer.

        L is the axis of queries, and M is the axis of keys. Weights are zero beyond the end of a sentence. Raises
        ValueError for an architecture without attention.
        """
        raise ValueError(f"{type(self).__name__} has no attention to show")

    def forward_with_attention(
        self, source: Packed, target_input: Packed, layer: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns features [T, D], and the cross-attention weights B H L M of a decoder layer, with gradients.

        `layer` counts from 1; None selects the layer of `layer_index`. The weights are None if this update skips the
        layer. Raises ValueError for a layer that does not exist, and for an architecture without attention.
        """
        raise ValueError(f"{type(self).__name__} has no cross-attention to supervise")

    def start(self, memory: Packed, beams: int) -> "DecoderState":
        """Returns the state before the first token, with `beams` hypotheses for each of the B sentences of the memory.

        Rows are sentence-major: row n belongs to sentence n // beams.
        """
        return PrefixState(memory, beams)

    def step(self, tokens: Tensor, state: "DecoderState") -> Tensor:
        """Appends `tokens` [N] to the N hypotheses. Returns the logits [N, V] of the next tokens.

        The caller may overwrite the logits.
        """
        assert isinstance(state, PrefixState)
        prefixes, memory = state.append(tokens)
        features = self.decode(memory, prefixes)
        return self.output_projection(features[prefixes.layout.cu_seqlens[1:].long() - 1])

    @property
    def supports_static_decoding(self) -> bool:
        """Whether `static_start` and `static_step` can be used. A search with CUDA graphs needs both."""
        return False

    def static_start(self, slots: int, beams: int, capacity: int, memory_capacity: int) -> StaticMemory:
        """Returns a state of `slots` empty slots, whose tensors never change shape.

        A slot is for one sentence and its `beams` hypotheses. A hypothesis has up to `capacity` tokens, bos included. A
        source has up to `memory_capacity` tokens. The memory must have the layout of the source.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support static decoding")

    def static_step(self, tokens: Tensor, position: Tensor, state: StaticMemory, lengths: CacheLengths) -> Tensor:
        """Computes the same as `step` for `tokens` [N]. Returns the logits [N, V] in fp32.

        `position` [B] has the target position of the tokens of each slot. The step must not wait for the device. Shapes
        must depend only on the state and on `lengths`, which has the largest number of target positions and of source
        positions in any slot.
        """
        raise NotImplementedError(f"{type(self).__name__} does not support static decoding")


def layer_index(layer: int | None, layers: int) -> int:
    """Returns the index of a decoder layer, counted from 0. `layer` counts from 1.

    None selects the layer that aligns words best. This layer is the second-to-last layer (Garg et al. 2019, "Jointly
    Learning to Align and Translate"), or the last layer if there are at most two layers. Raises ValueError if `layer`
    is not from 1 to the number of layers.
    """
    if layer is None:
        return layers - 2 if layers > 2 else layers - 1
    if not 1 <= layer <= layers:
        raise ValueError(f"there is no cross-attention in decoder layer {layer}; the last layer is {layers}")
    return layer - 1


class DecoderState(Protocol):
    """The state of a search between two steps. Methods change the state in place."""

    beams: int

    @abstractmethod
    def reorder(self, beam_index: Tensor) -> None:
        """Makes row n continue row beam_index[n], a hypothesis of the same sentence. `beam_index` is [N], int64."""

    @abstractmethod
    def drop_finished(self, sentences: Tensor) -> None:
        """Keeps only the sentences with the indices `sentences`, which are ascending."""

    @abstractmethod
    def insert(self, slots: Tensor, memory: Packed) -> None:
        """Replaces the sentences in `slots` (indices) by the sentences of `memory`, which have no target tokens yet."""


class PrefixState(DecoderState):
    """A state that keeps only the memory and the tokens so far. Every step decodes the whole prefix again."""

    def __init__(self, memory: Packed, beams: int) -> None:
        self.beams = beams
        self.memories = list(memory.split())
        self.prefixes: list[list[int]] = [[]] * (len(self.memories) * beams)

    def append(self, tokens: Tensor) -> tuple[Packed, Packed]:
        """Appends `tokens` [N]. Returns the prefixes and the memories of all rows, both packed."""
        self.prefixes = [[*prefix, token] for prefix, token in zip(self.prefixes, tokens.tolist(), strict=True)]
        memories = [memory for memory in self.memories for _ in range(self.beams)]
        lengths = torch.tensor([len(memory) for memory in memories], device=tokens.device)
        return Packed.from_lists(self.prefixes, tokens.device), Packed(torch.cat(memories), Layout.of(lengths))

    def reorder(self, beam_index: Tensor) -> None:
        self.prefixes = [self.prefixes[row] for row in beam_index.tolist()]

    def drop_finished(self, sentences: Tensor) -> None:
        self.memories = [self.memories[index] for index in sentences.tolist()]
        self.reorder(rows_of(sentences, self.beams))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        for slot, values in zip(slots.tolist(), memory.split(), strict=True):
            self.memories[slot] = values
            self.prefixes[slot * self.beams : (slot + 1) * self.beams] = [[]] * self.beams


ARCHITECTURES: Registry[Architecture] = Registry("architecture", "--arch")


def probability(default: float, help: str) -> Any:
    """Declares a field of a config (see `option`): the probability of a dropout, from 0 to below 1."""
    return option(default, help, min=0, below=1, finetuning="free")


def check_odd(flag: str, *kernels: int) -> None:
    """Raises ValueError if the width of a kernel, which `flag` sets, is even."""
    if any(kernel % 2 == 0 for kernel in kernels):
        numbers = ",".join(map(str, kernels))
        raise ValueError(f"{flag} is {numbers}; the width of a kernel must be odd, so that the kernel has a middle")


def parameter_count(model: nn.Module) -> int:
    """Returns the number of elements of all parameters. Shared parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())
