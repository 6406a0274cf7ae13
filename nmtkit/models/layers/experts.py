"""The sparsely-gated mixture-of-experts layer (Shazeer et al. 2017, section 2)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.config import Config, option
from nmtkit.models.layers import compute_dtype
from nmtkit.models.layers.dropout import Dropout

# T tokens, D model width, F inner width of an expert, X experts (choices of a gate); k experts are active for a token

MIN_BLOCK = 16  # minimum rows of a block; a block of fewer rows takes the same time


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Config):
    """Hyperparameters of the mixture layer (section 2)."""

    experts: int = option(2048, "experts of each mixture layer", min=2, max=65_536)
    active_experts: int = option(
        2, "experts that process a token (k); with groups, k experts in each of k groups", min=1, max=65_536
    )
    expert_groups: int | None = option(
        16, "groups of experts, selected by a first gate (appendix B); none: a single gate", min=1, max=65_536
    )
    importance_weight: float = option(
        0.01, "weight of the loss for unequal importance of experts (section 4)", min=0, finetuning="free"
    )
    load_weight: float = option(
        0.01, "weight of the loss for unequal load of experts (appendix A)", min=0, finetuning="free"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        groups = self.expert_groups
        if groups is not None and self.experts % groups:
            raise ValueError(f"--expert-groups is {groups}; it must divide --experts, {self.experts}")
        most = min(groups, self.experts // groups) if groups else self.experts
        if self.active_experts >= most:
            # the load of an expert is defined only if some expert is not active
            raise ValueError(
                f"--active-experts is {self.active_experts}; it must be below {most}, the number of experts (or "
                "groups) to select from"
            )


def noisy_top_k_gating(logits: Tensor, noise_stddev: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Selects the k largest of `logits` [T, X] plus noise of standard deviation `noise_stddev` (equations 3 to 5).

    Returns the weights [T, k] and the indices [T, k] of the choices. The weights of a token have the sum 1. Also
    returns the load [T, X]: the probability that a choice is active if only its noise is drawn again. Without noise,
    the load is None.
    """
    if noise_stddev is None:
        values, indices = logits.topk(k, -1)
        return values.softmax(-1), indices, None
    noisy = logits + torch.randn_like(logits) * noise_stddev
    values, ranked = noisy.topk(k + 1, -1)
    indices = ranked[..., :k]
    # a choice is active if it exceeds the k-th largest other choice (for an active choice, the (k+1)-th largest of all)
    in_top_k = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, True)
    threshold = torch.where(in_top_k, values[..., k, None], values[..., k - 1, None])
    load = torch.special.ndtr((logits - threshold) / noise_stddev.clamp(min=1e-6))  # equation 9
    return values[..., :k].softmax(-1), indices, load


