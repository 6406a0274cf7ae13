"""Weights of residual connections for deep models with norms after the sub-layers: DeepNorm and Admin.

A layer computes norm(scale * x + f(x)) for each sub-layer f. Its attribute `scales` maps the name of each
sub-layer to its scale.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

SUBLAYERS = ("self_attention", "cross_attention", "feed_forward")  # in the order of their computation


def deepnorm(*, encoder_layers: int, decoder_layers: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns alpha and beta of the encoder, and alpha and beta of the decoder (Wang et al. 2022, figure 2).

    Alpha is the scale of x, and beta the factor of the initial weights.
    """
    n, m = encoder_layers, decoder_layers
    if not n:  # a language model
        return (1.0, 1.0), ((2 * m) ** 0.25, (8 * m) ** -0.25)
    power = n**4 * m
    return (0.81 * power ** (1 / 16), 0.87 * power ** (-1 / 16)), ((3 * m) ** 0.25, (12 * m) ** -0.25)


def use_deepnorm(layers: Iterable[nn.Module], *, alpha: float, beta: float) -> None:
    """Sets the scales of layers to `alpha`, and multiplies the initial weights of their linear layers by `beta`.

    The weights that compute queries and keys are not changed.
    """
    for layer in dict.fromkeys(layers):  # tied layers occur several times
        layer.scales = dict.fromkeys(SUBLAYERS, alpha)  # type: ignore[assignment]
        for name, module in layer.named_modules():
            kind = name.rpartition(".")[2]
            if not isinstance(module, nn.Linear) or kind == "q_proj":
                continue
            rows: tuple[int, ...] = getattr(module.weight, "stacked_rows", ())
            values = rows[-1] if kind in ("qkv_proj", "kv_proj") else len(module.weight)
            module.weight.detach()[-values:].mul_(beta)


def use_admin(layers: Sequence[nn.Module], width: int, run: Callable[[], object]) -> None:
    """Sets the scales of a stack of layers from the variances of one forward pass, `run` (Liu et al. 2020, section 4).

    A scale is a parameter [width]. The scale of sub-layer i is sqrt(Var[x_0] + sum of Var[f_j(x_{j-1})] for j < i),
    where x_0 is the input of the stack, and x_j is the output of sub-layer j. So the input and the output of a
    sub-layer have the same ratio as in a model with norms before the sub-layers.
    """
    by_sublayer: dict[nn.Module, nn.Parameter] = {}
    for layer in dict.fromkeys(layers):
        names = [name for name in SUBLAYERS if getattr(layer, name, None) is not None]
        layer.scales = nn.ParameterDict({name: torch.ones(width) for name in names})
        by_sublayer |= {getattr(layer, name): layer.scales[name] for name in names}
    first = next(layers[0].parameters())
    if first.is_meta or type(first.data) is not Tensor:  # a meta or fake tensor has a shape and no values
        return
    inputs: list[Tensor] = []
    outputs: list[tuple[nn.Module, float]] = []

    def record(module: nn.Module, arguments: object, output: Tensor) -> None:
        outputs.append((module, float(output.var())))

    with torch.no_grad(), ExitStack() as hooks:
        hooks.enter_context(layers[0].register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0])))
        for module in by_sublayer:
            hooks.enter_context(module.register_forward_hook(record))
        run()
    total = float(inputs[0].var())
    for module, variance in outputs:
        scale = by_sublayer.pop(module, None)  # None: a tied layer, whose scale comes from its first place in the stack
        if scale is not None:
            scale.data.fill_(total**0.5)
        total += variance
