"""The formulas of "Attention Is All You Need" and of the variants of a Transformer, in float64, one sentence at a time.

The tests compare `nmtkit.models.architectures.transformer` with this module. The module uses the weights of a model,
but none of its layers.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nmtkit.models.architectures.transformer import Transformer


class TransformerByHand:
    """Computes the features of a sentence pair with the weights of `model`. Shapes: T, S: tokens; D: width."""

    def __init__(self, model: Transformer) -> None:
        self.config = model.config
        self.weights = {name: value.double() for name, value in model.state_dict().items()}

    def features(self, source: list[int], target: list[int]) -> Tensor:
        """Returns the output of the decoder, T D, for the prefix `target` of a translation (section 3.1)."""
        memory = self.embed("source", source)
        for index in range(self.config.encoder_layers):
            memory = self.encoder_layer(f"encoder.{index}", memory)
        memory = self.norm(memory, "encoder_norm") if self.config.pre_norm else memory
        x = self.embed("target", target)
        for index in range(self.config.decoder_layers):
            x = self.decoder_layer(f"decoder.{index}", x, memory)
        x = self.norm(x, "decoder_norm") if self.config.pre_norm else x
        base = self.config.base_width
        return x if base is None else x / math.sqrt(self.config.d_model / base)

    def encoder_layer(self, layer: str, x: Tensor) -> Tensor:
        x = self.residual(x, f"{layer}.self_attention", partial(self.around, f"{layer}.self_attention"))
        return self.residual(x, f"{layer}.feed_forward", partial(self.feed_forward, f"{layer}.feed_forward"))

    def decoder_layer(self, layer: str, x: Tensor, memory: Tensor) -> Tensor:
        cross_attention = partial(self.cross_attention, f"{layer}.cross_attention", memory)
        x = self.residual(x, f"{layer}.self_attention", partial(self.past, f"{layer}.self_attention"))
        x = self.residual(x, f"{layer}.cross_attention", cross_attention)
        if self.config.decoder_ffn == "none":
            return x
        return self.residual(x, f"{layer}.feed_forward", partial(self.feed_forward, f"{layer}.feed_forward"))

    def around(self, name: str, x: Tensor) -> Tensor:
        """Returns the output of the self-attention of an encoder layer, or of the convolution that replaces it."""
        if self.config.encoder_self_attention == "attention":
            return self.attention(name, False, x)
        return self.convolution(name, x, self.config.encoder_self_attention == "dynamicconv", causal=False)

    def past(self, name: str, x: Tensor) -> Tensor:
        """Returns the output of causal self-attention, or of the sub-layer that replaces it."""
        if self.config.decoder_self_attention.endswith("conv"):
            return self.convolution(name, x, self.config.decoder_self_attention == "dynamicconv", causal=True)
        if self.config.decoder_self_attention == "average":
            return self.average_attention(name, x)
        if self.config.decoder_self_attention == "ssru":
            return self.ssru(name, x)
        return self.attention(name, True, x)

    # Sections 3.4 and 3.5: embeddings and positions

    def embed(self, side: str, tokens: list[int]) -> Tensor:
        x = self.weights[f"{side}_embedding.tokens.weight"][tokens]
        x = x * math.sqrt(self.config.d_model) if self.config.scale_embeddings else x
        if self.config.zero_bos and side == "target":
            x = torch.cat([torch.zeros_like(x[:1]), x[1:]])
        if self.config.positions == "learned":
            x = x + self.weights[f"{side}_embedding.positions.weight"][: len(tokens)]
        elif self.config.positions.startswith("sinusoidal"):
            columns = range(self.config.d_model)
            table = [[self.sinusoid(position, column) for column in columns] for position in range(len(tokens))]
            x = x + torch.tensor(table, dtype=torch.float64)
        return self.norm(x, f"{side}_embedding.norm") if self.config.embedding_norm else x

    def sinusoid(self, position: int, column: int) -> float:
        pairs = self.config.d_model // 2
        if self.config.positions == "sinusoidal":
            pair, cosine = divmod(column, 2)
        else:  # all sines, then all cosines
            cosine, pair = divmod(column, pairs)
        power = pair / (pairs - 1) if self.config.positions == "sinusoidal_fairseq" else pair / pairs
        angle = (position + self.config.position_offset) / 10000**power
        return math.cos(angle) if cosine else math.sin(angle)

    # Section 3.1: residual connections and layer normalization

    def residual(self, x: Tensor, name: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.config.pre_norm:
            return x + sublayer(self.norm(x, f"{name}_norm"))
        return self.norm(x * self.scale(name) + sublayer(x), f"{name}_norm")

    def scale(self, name: str) -> Tensor | float:
        """Returns the weight of the residual connection: of Wang et al. 2022 (DeepNorm), or a vector (Admin)."""
        if self.config.residual == "deepnorm":
            n, m = self.config.encoder_layers, self.config.decoder_layers
            return 0.81 * (n**4 * m) ** 0.0625 if name.startswith("encoder") else (3 * m) ** 0.25
        layer, _, sublayer = name.rpartition(".")
        return self.weights[f"{layer}.scales.{sublayer}"] if self.config.residual == "admin" else 1.0

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.config.norm == "rms":  # Zhang and Sennrich 2019, equation 4
            x = x / (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()
            return x * self.weights[f"{name}.weight"]
        return self.standardized(x) * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def standardized(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    # Section 3.2: attention

    def attention(self, name: str, causal: bool, x: Tensor) -> Tensor:
        config = self.config
        parts = [config.heads * config.key_width, *self.sizes_of_keys()]
        query, key, value = self.linear(f"{name}.qkv_proj", x).split(parts, -1)
        return self.linear(f"{name}.out_proj", self.attend(name, query, key, value, causal))

    def cross_attention(self, name: str, memory: Tensor, x: Tensor) -> Tensor:
        key, value = self.linear(f"{name}.kv_proj", memory).split(self.sizes_of_keys(), -1)
        query = self.linear(f"{name}.q_proj", x)
        return self.linear(f"{name}.out_proj", self.attend(name, query, key, value, causal=None))

    def sizes_of_keys(self) -> list[int]:
        heads = self.config.kv_heads or self.config.heads
        return [heads * self.config.key_width, heads * self.config.value_width]

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, causal: bool | None) -> Tensor:
        """Returns the results of all heads side by side. `causal` is None for attention to the source."""
        widths = (self.config.key_width, self.config.key_width, self.config.value_width)
        queries, keys, values = (x.split(width, -1) for x, width in zip((query, key, value), widths, strict=True))
        shared, positions, results = len(queries) // len(keys), self.config.positions, []
        for head, q in enumerate(queries):
            k, v = keys[head // shared], values[head // shared]
            if self.config.qk_norm:
                q, k = self.norm(q, f"{name}.query_norm"), self.norm(k, f"{name}.key_norm")
            if causal is None or positions not in ("rotary", "relative", "alibi"):
                scores = q @ k.T / math.sqrt(self.config.key_width)
                values_of = [v] * len(q)
            else:
                scores, values_of = getattr(self, positions)(name, head, q, k, v)
            if causal:
                scores = scores + torch.full_like(scores, -math.inf).triu(1)
            weights = scores.softmax(-1)
            results.append(torch.stack([weights[i] @ values_of[i] for i in range(len(q))]))
        return torch.cat(results, -1)

    def rotary(self, name: str, head: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Su et al. 2021, equation 16, as products of complex numbers: pair i has the elements i and i + K/2."""
        half, base = q.shape[1] // 2, self.config.rotary_base
        angles = torch.tensor([[p * base ** (-i / half) for i in range(half)] for p in range(len(q))])
        turn = torch.polar(torch.ones_like(angles.double()), angles.double())
        turned_q, turned_k = (torch.complex(x[:, :half], x[:, half:]) * turn for x in (q, k))
        scores = (turned_q @ turned_k.conj().T).real / math.sqrt(q.shape[1])
        return scores, [v] * len(q)

    def relative(self, name: str, head: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Shaw et al. 2018, equations 3 and 4: the keys and the values that each query sees."""
        limit = self.config.max_distance
        indices = [[max(-limit, min(limit, j - i)) + limit for j in range(len(k))] for i in range(len(q))]
        keys, values = (self.weights[f"{name}.position_terms.{part}_positions.weight"] for part in ("key", "value"))
        scores = [(k + keys[row]) @ q[i] / math.sqrt(q.shape[1]) for i, row in enumerate(indices)]
        return torch.stack(scores), [v + values[row] for row in indices]

    def alibi(self, name: str, head: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Press et al. 2022, section 3, with the slopes of its footnote for 3 heads."""
        slope = {1: [2**-8], 2: [2**-4, 2**-8], 3: [2**-4, 2**-8, 2**-2], 4: [2**-2, 2**-4, 2**-6, 2**-8]}
        bias = [[-slope[self.config.heads][head] * abs(i - j) for j in range(len(k))] for i in range(len(q))]
        return q @ k.T / math.sqrt(q.shape[1]) + torch.tensor(bias), [v] * len(q)

    # Section 3.3: feed-forward networks

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        inner = self.linear(f"{name}.fc1", x)
        if self.config.activation.endswith("glu"):
            gate, inner = inner.split(self.config.d_ff, -1)
            inner = self.activation(gate) * inner
        else:
            inner = self.activation(inner)
        return self.linear(f"{name}.fc2", inner)

    def activation(self, x: Tensor) -> Tensor:
        if self.config.activation.startswith("re"):
            return x.clamp(min=0)
        if self.config.activation.startswith("ge"):
            return x * (1 + torch.erf(x / math.sqrt(2))) / 2
        return x * sigmoid(x)

    # Replacements of the self-attention of the decoder

    def average_attention(self, name: str, x: Tensor) -> Tensor:
        """Zhang et al. 2018, "Accelerating Neural Transformer via an Average Attention Network", section 3."""
        past = torch.stack([x[: length + 1].sum(0) / (length + 1) for length in range(len(x))])
        past = self.feed_forward(f"{name}.feed_forward", past) if self.config.average_ffn else past
        if not self.config.average_gate:
            return past
        if self.config.average_separate_gates:
            current = sigmoid(self.linear(f"{name}.input_gate", x))
            return current * x + sigmoid(self.linear(f"{name}.average_gate", past)) * past
        gates = sigmoid(self.linear(f"{name}.gate", torch.cat([x, past], -1)))
        return gates[:, : self.config.d_model] * x + gates[:, self.config.d_model :] * past

    def convolution(self, name: str, x: Tensor, dynamic: bool, causal: bool) -> Tensor:
        """Wu et al. 2019, equations 1 and 2 and section 4, one token and one channel at a time."""
        kernels, layer = self.config.kernels, int(name.split(".")[1])
        width = kernels[min(layer, len(kernels) - 1)]
        values, gates = self.linear(f"{name}.in_proj", x).split(self.config.d_model, -1)
        x = values * sigmoid(gates)
        result = torch.zeros_like(x)
        for token in range(len(x)):
            if dynamic:
                weights = (self.weights[f"{name}.weight_proj.weight"] @ x[token]).view(self.config.heads, width)
            else:
                weights = self.weights[f"{name}.weight"]
            weights = weights.exp() / weights.exp().sum(-1, keepdim=True)
            for channel in range(self.config.d_model):
                head = channel * self.config.heads // self.config.d_model
                for tap in range(width):
                    other = token + tap - (width - 1) + (0 if causal else width // 2)
                    if 0 <= other < len(x):
                        result[token, channel] += weights[head, tap] * x[other, channel]
        return self.linear(f"{name}.out_proj", result)

    def ssru(self, name: str, x: Tensor) -> Tensor:
        """Kim et al. 2019, "From Research to Production and Back: Ludicrously Fast Neural Machine Translation"."""
        values, forgets = (x @ self.weights[f"{name}.{part}.weight"].T for part in ("proj", "forget_proj"))
        if self.config.ssru_norm:
            values = self.standardized(values) * self.weights[f"{name}.norm.weight"]
            forgets = self.standardized(forgets) * self.weights[f"{name}.forget_norm.weight"]
        forgets = forgets + self.weights[f"{name}.forget_{'norm' if self.config.ssru_norm else 'proj'}.bias"]
        cell, outputs = torch.zeros(self.config.d_model, dtype=torch.float64), []
        for value, forget in zip(values, sigmoid(forgets), strict=True):
            cell = forget * cell + (1 - forget) * value
            outputs.append(cell.clamp(min=0))
        return torch.stack(outputs)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))
