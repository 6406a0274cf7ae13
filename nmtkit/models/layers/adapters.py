"""Low-rank adapters of linear layers (Hu et al. 2021, "LoRA"), as layers of a model and as named tensors.

With an adapter, a layer computes x W^T + scale (x A^T) B^T (section 4.1). A has shape [rank, in], B has shape [out,
rank], and scale = alpha / rank. Only A and B are trained. B is initialised with zeros, so training starts from the
original model. Outside training, the layer computes the merged weight W + scale B A in every call. After `merge`, the
model takes the same time as without adapters.
"""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.models.layers import is_unmodified

A, B = "adapter_a", "adapter_b"  # names of the additional parameters

ModelType = TypeVar("ModelType", bound=nn.Module)


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter. The layer shares the parameters of `linear` and keeps their names."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = linear.in_features, linear.out_features, scale
        self.weight, self.bias = linear.weight, linear.bias
        self.adapter_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.adapter_b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        # the initial values are the same as in loralib, which is the code of the authors
        nn.init.kaiming_uniform_(self.adapter_a, a=math.sqrt(5))
        if rows := getattr(linear.weight, "stacked_rows", None):
            self.adapter_b.stacked_rows = rows  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.linear(x, self.merged_weight(), self.bias)
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.adapter_a), self.adapter_b)

    def merged_weight(self) -> Tensor:
        with torch.autocast(self.weight.device.type, enabled=False):
            return torch.addmm(self.weight, self.adapter_b, self.adapter_a, alpha=self.scale)


# --- in a model -------------------------------------------------------------------------------------------------------


def adapt(model: nn.Module, rank: int, alpha: float, patterns: Sequence[str], output: nn.Module) -> list[str]:
    """Adds adapters to linear layers in place, freezes all other parameters, and returns the names of the layers.

    A layer gets an adapter if its name matches one of `patterns`. Initial values come from torch's global generator.
    The output projection `output` gets no adapter, because losses read its weight. Layers with hooks, and different
    layers with the same weight, also get no adapter. A layer that occurs several times (tied layers) has one adapter.
    Raises ValueError for a pattern without matches.
    """
    parameters = [id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)]
    candidates = {
        name: module
        for name, module in model.named_modules()
        if is_unmodified(module, nn.Linear) and module is not output and parameters.count(id(module.weight)) == 1
    }
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in candidates):
            raise ValueError(f"--adapter-layers {pattern} matches no linear layer; known: {', '.join(candidates)}")
    chosen = [name for name in candidates if any(fnmatchcase(name, pattern) for pattern in patterns)]
    model.requires_grad_(False)
    for name in chosen:
        model.set_submodule(name, AdaptedLinear(candidates[name], rank, alpha / rank))
    return chosen


def merge(model: ModelType) -> ModelType:
    """Changes each `AdaptedLinear` to an `nn.Linear` with the merged weight, in place. Returns the model."""
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            module.weight = nn.Parameter(module.merged_weight().detach(), requires_grad=False)
            del module.adapter_a, module.adapter_b, module.scale
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return model


# --- as tensors by name -----------------------------------------------------------------------------------------------


def adapters_in(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the adapter tensors in a model's `state_dict`."""
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] in (A, B)}


def merge_state(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Returns `base` with adapters merged into weights. Raises ValueError if an adapter does not match its layer."""
    merged = dict(base)
    layers = {name.rpartition(".")[0] for name in adapters}
    for layer in layers:
        a, b = (adapters.get(f"{layer}.{name}") for name in (A, B))
        weight = base.get(f"{layer}.weight")
        if a is None or b is None or weight is None or weight.shape != (len(b), a.shape[-1]) or len(a) != b.shape[-1]:
            raise ValueError(f"the adapter of {layer} does not match the weight of this layer")
        merged[f"{layer}.weight"] = torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
    return merged
