"""Sinusoids, which are added to embeddings, and positions inside self-attention.

Positions inside self-attention are rotations of queries and keys, or terms that depend on distances. The distance
between a query and a key is the position of the key minus the position of the query. A Transformer with positions
inside self-attention adds no position encoding to its embeddings.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

# B sentences, T tokens, D width of a row, H heads, K width of a query or key head, Kv width of a value head, L queries,
# M keys


def sinusoids(positions: int, d_model: int, layout: str = "sinusoidal", offset: int = 0) -> Tensor:
    """Returns sinusoidal position encodings in fp32: positions x D. The first row is position `offset`.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), and PE(pos, 2i + 1) is the cosine of the same angle. The layout
    "sinusoidal_halves" has all sines before the cosines (transformers' MarianMTModel). "sinusoidal_fairseq" has the
    same order, but the angles are pos / 10000^(i / (d_model / 2 - 1)) (Marian itself, M2M-100, NLLB).
    """
    # The sinusoids are always computed on the CPU, even if the model is built without memory (on the meta device). On
    # the meta device, some operations would import torch._dynamo, which takes a second.
    double: Any = {"dtype": torch.float64, "device": "cpu"}
    position = torch.arange(offset, offset + positions, **double)[:, None]
    if layout == "sinusoidal_fairseq":  # for an odd d_model, the last column is zeros
        angle = position / 10000 ** (torch.arange(d_model // 2, **double) / max(1, d_model // 2 - 1))
        zeros = position.new_zeros(positions, d_model % 2)
        return torch.cat([angle.sin(), angle.cos(), zeros], -1).float()
    angle = position / 10000 ** (2 * torch.arange((d_model + 1) // 2, **double) / d_model)
    if layout == "sinusoidal":
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d_model].float()
    return torch.cat([angle.sin(), angle.cos()], -1)[:, :d_model].float()


class Rotary:
    """Rotates queries and keys by angles in proportion to their positions (Su et al. 2021, section 3.2.2, equation 34).

    The product of a rotated query and a rotated key depends on their positions only through the distance. Pair i of a
    head (elements i and i + K/2) is rotated by the angle position x base^(-2i / K).
    """

    def __init__(self, width: int, base: float) -> None:
        self.width, self.base = width, base

    def angles(self, positions: Tensor) -> Tensor:
        """Returns the angles of the pairs of a head at each position: … -> … K/2."""
        exponent = torch.arange(0, self.width, 2, device=positions.device) / self.width
        return positions[..., None] * self.base**-exponent

    def __call__(self, x: Tensor, positions: Tensor | int, heads: int) -> Tensor:
        """Returns a copy of x in which the first `heads` heads (of width K) of each row are rotated: T D -> T D.

        The other elements of a row, such as values, stay the same.

        `positions` are the positions of the tokens [T], or one integer for all.
        """
        angles = self.angles(torch.as_tensor(positions, device=x.device).expand(len(x)))[:, None]  # T 1 K/2
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return turned(x, heads, cos=cos, sin=sin)
        return _Turned.apply(x, cos, sin, heads)  # type: ignore[no-untyped-call]


def turned(x: Tensor, heads: int, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns a copy of x (T D) whose first `heads` heads are rotated. `cos` and `sin` of the angles are T 1 K/2."""
    tokens, pairs = len(x), cos.shape[-1]
    x = x.contiguous()
    result = x.clone()
    first, second = x[:, : 2 * heads * pairs].view(tokens, heads, 2, pairs).unbind(2)
    result_heads = result[:, : 2 * heads * pairs].view(tokens, heads, 2, pairs)
    result_heads.mul_(cos[:, :, None])
    result_heads[:, :, 0].addcmul_(second, sin, value=-1)
    result_heads[:, :, 1].addcmul_(first, sin)
    return result


class _Turned(torch.autograd.Function):
    """The function `turned`. Its gradient rotates back, so no copy of the heads is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return turned(x, heads, cos=cos, sin=sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(gradient, ctx.heads, cos=cos, sin=-sin), None, None, None


class PositionTerms(nn.Module):
    """Terms of attention that depend on distances. `distance` is an integer tensor that broadcasts to B 1 L M."""

    @abstractmethod
    def scores(self, query: Tensor, distance: Tensor) -> Tensor:
        """Returns the terms to add to Q K^T / sqrt(K), before the softmax: query B H L K -> B H L M."""

    def values(self, weights: Tensor, distance: Tensor) -> Tensor | None:
        """Returns the terms to add to the attended values, or None: weights B H L M -> B H L Kv."""
        return None


class Alibi(PositionTerms):
    """Attention with linear biases (Press et al. 2022, section 3): -m |distance|, with a slope m for each head.

    For n heads, where n is a power of 2, the slopes are 2^(-8/n), 2^(-16/n), …, 2^-8. For another number of heads, the
    first slopes are all slopes for the next lower power of 2. The other slopes are every second slope for the next
    higher power of 2, as in the code of the authors. The paper has causal attention only; here the bias is symmetric in
    an encoder.
    """

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        power = 1 << (heads.bit_length() - 1)
        exponents = [8 * (i + 1) / power for i in range(power)]
        exponents += [8 * (2 * i + 1) / (2 * power) for i in range(heads - power)]
        self.register_buffer("slopes", 2 ** -torch.tensor(exponents)[:, None, None], persistent=False)

    def scores(self, query: Tensor, distance: Tensor) -> Tensor:
        return (-self.slopes.to(query.dtype) * distance.abs()).expand(*query.shape[:3], -1)


class RelativePositions(PositionTerms):
    """Relative position representations (Shaw et al. 2018, section 3.2, equations 3 to 5).

    Distances are clipped to `limit`. Each clipped distance has two learned vectors: one vector is added to the keys,
    and the other vector is added to the values. All heads of a layer share the vectors.
    """

    def __init__(self, limit: int, *, key_width: int, value_width: int) -> None:
        super().__init__()
        self.limit = limit
        self.key_positions = nn.Embedding(2 * limit + 1, key_width)
        self.value_positions = nn.Embedding(2 * limit + 1, value_width)

    def scores(self, query: Tensor, distance: Tensor) -> Tensor:
        keys = vectors(self.key_positions).to(query.dtype)
        products = query @ keys.t() * query.shape[-1] ** -0.5  # [B, H, L, 2 limit + 1]
        return products.gather(-1, self._indices(distance, query))

    def values(self, weights: Tensor, distance: Tensor) -> Tensor:
        sums = weights.new_zeros(*weights.shape[:3], len(self.value_positions.weight))
        sums = sums.scatter_add(-1, self._indices(distance, weights), weights)
        return sums @ vectors(self.value_positions).to(weights.dtype)

    def _indices(self, distance: Tensor, like: Tensor) -> Tensor:
        """Returns the rows of the distances in the table of vectors, as [B, H, L, M]; `like` has the sizes B, H and L.

        A distance beyond the limit gets the row of the limit.
        """
        return (distance.clamp(-self.limit, self.limit) + self.limit).expand(*like.shape[:3], -1)


def vectors(embedding: nn.Embedding) -> Tensor:
    """Returns the vectors of all entries of an embedding: entries x width.

    The embedding is called, because `--quantize-aware` rounds the weight only during a call.
    """
    return embedding(torch.arange(embedding.num_embeddings, device=embedding.weight.device))
