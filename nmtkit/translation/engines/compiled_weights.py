"""The weights of a Transformer in the form that compiled code reads: packed arrays, and tables of their addresses."""

import numpy as np
import torch
from torch import Tensor, nn

from nmtkit.models.architectures.interface import layer_index
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import ADDED_POSITIONS, TransformerConfig
from nmtkit.models.architectures.transformer_layers import SelfAttention
from nmtkit.models.layers import int8
from nmtkit.models.layers.feed_forward import GATED, FeedForward
from nmtkit.models.layers.fixed_state import SSRU, AverageAttention
from nmtkit.models.layers.prepack import Precision
from nmtkit.models.layers.relative_positions import Rotary
from nmtkit.translation.engines import compiled_model as compiled
from nmtkit.translation.engines import compiled_products as products
from nmtkit.translation.engines.compiled_code import Array
from nmtkit.translation.engines.compiled_kernels import GELU, RELU, SWISH
from nmtkit.translation.engines.compiled_vectors import LANES

ACTIVATIONS = {"relu": RELU, "gelu": GELU, "swish": SWISH}
KINDS = {"attention": compiled.ATTENTION, "ssru": compiled.SSRU, "average": compiled.AVERAGE}


class WeightTables:
    """Tables of the addresses of weights. `arrays` keeps the arrays in memory."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.linears: list[list[int]] = []
        self.norms: list[list[int]] = []
        self.arrays: list[Array] = []
        self.newest = np.empty(0)  # packed weights of the newest linear layer

    def kept(self, array: Array) -> int:
        self.arrays.append(array)
        return array.ctypes.data

    def linear(self, weight: Tensor | None, bias: Tensor | None, missing: float = 0.0) -> None:
        """Appends a layer to the table of linear layers. Without `weight`, appends a row of zeros.

        The number of outputs is padded to a multiple of OUTPUTS. Padding outputs get the bias `missing`.
        """
        if weight is None:
            self.linears.append([0] * products.COLUMNS)
            return
        outputs, inputs = weight.shape
        size = products.packed_size(outputs)
        biases = np.full(size, missing, np.float32)
        biases[:outputs] = 0 if bias is None else array(bias)
        scales, corrections = np.zeros(size, np.float32), np.zeros(size, np.int32)
        if self.precision == "int8":
            integers, scale = (array(each) for each in int8.quantize(weight))
            scales[:outputs] = scale
            corrections[:outputs] = products.INTEGERS.offset * integers.astype(np.int32).sum(1)
            packed = products.packed(integers, products.INTEGERS.group)
        else:
            packed = products.packed(array(weight.detach().float()), 1)
        self.newest = packed
        addresses = [self.kept(each) for each in (packed, scales, corrections, biases)]
        padded = -(-inputs // LANES) * LANES
        self.linears.append([*addresses, inputs, padded, size, int(self.precision == "int8")])

    def norm(self, module: nn.Module | None) -> None:
        """Appends a norm to the table of norms, or a row of zeros for a module that is not a layer norm."""
        if not isinstance(module, nn.LayerNorm):
            self.norms.append([0, 0, 0])
            return
        gains = array(module.weight.detach().float())
        biases = np.zeros_like(gains) if module.bias is None else array(module.bias.detach().float())
        self.norms.append([self.kept(gains), self.kept(biases), len(gains)])

    def output_rows(self) -> Array:
        """Returns the table row of the output projection (the last row of `linears`), with weights that are not packed.

        The matrix of these weights has a row for each output. A search with a shortlist copies some rows of the matrix,
        which is several times as fast as copying from packed weights.
        """
        output = np.array(self.linears[-1], np.int64)
        output[products.WEIGHT] = self.kept(np.ascontiguousarray(self.newest.swapaxes(1, 2)))
        return output

    def modules(self, *modules: nn.Linear | None) -> None:
        """Appends linear layers, with a row of zeros for None."""
        for module in modules:
            self.linear(*(None, None) if module is None else (module.weight, module.bias))

    def ssru(self, module: SSRU) -> None:
        weight, bias = torch.cat([module.proj.weight, module.forget_proj.weight]), module.forget_proj.bias
        zeros = torch.zeros(len(module.proj.weight))
        self.linear(weight, torch.cat([zeros, zeros if bias is None else bias.detach().float()]))
        self.modules(None, None, None)


def parts(module: nn.Module | None) -> tuple[nn.Linear | None, nn.Linear | None]:
    """Returns the two linear layers of a feed-forward network, or None twice for other modules and for None."""
    return (module.fc1, module.fc2) if isinstance(module, FeedForward) else (None, None)


def model_of(model: Transformer, precision: Precision) -> tuple[Array, WeightTables]:
    """Returns the record MODEL of a model, without tables of positions, and the weights to which the record points."""
    tables, config = WeightTables(precision), model.config
    for layer in model.encoder:
        own = layer.self_attention
        assert isinstance(own, SelfAttention)
        tables.modules(own.qkv_proj, own.out_proj, *parts(layer.feed_forward))
        for module in (layer.self_attention_norm, None, layer.feed_forward_norm, None, None):
            tables.norm(module)
    for decoder in model.decoder:
        attention, cross = decoder.self_attention, decoder.cross_attention
        assert cross is not None
        norms: list[nn.Module | None] = [None, None]
        if isinstance(attention, SSRU):
            tables.ssru(attention)
            norms = [attention.norm, attention.forget_norm]
        elif isinstance(attention, AverageAttention):
            gate = attention.input_gate if attention.gate is None else attention.gate
            tables.modules(*parts(attention.feed_forward), gate, attention.average_gate)
        else:
            assert isinstance(attention, SelfAttention)
            tables.modules(attention.qkv_proj, attention.out_proj, None, None)
        tables.modules(cross.q_proj, cross.kv_proj, cross.out_proj, *parts(decoder.feed_forward))
        last = None if decoder.feed_forward is None else decoder.feed_forward_norm
        for part in (decoder.self_attention_norm, decoder.cross_attention_norm, last, *norms):
            tables.norm(part)
    for other in (model.source_embedding.norm, model.target_embedding.norm, model.encoder_norm, model.decoder_norm):
        tables.norm(other)
    output = model.output_projection
    tables.linear(output.weight, output.bias, missing=-np.inf)
    record = np.zeros((), compiled.MODEL)
    facts = {
        "linears": tables.kept(np.array(tables.linears, np.int64)),
        "norms": tables.kept(np.array(tables.norms, np.int64)),
        "width": config.d_model,
        "heads": config.heads,
        "inner": config.d_ff if config.decoder_ffn == "all" else 0,
        "encoder_inner": config.d_ff,
        "encoder_layers": len(model.encoder),
        "decoder_layers": len(model.decoder),
        "vocabulary": len(output.weight),
        "pre_norm": config.pre_norm,
        "activation": ACTIVATIONS[GATED.get(config.activation, config.activation)],
        "gated": config.activation in GATED,
        "self_attention": KINDS[config.decoder_self_attention],
        "average_inner": config.d_ff if config.average_ffn else 0,
        "gates": gates_of(config),
        "zero_first": model.target_embedding.zero_first,
        "alignment_layer": layer_index(None, len(model.decoder)),
        "eps": config.norm_eps,
        "source_scale": model.source_embedding.scale,
        "target_scale": model.target_embedding.scale,
        "source_tokens": tables.kept(array(model.source_embedding.tokens.weight.detach().float())),
        "target_tokens": tables.kept(array(model.target_embedding.tokens.weight.detach().float())),
    }
    for name, value in facts.items():
        record[name] = value
    return record, tables


def gates_of(config: TransformerConfig) -> int:
    if not config.average_gate:
        return compiled.NO_GATE
    return compiled.SEPARATE_GATES if config.average_separate_gates else compiled.JOINT_GATE


def position_tables(model: Transformer, length: int) -> dict[str, Array]:
    """Returns the position tables of a model, for at least `length` positions. The keys are fields of the record MODEL.

    If the model adds no positions to its embeddings, the tables of added positions are zeros.
    """
    config, size = model.config, max(1024, 2 * length)
    if config.positions in ADDED_POSITIONS:
        tables = [embedding.table(length) for embedding in (model.source_embedding, model.target_embedding)]
    else:
        tables = [torch.zeros(size, config.d_model)] * 2
    named = dict(zip(("source_positions", "target_positions"), tables, strict=True))
    if config.positions == "rotary":
        angles = Rotary(config.key_width, config.rotary_base).angles(torch.arange(size))
        named["turns"] = torch.cat([angles.cos(), angles.sin()], -1)
    return {name: array(table.float()) for name, table in named.items()}


def array(tensor: Tensor) -> Array:
    """Returns a tensor as a contiguous NumPy array, which shares the memory of the tensor if possible."""
    return np.ascontiguousarray(tensor.detach().cpu().numpy())