class Experts(nn.Module):
    """Sends each token to the k experts that a noisy gate ranks highest, and adds their outputs, weighted by the gate.

    With groups, a first gate selects k groups, a second gate selects k experts of each group, and the weights of both
    gates are multiplied (appendix B). An expert is max(0, x W) V, without biases (appendix E), with `hidden` values
    between W and V. In training, each forward pass appends its losses of section 4 and appendix A to `balance_losses`.
    In evaluation there is no noise, and tokens do not affect each other.
    """

    def __init__(self, config: ExpertsConfig, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.config, experts, groups = config, config.experts, config.expert_groups
        # the initial logits are zeros plus noise, so all experts start with an equal load (appendix A)
        self.gate = nn.Parameter(torch.zeros(width, experts))
        self.noise = nn.Parameter(torch.zeros(width, experts))
        if groups:
            self.group_gate = nn.Parameter(torch.zeros(width, groups))
            self.group_noise = nn.Parameter(torch.zeros(width, groups))
        self.fc1 = nn.Parameter(torch.empty(experts, width, hidden).uniform_(-1, 1) * (6 / (width + hidden)) ** 0.5)
        self.fc2 = nn.Parameter(torch.empty(experts, hidden, width).uniform_(-1, 1) * (6 / (width + hidden)) ** 0.5)
        self.dropout = Dropout(dropout)  # applied after the ReLU
        self.balance_losses: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Returns the weighted sums of the outputs of the selected experts [T, D], for tokens x [T, D]."""
        with torch.autocast(x.device.type, enabled=False):  # with rounded logits a gate would select different experts
            weights, indices = self.gates(x.float())
        # tokens are sorted by expert, so that the tokens of an expert are contiguous: T k -> T*k
        order = indices.flatten().argsort(stable=True)
        counts = count(indices, len(self.fc1))
        token = order // indices.shape[1]
        weighted = self.products_on(x)(x[token], counts) * weights.flatten()[order, None]
        return weighted.new_zeros(x.shape).index_add(0, token, weighted).to(x.dtype)

    def products(self, x: Tensor, counts: Tensor) -> Tensor:
        """Returns the outputs of the experts for tokens x sorted by expert. Expert i has counts[i] tokens."""
        inputs = zip(x.split(counts.tolist()), self.fc1.unbind(0), self.fc2.unbind(0), strict=True)
        outputs = [self.dropout((tokens @ fc1).relu()) @ fc2 for tokens, fc1, fc2 in inputs if len(tokens)]
        return torch.cat(outputs)

    def grouped_products(self, x: Tensor, counts: Tensor) -> Tensor:
        """Computes `products` with one kernel for all experts, which reads the counts on the device."""
        dtype, ends = compute_dtype(x), counts.cumsum(0).to(torch.int32)
        hidden = F.grouped_mm(x.to(dtype), self.fc1.to(dtype), offs=ends)
        return F.grouped_mm(self.dropout(hidden.relu()), self.fc2.to(dtype), offs=ends)

    def blocked_products(self, x: Tensor, counts: Tensor) -> Tensor:
        """Computes `products` in any dtype, as batched products of blocks. A block has tokens of one expert.

        The number of blocks does not depend on `counts`, which only the device knows. The size of a block is the
        average number of tokens of an expert, but at least `MIN_BLOCK`. If an expert has at least `MIN_BLOCK` tokens on
        average, the blocks have at most about twice as many rows as there are tokens. There are at most twice as many
        blocks as experts, and each block has a copy of the weights of its expert.
        """
        experts, dtype = len(self.fc1), compute_dtype(x)
        size = max(MIN_BLOCK, -(-len(x) // experts))
        number = len(x) // size + experts  # maximum number of blocks for any `counts`
        ends = (-(-counts // size)).cumsum(0)  # [X]: end of the blocks of each expert
        first_token, first_block = (F.pad(sums[:-1], (1, 0)) for sums in (counts.cumsum(0), ends))
        expert = torch.repeat_interleave(torch.arange(experts, device=x.device), counts, output_size=len(x))
        row = torch.arange(len(x), device=x.device) - (first_token - first_block * size)[expert]
        block_expert = torch.searchsorted(ends, torch.arange(number, device=x.device), right=True).clamp(
            max=experts - 1
        )
        fc1, fc2 = (weight.to(dtype).index_select(0, block_expert) for weight in (self.fc1, self.fc2))
        blocks = x.new_zeros(number * size, x.shape[1], dtype=dtype).index_copy(0, row, x.to(dtype))
        hidden = torch.bmm(blocks.unflatten(0, (number, size)), fc1)
        return torch.bmm(self.dropout(hidden.relu()), fc2).flatten(0, 1).index_select(0, row)

    def products_on(self, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the fastest implementation of `products` for x. On CUDA, it does not wait for the device.

        The grouped product of torch needs bf16, and rows whose size is a multiple of 16 bytes.
        """
        if not x.is_cuda:
            return self.products
        aligned = self.fc1.shape[1] % 8 == 0 and self.fc1.shape[2] % 8 == 0
        grouped = compute_dtype(x) == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")
        return self.grouped_products if grouped else self.blocked_products

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and indices of the experts of each token: [T, k], or [T, k * k] with groups."""
        logits, noise_stddev = self.logits(x, self.gate, self.noise)
        if not self.config.expert_groups:
            weights, indices, by_token = noisy_top_k_gating(logits, noise_stddev, self.config.active_experts)
            load = None if by_token is None else by_token.sum(0)
        else:
            weights, indices, load = self.hierarchical_gates(x, logits, noise_stddev)
        if load is not None:
            importance = x.new_zeros(logits.shape[1]).index_add(0, indices.flatten(), weights.flatten())
            importance_loss = self.config.importance_weight * cv_squared(importance)
            losses = {"importance": importance_loss, "load": self.config.load_weight * cv_squared(load)}
            # a backward pass with gradient checkpointing repeats the forward pass, whose losses were already counted
            if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
                self.balance_losses.append(losses)
        return weights, indices

    def logits(self, x: Tensor, gate: Tensor, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the logits of a gate and, in training, the standard deviation of their noise (equation 4)."""
        return x @ gate.float(), F.softplus(x @ noise.float()) if self.training else None

    def hierarchical_gates(
        self, x: Tensor, logits: Tensor, noise_stddev: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the weights and indices [T, k * k] that two levels of gates select (equations 12 to 14).

        In training, also returns the load [X] of the experts, otherwise None.
        """
        active, group_size = self.config.active_experts, len(self.fc1) // self.group_gate.shape[1]
        group_weights, groups, group_load = noisy_top_k_gating(
            *self.logits(x, self.group_gate, self.group_noise), active
        )

        def in_selected_groups(logits: Tensor) -> Tensor:  # [T, X] -> [T, k, X / groups]
            by_group = logits.unflatten(1, (-1, group_size))
            return by_group.gather(1, groups[:, :, None].expand(-1, -1, by_group.shape[2]))

        selected_stddev = None if noise_stddev is None else in_selected_groups(noise_stddev)
        expert_weights, experts, expert_load = noisy_top_k_gating(in_selected_groups(logits), selected_stddev, active)
        weights = (group_weights[:, :, None] * expert_weights).flatten(1)
        indices = (groups[:, :, None] * group_size + experts).flatten(1)
        if group_load is None or expert_load is None:
            return weights, indices, None
        group_tokens = count(groups, self.group_gate.shape[1]).clamp(min=1)
        load = x.new_zeros(len(group_tokens), group_size)
        load = load.index_add(0, groups.flatten(), expert_load.flatten(0, 1))
        return weights, indices, (group_load.sum(0)[:, None] * load / group_tokens[:, None]).flatten()


def count(indices: Tensor, choices: int) -> Tensor:
    """Returns the number of occurrences of each index below `choices`: [choices], int64. Never waits for the device."""
    flat = indices.flatten()
    return flat.new_zeros(choices).index_add(0, flat, torch.ones_like(flat))


def cv_squared(values: Tensor) -> Tensor:
    """Returns the squared coefficient of variation (equations 7 and 11)."""
    return values.var(unbiased=False) / values.mean().square().clamp(min=1e-10)


def pop_auxiliary_losses(model: nn.Module) -> dict[str, Tensor]:
    """Returns the balance losses of all `Experts` in a model by name, and removes them from the layers.

    A loss is the mean over the forward passes, summed over the layers. In evaluation, there are no losses.
    """
    losses: dict[str, Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, Experts):
            for by_name in layer.balance_losses if layer.training else ():
                for name, loss in by_name.items():
                    losses[name] = losses.get(name, 0) + loss / len(layer.balance_losses)
            layer.balance_losses = []
    return losses
