"""Names of the layers of a Transformer in nmtkit and in other formats. Imports and exports read the same tables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nmtkit.models.architectures import Vocabulary
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.models.building import without_memory

PARAMETER = re.compile(r"(source|target|encoder|decoder)(_|\.(\d+)\.)(.+)\.(weight|bias)")
WEIGHT_OR_BIAS = re.compile(r"\{(\w+)\|(\w+)\}")
# decoder_self_attention -> Marian's name of the sub-layer before the norm of self-attention
MARIAN_SUBLAYER = {"attention": "self_Wo", "ssru": "rnn_ffn", "average": "aan_ffn"}


@dataclass(frozen=True)
class LayerNames:
    """The names of layers in a format. Each row maps a layer of nmtkit to one or several layers of the format.

    Imports also read the last four fields. `source` and `target` are the possible names of the embeddings in a file,
    the preferred name first. `output` and `output_bias` are the names of the output projection.

    `{q|b}` in a name stands for q in the name of a weight, and for b in the name of a bias. A name without such a pair
    gets the ending .weight or .bias. `{stack}` is encoder or decoder, and `{index}` is the index of a layer in its
    stack. `{number}` is index + 1, but decoder layers that share their weights have the same number. `{sublayer}` is
    Marian's name of the sub-layer before the norm of self-attention.
    """

    prefix: str  # for names outside encoder and decoder layers
    layer_prefix: str  # for names in encoder and decoder layers
    rows: Mapping[str, str]
    source: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    output: str = ""
    output_bias: str = ""

    def of(self, config: TransformerConfig) -> dict[str, list[str]]:
        """Maps the name of each parameter of nmtkit to the names of its tensors in the other toolkit.

        The parameter is the concatenation of these tensors. Parameters that have no row in `rows` are left out.
        """
        with without_memory():
            parameters = Transformer(config, Vocabulary(source=8, target=8, joint=True)).state_dict()
        names: dict[str, list[str]] = {}
        for match in filter(None, map(PARAMETER.fullmatch, parameters)):
            side, _, index, layer, kind = match.groups()
            stack = {"source": "encoder", "target": "decoder"}.get(side, side)
            words = {"stack": stack, "index": index, "number": int(index or 0) + 1, "sublayer": "self_Wo"}
            if stack == "decoder":
                words["sublayer"] = MARIAN_SUBLAYER[config.decoder_self_attention]
                if config.decoder_tied_layers and index:
                    words["number"] = config.decoder_tied_layers[int(index)]
            for part in self.rows.get(layer, "").split():
                name = (self.layer_prefix if index else self.prefix) + part + ("" if "|" in part else f".{kind}")
                name = WEIGHT_OR_BIAS.sub(r"\1" if kind == "weight" else r"\2", name)
                names.setdefault(match[0], []).append(name.format(**words))
        return names


def split(parameters: Mapping[str, Tensor], names: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """Returns the tensors of a format: the parts of the parameters of nmtkit, under the names of `LayerNames.of`."""
    parts = ((theirs, parameters[ours].chunk(len(theirs))) for ours, theirs in names.items())
    return {name: tensor for theirs, tensors in parts for name, tensor in zip(theirs, tensors, strict=True)}


FAIRSEQ = LayerNames(
    "{stack}.",
    "{stack}.layers.{index}.",
    {
        "embedding.norm": "layernorm_embedding",
        "embedding.positions": "embed_positions",
        "norm": "layer_norm",
        "self_attention.qkv_proj": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attention.out_proj": "self_attn.out_proj",
        "self_attention_norm": "self_attn_layer_norm",
        "cross_attention.q_proj": "encoder_attn.q_proj",
        "cross_attention.kv_proj": "encoder_attn.k_proj encoder_attn.v_proj",
        "cross_attention.out_proj": "encoder_attn.out_proj",
        "cross_attention_norm": "encoder_attn_layer_norm",
        "feed_forward.fc1": "fc1",
        "feed_forward.fc2": "fc2",
        "feed_forward_norm": "final_layer_norm",
    },
    source=("encoder.embed_tokens.weight",),
    target=("decoder.embed_tokens.weight",),
    output="decoder.output_projection.weight",
    output_bias="decoder.output_projection.bias",
)
TRANSFORMERS = LayerNames(
    "model." + FAIRSEQ.prefix,
    "model." + FAIRSEQ.layer_prefix,
    FAIRSEQ.rows,
    source=("model.shared.weight", "model.encoder.embed_tokens.weight"),
    target=("model.decoder.embed_tokens.weight", "model.shared.weight"),
    output="lm_head.weight",
    output_bias="final_logits_bias",
)
MARIAN = LayerNames(
    "{stack}_",
    "{stack}_l{number}_",
    {
        "embedding.norm": "emb_ln_{scale_pre|bias_pre}",
        "self_attention.qkv_proj": "self_{W|b}q self_{W|b}k self_{W|b}v",
        "self_attention.out_proj": "self_{W|b}o",
        "self_attention.proj": "rnn_{W|b}",
        "self_attention.forget_proj": "rnn_{W|b}f",
        "self_attention.norm": "rnn_{gamma|b}",
        "self_attention.forget_norm": "rnn_{gamma|b}f",
        "self_attention.feed_forward.fc1": "aan_{W|b}1",
        "self_attention.feed_forward.fc2": "aan_{W|b}2",
        "self_attention.input_gate": "aan_{W|b}i",
        "self_attention.average_gate": "aan_{W|b}f",
        "self_attention_norm": "{sublayer}_ln_{scale|bias}",
        "cross_attention.q_proj": "context_{W|b}q",
        "cross_attention.kv_proj": "context_{W|b}k context_{W|b}v",
        "cross_attention.out_proj": "context_{W|b}o",
        "cross_attention_norm": "context_Wo_ln_{scale|bias}",
        "feed_forward.fc1": "ffn_{W|b}1",
        "feed_forward.fc2": "ffn_{W|b}2",
        "feed_forward_norm": "ffn_ffn_ln_{scale|bias}",
    },
    source=("Wemb", "encoder_Wemb"),
    target=("Wemb", "decoder_Wemb"),
    output="decoder_ff_logit_out_Wt",
    output_bias="decoder_ff_logit_out_b",
)
CTRANSLATE2 = LayerNames(
    "{stack}.",
    "{stack}.layer.{index}.",
    {
        "embedding.norm": "layernorm_embedding.{gamma|beta}",
        "norm": "layer_norm.{gamma|beta}",
        "self_attention.qkv_proj": "self_attention.linear.0",
        "self_attention.out_proj": "self_attention.linear.1",
        "self_attention.position_terms.key_positions": "self_attention.relative_position_{keys|keys}",
        "self_attention.position_terms.value_positions": "self_attention.relative_position_{values|values}",
        "self_attention_norm": "self_attention.layer_norm.{gamma|beta}",
        "cross_attention.q_proj": "attention.linear.0",
        "cross_attention.kv_proj": "attention.linear.1",
        "cross_attention.out_proj": "attention.linear.2",
        "cross_attention_norm": "attention.layer_norm.{gamma|beta}",
        "feed_forward.fc1": "ffn.linear_0",
        "feed_forward.fc2": "ffn.linear_1",
        "feed_forward_norm": "ffn.layer_norm.{gamma|beta}",
    },
)
