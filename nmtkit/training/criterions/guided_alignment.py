"""Guided alignment: word alignments supervise cross-attention (Chen et al. 2016; Garg et al. 2019)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nmtkit.config import option
from nmtkit.data.packed import Batch
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models.architectures import Architecture
from nmtkit.models.layers.losses import output_cross_entropy
from nmtkit.training.criterions.cross_entropy import CrossEntropy, LabelSmoothedConfig
from nmtkit.training.criterions.interface import CRITERIONS, Loss

# B sentences, H heads, L tokens of the longest target sentence, M tokens of the longest source sentence


@dataclass(frozen=True, kw_only=True)
class GuidedAlignmentConfig(LabelSmoothedConfig):
    alignment_weight: float = option(0.05, "Weight of the alignment loss relative to the cross-entropy.", min=0)
    alignment_layer: int | None = option(
        None,
        "Decoder layer to supervise, counted from 1; none: the second-to-last layer, or the last if there are at "
        "most two.",
        min=1,
        max=1000,
    )
    alignment_head: int | None = option(
        1, "Attention head to supervise in this layer, counted from 1; none: the mean of all heads.", min=1, max=1000
    )


@CRITERIONS.register("guided_alignment", GuidedAlignmentConfig())
class GuidedAlignment(CrossEntropy):
    """Smoothed cross-entropy, plus the cross-entropy between the attention of one head and given word alignments.

    A target token that is aligned to n source tokens should attend to each of these tokens with weight 1 / n (Garg et
    al. 2019, section 4.2). Target tokens without alignment are ignored. A validation set without alignments is scored
    with cross-entropy only.
    """

    def __init__(self, config: GuidedAlignmentConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.config = config

    def compute_loss(self, model: Architecture, batch: Batch) -> Loss:
        config = self.config
        if batch.alignments is None:
            if self.training:
                raise ValueError(
                    "--criterion guided_alignment needs word alignments of the training pairs: run preprocess with "
                    "--alignments (pairs that --transforms change have no alignments)"
                )
            return super().compute_loss(model, batch)
        features, weights = model.forward_with_attention(batch.source, batch.target_input, config.alignment_layer)
        loss, nll = output_cross_entropy(model.output_projection, features, batch.target_output, self.label_smoothing)
        if weights is None:  # this update skips the supervised layer
            return Loss(loss, {"nll": nll})
        alignment = alignment_loss(weights, batch.alignments, config.alignment_head)
        return Loss(loss + config.alignment_weight * alignment, {"nll": nll, "alignment": alignment.detach()})


def alignment_loss(weights: Tensor, alignments: Tensor, head: int | None) -> Tensor:
    """Returns the cross-entropy between attention weights [B, H, L, M] and alignments.

    The cross-entropy is summed over aligned target tokens.

    Each row of `alignments` [links, 3] has sentence, source position and target position. `head` is the number of a
    head, from 1. If `head` is None, the mean of the weights of all heads is used. Raises ValueError for a head that
    does not exist.
    """
    if head is not None and head > weights.shape[1]:
        raise ValueError(f"--alignment-head is {head}; the layer has {weights.shape[1]} heads")
    attention = (weights.mean(1) if head is None else weights[:, head - 1]).float()
    sentence, source, target = alignments.unbind(1)
    token = sentence * weights.shape[2] + target
    links = attention.new_zeros(attention.shape[0] * attention.shape[1])
    links = links.index_add(0, token, links.new_ones(len(token)))  # number of links of each target token
    log_p = attention[sentence, target, source].clamp(min=torch.finfo(torch.float32).tiny).log()
    return -(log_p / links[token]).sum()
