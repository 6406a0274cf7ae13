"""Optimizers by name (`--optimizer`): factories of `torch.optim.Optimizer`. The trainer sets the learning rate.

A registered factory is called as `factory(config, groups)`. Each group is a dict for optimizers of torch:

    "name"          "matrices", "embeddings" (with the output projection), "vectors", or "tensors" (three or more axes).
                    If --weight-decay-for makes several groups of a kind, the name ends with the decay.
    "params"        parameters
    "param_names"   names of the parameters
    "weight_decay"  weight decay, if it differs from the weight decay of the optimizer (for example, 0 for vectors)

Before every step, the trainer sets "lr" of each group to the learning rate of the schedule, times "lr_scale" of the
group if present.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nmtkit.config import Config, option
from nmtkit.config.registry import Registry
from nmtkit.training.optimizers.adafactor import Adafactor

ParameterGroups = list[dict[str, Any]]


class OptimizerRegistry(Registry[Optimizer]):
    """The registry of optimizers. `on_shards` holds the names of the optimizers that work on shards of parameters."""

    def __init__(self) -> None:
        super().__init__("optimizer", "--optimizer")
        self.on_shards: set[str] = set()

    def register(
        self, name: str, preset: Any, works_on_shards: bool = False
    ) -> Callable[[Callable[..., Optimizer]], Callable[..., Optimizer]]:
        """Returns a decorator like `Registry.register`. --parallel fsdp rejects optimizers without `works_on_shards`.

        `works_on_shards` declares that a step on some rows of a parameter (with the same rows of its gradient and
        state) gives the same values as a step on the whole parameter. This is true, for example, for element-wise
        optimizers.
        """
        keep = super().register(name, preset)

        def declare(factory: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
            keep(factory)
            self.on_shards = self.on_shards | {name} if works_on_shards else self.on_shards - {name}
            return factory

        return declare


OPTIMIZERS = OptimizerRegistry()


@dataclass(frozen=True, kw_only=True)
class AdamConfig(Config):
    adam_betas: tuple[float, ...] = option(
        (0.9, 0.98), "Decay rates of the two moments (section 5.3 of the paper).", min=0, below=1
    )
    adam_eps: float = option(1e-9, "Constant that is added to the square root of the second moment.", above=0, max=1)
    weight_decay: float = option(0.0, "L2 penalty, which is added to the gradient.", min=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.adam_betas) != 2:
            raise ValueError(f"--adam-betas is {','.join(map(str, self.adam_betas))}; it must be two numbers")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(AdamConfig):
    weight_decay: float = option(0.01, "Share of a weight that each update subtracts, times the learning rate.", min=0)


@OPTIMIZERS.register("adam", AdamConfig(), works_on_shards=True)
def adam(config: AdamConfig, groups: ParameterGroups) -> Optimizer:
    """Adam (Kingma & Ba 2015), with the constants of Vaswani et al. 2017, section 5.3."""
    return torch.optim.Adam(groups, **_adam_arguments(config))


@OPTIMIZERS.register("adamw", AdamWConfig(), works_on_shards=True)
def adamw(config: AdamWConfig, groups: ParameterGroups) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""
    return torch.optim.AdamW(groups, **_adam_arguments(config))


def _adam_arguments(config: AdamConfig) -> dict[str, Any]:
    return {
        "lr": 0.0,
        "betas": config.adam_betas,
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
        "fused": True,
    }


@dataclass(frozen=True, kw_only=True)
class SGDConfig(Config):
    momentum: float = option(0.99, "Nesterov momentum; 0: no momentum.", min=0, below=1)
    weight_decay: float = option(0.0, "L2 penalty, which is added to the gradient.", min=0)


@OPTIMIZERS.register("sgd", SGDConfig(), works_on_shards=True)
def sgd(config: SGDConfig, groups: ParameterGroups) -> Optimizer:
    """Stochastic gradient descent with Nesterov momentum (Sutskever et al. 2013).

    The momentum is initialised with zeros, because the fused kernel of torch leaves the momentum uninitialised if the
    first update is skipped (its gradient is not finite).
    """
    momentum, weight_decay = config.momentum, config.weight_decay
    nesterov = momentum > 0
    optimizer = torch.optim.SGD(
        groups, lr=0.0, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, fused=True
    )
    for parameter in [p for group in optimizer.param_groups for p in group["params"]] if momentum else []:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


@dataclass(frozen=True, kw_only=True)
class AdafactorConfig(Config):
    beta2_decay: float = option(-0.8, "X in the decay of the second moment, 1 - update^X.", min=-10, max=0)
    update_clip: float = option(
        1.0, "Maximum root mean square of an update before the learning rate is applied.", min=1
    )
    weight_decay: float = option(0.0, "Share of a weight that each update subtracts, times the learning rate.", min=0)


@OPTIMIZERS.register("adafactor", AdafactorConfig())
def adafactor(config: AdafactorConfig, groups: ParameterGroups) -> Optimizer:
    """Adafactor (Shazeer & Stern 2018): second moments by row and column, for models whose Adam state is too large.

    The learning rate is relative: each update is scaled by the root mean square of the weights.
    """
    return Adafactor(
        groups,
        lr=0.0,
        beta2_decay=config.beta2_decay,
        update_clip=config.update_clip,
        weight_decay=config.weight_decay,
    )


# --- facts about optimizers -------------------------------------------------------------------------------------------


def parameter_names(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns the names of the parameters in each group of an optimizer.

    The names come from "param_names" of a group, or else from `parameters`. If neither has a name for a tensor, for
    example for a tensor made by a plug-in, the name is the position of the tensor in the optimizer.
    """
    known = {id(parameter): name for name, parameter in parameters.items()}
    return [
        list(group.get("param_names", ()))
        or [known.get(id(tensor), f"group {number}, tensor {i}") for i, tensor in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]


def state_bytes(optimizer: str, config: Any, groups: Iterable[Mapping[str, Any]]) -> int:
    """Returns the bytes of the state of an optimizer. An unknown optimizer is assumed to need as much as Adam."""
    per_parameter = {"adam": 8, "adamw": 8, "adafactor": 0, "sgd": 4 if getattr(config, "momentum", 0) else 0}
    numbers = {"matrices": 0, "others": 0}
    for group in groups:
        kind = "matrices" if str(group.get("name")).startswith("matrices") else "others"
        numbers[kind] += sum(parameter.numel() for parameter in group["params"])
    if optimizer == "muon":  # one momentum for matrices, two moments of AdamW for all other parameters
        return 4 * numbers["matrices"] + 8 * numbers["others"]
    return per_parameter.get(optimizer, 8) * sum(numbers.values())


# --- several optimizers as one ----------------------------------------------------------------------------------------


class CompositeOptimizer(Optimizer):
    """Several optimizers, each with its own parameters, that act as a single optimizer.

    `param_groups` holds the groups of all optimizers in order. All optimizers share `state`, so that `state_dict` has
    the usual format.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            state.update(optimizer.state)
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.state = state
        self._share()
        # True if all optimizers read `found_inf` on the device, like the fused optimizers of torch
        self._step_supports_amp_scaling = all(
            getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers
        )

    def _share(self) -> None:
        first = 0
        for optimizer in self.optimizers:
            end = first + len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[first:end], self.state
            first = end

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes a step of each optimizer. Does not support a `closure`, because each optimizer would call it."""
        assert closure is None
        for optimizer in self.optimizers:
            if self._step_supports_amp_scaling:
                for name in ("found_inf", "grad_scale"):
                    setattr(optimizer, name, getattr(self, name, None))
            optimizer.step()


# --- Muon -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MuonConfig(AdamWConfig):
    weight_decay: float = option(0.1, "Share of a weight that each update subtracts, times the learning rate.", min=0)
    muon_momentum: float = option(0.95, "Nesterov momentum of the matrices.", min=0, below=1)
    muon_steps: int = option(5, "Newton-Schulz iterations that orthogonalise a matrix.", min=1, max=99)
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw", "Scale of an update: match the root mean square of AdamW, or use the rule of Jordan."
    )
    muon_lr_scale: float = option(1.0, "Learning rate of the matrices as a multiple of --lr.", above=0)


