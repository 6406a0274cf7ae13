"""Extended Neural GPU: "Can Active Memory Replace Attention?" (Kaiser and Bengio 2016, arXiv:1610.08613).

The model has no attention. The input sentence is written to the first row of an image, and every step changes the
whole image by convolutions. Equations are numbered in the order of section 2 of the paper.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nmtkit.config import Config, option
from nmtkit.data.packed import Packed
from nmtkit.models.architectures.bytenet import unfold
from nmtkit.models.architectures.interface import (
    ARCHITECTURES,
    Architecture,
    DecoderState,
    Vocabulary,
    check_odd,
    probability,
)
from nmtkit.models.layers import module_list, rows_of
from nmtkit.models.layers.dropout import Dropout

# B sentences, R hypotheses of each, N = B x R rows of a search, S source tokens, T target tokens, L tokens of the
# longest target sentence, D filters, W rows of an image, C columns of the widest image

LONGEST_MEMORY = 63  # number of CGRUs after which the slowest filters of an untrained model forget an image


@dataclass(frozen=True, kw_only=True)
class NeuralGPUConfig(Config):
    """The defaults are the large model in the authors' code: 512 filters, 2 layers, images of 4 rows, kernels 3 x 3."""

    d_model: int = option(512, "filters of an image, and width of embeddings", min=1, max=32_768)
    layers: int = option(2, "convolutional gated recurrent units in each step", min=1, max=100)
    image_width: int = option(4, "rows of an image; tokens are written to the first row", min=1, max=1000)
    kernel: int = option(3, "rows and columns of a convolution's kernel (odd)", min=1, max=99)
    image_factor: float = option(1.25, "columns of an image per source token, rounded to 0.001", min=1, max=100)
    image_extra: int = option(8, "additional columns of an image", min=0, max=65_536)
    outputs: Literal["extended", "markovian", "independent"] = option(
        "extended",
        "previous words that an output word depends on: all words, by an output tape (extended); the last word "
        "(markovian); or no word, as in the Neural GPU of Kaiser and Sutskever 2016 (independent)",
    )
    recomputed_steps: int = option(
        8,
        "number of steps whose images the backward pass recomputes together; training then takes a third more time, "
        "but only a small part of the memory; 0: keep all images",
        min=0,
        max=10_000,
        finetuning="free",
    )
    dropout: float = probability(0.0, "dropout on embeddings and on the decoder's features")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_odd("--kernel", self.kernel)


PUBLISHED = NeuralGPUConfig()


