"""A GRU encodes the sentence, and a second GRU decodes its translation (after Sutskever et al. 2014)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nmtkit.extend import ARCHITECTURES, Architecture, Packed, Vocabulary, option


@dataclass(frozen=True, kw_only=True)
class GRUConfig:
    width: int = option(256, "Width of embeddings and states.")


@ARCHITECTURES.register("gru", GRUConfig())
class GRU(Architecture):
    def __init__(self, config: GRUConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary.source, config.width)
        self.target = nn.Embedding(vocabulary.target, config.width)
        self.encoder = nn.GRU(config.width, config.width, batch_first=True)
        self.decoder = nn.GRU(2 * config.width, config.width, batch_first=True)
        self.output_projection = nn.Linear(config.width, vocabulary.target)

    def encode(self, source: Packed) -> Packed:
        states, _ = self.encoder(source.with_values(self.source(source.values)).to_padded())
        return Packed.from_padded(states, source.layout)

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        layout = target_input.layout
        summary = memory.values[memory.layout.cu_seqlens[1:].long() - 1]  # the state after each sentence's last token
        inputs = torch.cat((self.target(target_input.values), summary[layout.segment_ids]), dim=1)
        states, _ = self.decoder(Packed(inputs, layout).to_padded(), summary[None])
        return Packed.from_padded(states, layout).values
