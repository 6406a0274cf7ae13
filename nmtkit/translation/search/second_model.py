"""Logits processors that run a second model beside the translation model, one step for each step of the search."""

from abc import abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import building
from nmtkit.models.architectures.interface import DecoderState
from nmtkit.models.layers.prepack import prepack
from nmtkit.translation.search.logits_processors import LogitsProcessor, LogitsProcessorState

# N rows of a search, V target vocabulary


class SecondModelState(LogitsProcessorState):
    """The decoder state of the second model for the hypotheses of a search."""

    def __init__(self, processor: "SecondModel", state: DecoderState, beams: int) -> None:
        super().__init__(beams)
        self.processor, self.state = processor, state

    def step(self, tokens: Tensor, log_probs: Tensor) -> Tensor:
        logits = self.processor.model.step(self.processor.input_tokens(tokens), self.state)
        return self.processor.combine(log_probs, logits.log_softmax(1, dtype=torch.float32))

    def reorder(self, beam_index: Tensor) -> None:
        self.state.reorder(beam_index)

    def drop_finished(self, sentences: Tensor) -> None:
        self.state.drop_finished(sentences)


class SecondModel(LogitsProcessor):
    """Combines the log probabilities of a search with the log probabilities of the model in the checkpoint `path`.

    `flag` is the name of the setting with the checkpoint, for messages, and `advice` says how to get a checkpoint with
    the right pieces. Raises ValueError if the checkpoint has other target pieces than `tokenizer`.
    """

    def __init__(self, path: Path, flag: str, tokenizer: Tokenizer, advice: str) -> None:
        model, self.tokenizer = building.from_checkpoint(path)
        self.path, self.flag, self.model = path, flag, model.requires_grad_(False)
        mine, other = (each.target_pieces(range(each.target_size)) for each in (self.tokenizer, tokenizer))
        if mine != other:
            raise ValueError(
                f"{flag} {path} has other target pieces than the translation model ({len(mine):,} and {len(other):,}); "
                f"{advice}"
            )
        self.device: torch.device | None = None  # device of the model; None before the first search

    @abstractmethod
    def combine(self, log_probs: Tensor, second: Tensor) -> Tensor:
        """Returns the log probabilities [N, V] by which the search ranks the next tokens.

        `log_probs` comes from the search, and `second` from the second model. Both are log probabilities in fp32
        [N, V], and this method may overwrite both.
        """

    def input_source(self, source: Packed) -> Packed:
        """Returns the source that the second model reads."""
        return source

    def input_tokens(self, tokens: Tensor) -> Tensor:
        """Returns the tokens [N] that the second model reads."""
        return tokens

    def start(self, source: Packed, max_length: Tensor, beams: int) -> SecondModelState:
        device, limit = source.values.device, self.model.max_target_positions
        if limit is not None and int(max_length.max()) >= limit:
            raise ValueError(
                f"{self.flag} {self.path} has learned {limit} positions, and an output may have "
                f"{int(max_length.max())} pieces and eos; lower --max-len-a and --max-len-b"
            )
        if self.device is None and device.type == "cpu":
            with torch.inference_mode():
                prepack(self.model, "fp32")
        if self.device != device:
            self.device = device
            self.model.to(device)
        memory = self.model.encode(self.input_source(source))
        return SecondModelState(self, self.model.start(memory, beams), beams)