@OPTIMIZERS.register("muon", MuonConfig())
def muon(config: MuonConfig, groups: ParameterGroups) -> Optimizer:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for matrices, AdamW for other parameters.

    torch.optim.Muon orthogonalises the momentum of matrices inside the model. Embeddings, the output projection,
    vectors and tensors with more than two axes get AdamW. By default, the update of a matrix has the root mean square
    0.2, like an update of AdamW (Liu et al. 2025, arXiv 2502.16982, section 2.2), so both can share a learning rate.
    With `original`, the update is scaled by the square root of max(1, rows / columns), and usual learning rates are
    near 0.02.

    If a weight holds the projections of queries, keys and values, each projection is orthogonalised separately (Jordan
    et al. 2024). Raises ValueError if no matrix is trained.
    """
    matrices = [group for group in groups if group["name"].startswith("matrices")]
    others = [group for group in groups if not group["name"].startswith("matrices")]
    if not matrices:
        raise ValueError("--optimizer muon needs a matrix, but this run trains no matrix; give --optimizer adamw")
    splits: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
    optimizer = torch.optim.Muon(
        [_split_stacked(group, splits) | {"lr_scale": config.muon_lr_scale} for group in matrices],
        lr=0.0,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        ns_steps=config.muon_steps,
        adjust_lr_fn=config.muon_adjust_lr,
    )

    def share_gradients(*_: Any) -> None:
        for whole, parts in splits:
            if whole.grad is not None:
                for part, gradient in zip(parts, whole.grad.split([len(part) for part in parts]), strict=True):
                    part.grad = gradient

    optimizer.register_step_pre_hook(share_gradients)
    return CompositeOptimizer(optimizer, adamw(config, others)) if others else optimizer


def _split_stacked(group: dict[str, Any], splits: list[tuple[nn.Parameter, list[nn.Parameter]]]) -> dict[str, Any]:
    """Returns the group with each weight of stacked projections (`stacked_rows`) replaced by a view of each projection.

    Adds each replaced weight and its views to `splits`.
    """
    params, names = [], []
    for name, parameter in zip(group["param_names"], group["params"], strict=True):
        rows: tuple[int, ...] = getattr(parameter, "stacked_rows", ())
        parts = [nn.Parameter(part) for part in parameter.detach().split(rows)] if rows else [parameter]
        if rows:
            splits.append((parameter, parts))
        params += parts
        names += [f"{name}[{index}]" for index in range(len(parts))] if rows else [name]
    return group | {"params": params, "param_names": names}