class CGRU(nn.Module):
    """A convolutional gated recurrent unit (equation 2).

        CGRU(s) = u * s + (1 - u) * tanh(U (r * s) + B),  u = sigmoid(U' s + B'),  r = sigmoid(U'' s + B'')

    Products with U, U' and U'' are convolutions (equation 1). The paper does not state the initial values. The code of
    the authors starts both gates with biases of 1, so an untrained model forgets a sentence of ten words. Here the
    biases of u are log(t), with t uniform between 1 and 63 (Tallec and Ollivier 2018, "Can recurrent neural networks
    warp time?"), so that filters forget an image after 1 to 63 CGRUs.
    """

    def __init__(self, filters: int, kernel: int) -> None:
        super().__init__()
        self.gates = nn.Conv2d(filters, 2 * filters, kernel, padding=kernel // 2)
        self.candidate = nn.Conv2d(filters, filters, kernel, padding=kernel // 2)
        memory = torch.empty(filters).uniform_(1, LONGEST_MEMORY)
        biases = (torch.cat((memory.log(), torch.ones(filters))), torch.zeros(filters))
        for convolution, bias in zip((self.gates, self.candidate), biases, strict=True):
            nn.init.xavier_uniform_(convolution.weight)
            convolution.bias = nn.Parameter(bias)

    def forward(self, image: Tensor, inside: Tensor, tape: Tensor | None = None) -> Tensor:
        """Returns the next image [B, D, W, C], which is zero where `inside` [B, 1, 1, C] is 0.

        A decoder passes `tape` [B, 3D, W, C]: the convolutions of the output tape, which are added to the convolutions
        for u, r and the candidate (equation 5).
        """
        filters = image.shape[1]
        gates = self.gates(image)
        if tape is not None:
            gates = gates + tape[:, : 2 * filters]
        update, reset = gates.sigmoid().chunk(2, 1)
        candidate = self.candidate(reset * image)
        if tape is not None:
            candidate = candidate + tape[:, 2 * filters :]
        return (update * image + (1 - update) * candidate.tanh()) * inside


def units(config: NeuralGPUConfig) -> Sequence[CGRU]:
    return module_list(CGRU(config.d_model, config.kernel) for _ in range(config.layers))


class TapeConvolution(nn.Module):
    """The three convolutions of a decoder layer over the output tape (W, W' and W'' in equation 5).

    Words are written to the first row of the tape, and all other rows are zero. So the convolutions change only the
    upper `rows` rows of an image. Kernel rows that would only multiply zeros are left out.
    """

    def __init__(self, filters: int, kernel: int, rows: int) -> None:
        super().__init__()
        self.kernel, self.rows = kernel, rows
        self.linear = nn.Linear(filters, 3 * filters * rows * kernel, bias=False)
        bound = (6 / ((filters + 3 * filters) * kernel**2)) ** 0.5
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def write(self, tape: Tensor, words: Tensor, columns: Tensor, inside: Tensor) -> Tensor:
        """Adds the convolutions of embedded `words` [B, D] at `columns` [B] to `tape` [B, 3D, W, C]. Returns the tape.

        A word changes the `kernel` columns around its column. `inside` [B] is 0 for a sentence that gets no word.
        """
        change = self.linear(words).unflatten(1, (-1, self.rows, self.kernel)) * inside[:, None, None, None]
        half, width = self.kernel // 2, tape.shape[3]
        reached = columns[:, None] + torch.arange(-half, half + 1, device=columns.device)  # B kernel
        change = change * ((reached >= 0) & (reached < width))[:, None, None, :]
        index = reached.clamp(0, width - 1)[:, None, None, :].expand_as(change)
        upper = tape[:, :, : self.rows].scatter_add(3, index, change.to(tape.dtype))
        return upper if self.rows == tape.shape[2] else torch.cat((upper, tape[:, :, self.rows :]), 2)


class ImageState(DecoderState):
    """The state of a search: for each hypothesis the image, its length, and the convolved output tape of each layer."""

    def __init__(self, memory: Packed, beams: int, tapes: int) -> None:
        self.beams = beams
        self.images = image_of(memory).repeat_interleave(beams, 0)  # N D W C
        self.lengths = memory.layout.lengths.repeat_interleave(beams)  # N: columns of each image
        self.position = torch.zeros_like(self.lengths)  # N: number of input tokens so far
        self.tapes = [empty_tape(self.images) for _ in range(tapes)]

    def reorder(self, beam_index: Tensor) -> None:
        self.images, self.lengths = self.images[beam_index], self.lengths[beam_index]
        self.position = self.position[beam_index]
        self.tapes = [tape[beam_index] for tape in self.tapes]

    def drop_finished(self, sentences: Tensor) -> None:
        self.reorder(rows_of(sentences, self.beams))

    def insert(self, slots: Tensor, memory: Packed) -> None:
        images, rows = image_of(memory).repeat_interleave(self.beams, 0), rows_of(slots, self.beams)
        columns = max(images.shape[3], self.images.shape[3])
        self.images = widened(self.images, columns).index_copy(0, rows, widened(images, columns))
        self.tapes = [widened(tape, columns).index_fill(0, rows, 0) for tape in self.tapes]
        self.lengths = self.lengths.index_copy(0, rows, memory.layout.lengths.repeat_interleave(self.beams))
        self.position = self.position.index_fill(0, rows, 0)


def widened(image: Tensor, columns: int) -> Tensor:
    """Returns an image [..., C] with zeros on the right, up to `columns` columns."""
    return nn.functional.pad(image, (0, columns - image.shape[-1]))


def empty_tape(images: Tensor) -> Tensor:
    """Returns zeros [B, 3D, W, C] for images [B, D, W, C]."""
    return filters_last(images.new_zeros(images.shape[0], 3 * images.shape[1], *images.shape[2:]))


def image_of(memory: Packed) -> Tensor:
    """Converts a memory, values [columns, W, D], to padded images [B, D, W, C]."""
    return filters_last(memory.to_padded().permute(0, 3, 2, 1))


def filters_last(image: Tensor) -> Tensor:
    """Returns images [B, D, W, C] in the format channels_last, in which a CPU computes convolutions a third faster."""
    return image.contiguous(memory_format=torch.channels_last)


def inside_of(lengths: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns 1 for the first `lengths` [B] columns of each image, and 0 for all other columns: [B, 1, 1, C]."""
    return (torch.arange(columns, device=lengths.device) < lengths[:, None])[:, None, None, :].to(dtype)


@ARCHITECTURES.register("extended_neural_gpu", PUBLISHED)
@ARCHITECTURES.register(
    "extended_neural_gpu_small", replace(PUBLISHED, d_model=64, image_width=2, image_extra=4, dropout=0.1)
)
class ExtendedNeuralGPU(Architecture):
    """Encoder and decoder over one image of each sentence, without attention (section 2).

    The encoder takes one step for each source token, and the decoder one step for each output word. An image has
    image_factor x source tokens + image_extra columns; in the paper, an image has the length of its bucket, which
    depends on the batch. Words beyond the last column are read from the last column. Columns beyond the end of an image
    are set to zero after each unit, so that the translation of a sentence does not depend on its batch.

    The paper does not say how the Markovian model combines its two inputs. Here one tanh layer reads the column of the
    image and the embedding of the previous word.
    """

    def __init__(self, config: NeuralGPUConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        self.source_embedding = nn.Embedding(vocabulary.source, width)
        self.encoder = units(config)
        if config.outputs != "independent":
            self.target_embedding = nn.Embedding(vocabulary.target, width)
        if config.outputs == "markovian":
            self.combination = nn.Linear(2 * width, width)
        if config.outputs == "extended":
            self.decoder = units(config)
            rows = min(config.image_width, config.kernel // 2 + 1)
            self.tape = module_list(TapeConvolution(width, config.kernel, rows) for _ in range(config.layers))
        self.dropout = Dropout(config.dropout)
        self.output_projection = nn.Linear(width, vocabulary.target)

    # --- memory of the backward pass ----------------------------------------------------------------------------------

    def parts(self, steps: int) -> list[tuple[int, int]]:
        """Divides steps into groups of `recomputed_steps`. Returns (first step, last step + 1) for each group."""
        length = self.config.recomputed_steps or steps
        return [(first, min(first + length, steps)) for first in range(0, steps, length)]

    def call(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `run`. With `recomputed_steps`, the backward pass recomputes the images instead of storing them."""
        if not self.config.recomputed_steps or not torch.is_grad_enabled():
            return run(*arguments)
        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)

    # --- encoder ------------------------------------------------------------------------------------------------------

    def encode(self, source: Packed) -> Packed:
        """Returns the final image s_fin of each sentence (equation 3): values [columns, W, D], packed by columns."""
        embedded = source.with_values(self.dropout(self.source_embedding(source.values)))
        tape = unfold(embedded, self.config.image_factor, self.config.image_extra)  # columns D
        first_row = tape.to_padded().transpose(1, 2)[:, :, None]  # B D 1 C
        image = filters_last(nn.functional.pad(first_row, (0, 0, 0, self.config.image_width - 1)))
        inside = inside_of(tape.layout.lengths, image.shape[3], image.dtype)
        steps = source.layout.lengths

        def run(image: Tensor, first: int, last: int) -> Tensor:
            for step in range(first, last):
                changed = image
                for unit in self.encoder:
                    changed = unit(changed, inside)
                image = torch.where((step < steps)[:, None, None, None], changed.to(image.dtype), image)
            return image

        for first, last in self.parts(source.layout.max_length):
            image = self.call(run, image, first, last)
        return Packed.from_padded(image.permute(0, 3, 2, 1), tape.layout)

    # --- decoder ------------------------------------------------------------------------------------------------------

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        layout = target_input.layout
        if self.config.outputs != "extended":
            columns = torch.minimum(layout.position_ids, memory.layout.lengths[layout.segment_ids] - 1)
            first_row = memory.values[memory.layout.cu_seqlens.long()[layout.segment_ids] + columns, 0]
            return self.features_of_columns(first_row, target_input.values)
        image, lengths = image_of(memory), memory.layout.lengths
        inside = inside_of(lengths, image.shape[3], image.dtype)
        words = target_input.with_values(self.embedded(target_input.values)).to_padded()  # B L D

        def run(image: Tensor, tapes: list[Tensor], first: int, last: int) -> tuple[Tensor, list[Tensor], Tensor]:
            features = []
            for position in range(first, last):
                positions = torch.full_like(lengths, position)
                image, tapes, read = self.decoder_step(image, tapes, words[:, position], positions, lengths, inside)
                features.append(read)
            return image, tapes, torch.stack(features, 1)

        tapes, features = [empty_tape(image) for _ in self.decoder], []
        for first, last in self.parts(layout.max_length):
            image, tapes, read = self.call(run, image, tapes, first, last)
            features.append(read)
        return self.dropout(Packed.from_padded(torch.cat(features, 1), layout).values)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.target_embedding(tokens))

    def features_of_columns(self, columns: Tensor, tokens: Tensor) -> Tensor:
        """Returns features [T, D] of image columns [T, D] and, in the Markovian model, of the previous words [T]."""
        if self.config.outputs == "markovian":
            columns = self.combination(torch.cat((columns, self.embedded(tokens)), 1)).tanh()
        return self.dropout(columns)

    def decoder_step(
        self, image: Tensor, tapes: list[Tensor], words: Tensor, positions: Tensor, lengths: Tensor, inside: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Writes each word to the tape, changes the image (equation 4), and reads the features of the next word.

        `words` [B, D] are the embedded inputs at `positions` [B]. The input at position k > 0 is output k - 1. The
        input at position 0 is bos, which is not written. Returns the image, the tapes and the features [B, D].
        """
        written = (positions - 1).clamp(min=0).minimum(lengths - 1)
        is_output = (positions > 0).to(words.dtype)
        tapes = [layer.write(tape, words, written, is_output) for layer, tape in zip(self.tape, tapes, strict=True)]
        changed = image
        for unit, tape in zip(self.decoder, tapes, strict=True):
            changed = unit(changed, inside, tape)
        changed = changed.to(image.dtype)
        read = positions.minimum(lengths - 1)
        return changed, tapes, changed[torch.arange(len(read), device=read.device), :, 0, read]

    def start(self, memory: Packed, beams: int) -> ImageState:
        return ImageState(memory, beams, self.config.layers if self.config.outputs == "extended" else 0)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        assert isinstance(state, ImageState)
        if self.config.outputs == "extended":
            inside = inside_of(state.lengths, state.images.shape[3], state.images.dtype)
            words = self.embedded(tokens)
            state.images, state.tapes, features = self.decoder_step(
                state.images, state.tapes, words, state.position, state.lengths, inside
            )
            features = self.dropout(features)
        else:
            columns = state.position.minimum(state.lengths - 1)
            first_row = state.images[torch.arange(len(columns), device=columns.device), :, 0, columns]
            features = self.features_of_columns(first_row, tokens)
        state.position = state.position + 1
        return self.output_projection(features)
