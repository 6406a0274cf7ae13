"""Muon for the matrices of a model together with AdamW for its other parameters, as a single optimizer."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nmtkit.config import option
from nmtkit.models.layers import multiplies_in_bf16
from nmtkit.training.optimizers.elementwise import AdamWConfig, adamw
from nmtkit.training.optimizers.interface import OPTIMIZERS, ParameterGroups


@dataclass(frozen=True, kw_only=True)
class MuonConfig(AdamWConfig):
    weight_decay: float = option(0.1, "Each update subtracts this share of a weight, times the learning rate.", min=0)
    muon_momentum: float = option(0.95, "Nesterov momentum of the matrices.", min=0, below=1)
    muon_steps: int = option(5, "Newton-Schulz iterations that orthogonalise a matrix.", min=1, max=99)
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = option(
        "match_rms_adamw",
        "Scale of an update; match_rms_adamw: size of an AdamW update; original: sqrt(max(1, rows / columns)).",
    )
    muon_lr_scale: float = option(1.0, "Learning rate of the matrices as a multiple of --lr.", above=0)


@OPTIMIZERS.register("muon", MuonConfig())
def muon(config: MuonConfig, groups: ParameterGroups) -> Optimizer:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for matrices, AdamW for other parameters.

    `Muon` orthogonalises the momentum of matrices inside the model. Embeddings, the output projection,
    vectors and tensors with more than two axes get AdamW. By default, the update of a matrix has the root mean square
    0.2, like an update of AdamW (Liu et al. 2025, arXiv 2502.16982, section 2.2), so the learning rate of AdamW suits
    all parameters. With `original`, the update is scaled by the square root of max(1, rows / columns), and usual
    learning rates are near 0.02.

    If a weight holds the projections of queries, keys and values, each projection is orthogonalised separately (Jordan
    et al. 2024). Raises ValueError if no matrix is trained.
    """
    # The factor "lr_scale" of --base-width is for Adam, so it is replaced. Orthogonalised updates need no factor: at
    # width 512, four updates change the logits 1.1 times as much as at width 128, but 0.4 times with the factor.
    matrices = [group for group in groups if group["name"].startswith("matrices")]
    others = [group for group in groups if not group["name"].startswith("matrices")]
    if not matrices:
        raise ValueError("--optimizer muon needs a matrix, but this run trains no matrix; give --optimizer adamw")
    splits: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
    optimizer = Muon(
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
    """Returns a copy of the group in which views of the projections replace the weights with `stacked_rows`.

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


class Muon(torch.optim.Muon):
    """torch.optim.Muon that iterates in float32 on a processor without bf16 products.

    torch.optim.Muon always iterates in bf16. On such a processor, torch takes 25 to 50 times as long for a product in
    bf16 as in float32 (AVX2, matrices from 128 x 128 to 2048 x 512).
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, momentum = float(group["lr"]), group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = orthogonalized(parameter.grad.lerp(average, momentum), group["ns_steps"])
                rows, columns = parameter.shape
                scale = max(1, rows / columns) if group["adjust_lr_fn"] == "original" else 0.2**2 * max(rows, columns)
                parameter.mul_(1 - rate * group["weight_decay"])
                parameter.add_(update, alpha=-rate * scale**0.5)


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """Returns U f(S) V' for a matrix U S V', where f brings each singular value near 1 (Jordan et al. 2024).

    The singular values are divided by the norm of the matrix. Then each of the `steps` Newton-Schulz iterations maps a
    singular value s to 3.4445 s - 4.7750 s^3 + 2.0315 s^5. The result has the shape of the matrix, and is in float32 on
    a processor without bf16 products, else in bf16.
    """
    dtype = torch.float32 if matrix.device.type == "cpu" and not multiplies_in_bf16() else torch.bfloat16
    rows, columns = matrix.shape
    x = (matrix.T if rows > columns else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if rows > columns else x


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

    def step(self) -> None:  # type: ignore[override]
        """Makes a step of each optimizer. There is no `closure`, because each optimizer would call the closure."""
        for optimizer in self.optimizers:
            if self._step_supports_amp_scaling:
                for name in ("found_inf", "grad_scale"):
                    setattr(optimizer, name, getattr(self, name, None))
            optimizer.step()
