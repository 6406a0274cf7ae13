"""The sparsely-gated mixture-of-experts layer (Shazeer et al. 2017, section 2)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.layers.dropout import Dropout

# T tokens, D width of input and output, X experts or other choices of a gate, k of them active for a token, G groups


class Pick(NamedTuple):
    """What a noisy gate chose, on the last axis; `chance` only while training."""

    weights: Tensor  # … k, they sum to one
    chosen: Tensor  # … k
    chance: Tensor | None  # … X: of being chosen, were a choice's noise alone drawn again


def pick(clean: Tensor, deviation: Tensor | None, active: int) -> Pick:
    """The `active` highest of the last axis of `clean`, with noise of that deviation (equations 3 to 5)."""
    if deviation is None:
        values, chosen = clean.topk(active, -1)
        return Pick(values.softmax(-1), chosen, None)
    noisy = clean + torch.randn_like(clean) * deviation
    values, ranked = noisy.topk(active + 1, -1)
    chosen = ranked[..., :active]
    # A choice is made when it beats the k-th highest of the others: of all the (k+1)-th, if it is among the k itself.
    among = torch.zeros_like(clean, dtype=torch.bool).scatter(-1, chosen, True)
    threshold = torch.where(among, values[..., active, None], values[..., active - 1, None])
    chance = torch.special.ndtr((clean - threshold) / deviation.clamp(min=1e-6))  # equation 9
    return Pick(values[..., :active].softmax(-1), chosen, chance)


class Experts(nn.Module):
    """Each token is sent to the k experts that a noisy gate ranks highest; their outputs are summed by its weights.

    With G `groups`, a first gate chooses k groups and a second one k experts of each, and the weights of the two are
    multiplied (appendix B). An expert is max(0, x W) V, without biases (appendix E). While training, `imbalance` holds
    the losses of section 4 and appendix A for the last tokens seen; without noise, in evaluation, every token goes
    its own way alone.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        active: int,
        groups: int | None,
        importance_weight: float,
        load_weight: float,
        dropout: float,
    ) -> None:
        super().__init__()
        assert 0 < active < experts // (groups or 1), "the load of an expert is defined against one not chosen"
        self.active, self.groups, self.group_size = active, groups, experts // (groups or 1)
        self.importance_weight, self.load_weight = importance_weight, load_weight
        # no signal and some noise at first, so that all experts start with an equal load (appendix A)
        self.gate = nn.Parameter(torch.zeros(width, experts))
        self.noise = nn.Parameter(torch.zeros(width, experts))
        if groups:
            self.group_gate = nn.Parameter(torch.zeros(width, groups))
            self.group_noise = nn.Parameter(torch.zeros(width, groups))
        self.inner = nn.Parameter(torch.empty(experts, width, hidden).uniform_(-1, 1) * (6 / (width + hidden)) ** 0.5)
        self.outer = nn.Parameter(torch.empty(experts, hidden, width).uniform_(-1, 1) * (6 / (width + hidden)) ** 0.5)
        self.dropout = Dropout(dropout)  # after the ReLU
        self.imbalance: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """T D -> T D."""
        with torch.autocast(x.device.type, enabled=False):  # a rounded gate would choose other experts
            weights, chosen = self.gates(x.float())
        # tokens in the order of their experts, so that each expert's are one run: T k -> T*k
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.inner)).tolist()
        token = order // chosen.shape[1]
        runs = zip(x[token].split(counts), self.inner.unbind(0), self.outer.unbind(0), strict=True)
        outputs = [self.dropout((run @ inner).relu()) @ outer for run, inner, outer in runs if len(run)]
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        return weighted.new_zeros(x.shape).index_add(0, token, weighted).to(x.dtype)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices of each token's experts, T k; with groups T k*k."""
        clean, deviation = self.scores(x, self.gate, self.noise)
        if not self.groups:
            weights, chosen, chance = pick(clean, deviation, self.active)
            load = None if chance is None else chance.sum(0)
        else:
            weights, chosen, load = self.grouped(x, clean, deviation)
        if load is not None:
            importance = x.new_zeros(clean.shape[1]).index_add(0, chosen.flatten(), weights.flatten())
            self.imbalance = {
                "importance": self.importance_weight * variation(importance),
                "load": self.load_weight * variation(load),
            }
        return weights, chosen

    def scores(self, x: Tensor, gate: Tensor, noise: Tensor) -> tuple[Tensor, Tensor | None]:
        """Each choice's score and, while training, the deviation of its noise (equation 4)."""
        return x @ gate.float(), F.softplus(x @ noise.float()) if self.training else None

    def grouped(self, x: Tensor, clean: Tensor, deviation: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weights T k*k, indices T k*k and, while training, load X of two levels of gating (equations 12 to 14)."""
        groups = pick(*self.scores(x, self.group_gate, self.group_noise), self.active)

        def of_chosen(scores: Tensor) -> Tensor:  # T X -> T k X/G
            parts = scores.unflatten(1, (-1, self.group_size))
            return parts.gather(1, groups.chosen[:, :, None].expand(-1, -1, parts.shape[2]))

        within = pick(of_chosen(clean), None if deviation is None else of_chosen(deviation), self.active)
        weights = (groups.weights[:, :, None] * within.weights).flatten(1)
        chosen = (groups.chosen[:, :, None] * self.group_size + within.chosen).flatten(1)
        if groups.chance is None or within.chance is None:
            return weights, chosen, None
        members = groups.chosen.flatten().bincount(minlength=self.group_gate.shape[1]).clamp(min=1)
        loads = x.new_zeros(len(members), within.chance.shape[2])
        loads = loads.index_add(0, groups.chosen.flatten(), within.chance.flatten(0, 1))
        return weights, chosen, (groups.chance.sum(0)[:, None] * loads / members[:, None]).flatten()


def variation(loads: Tensor) -> Tensor:
    """Squared coefficient of variation (equations 7 and 11)."""
    return loads.var(unbiased=False) / loads.mean().square().clamp(min=1e-10)


def pop_auxiliary_losses(model: nn.Module, tokens: int) -> dict[str, Tensor]:
    """The losses by name of all Experts in `model`, times `tokens`, as a criterion's sums want them.

    Layers forget theirs, and with them the graph of their last forward pass. Empty in evaluation.
    """
    losses: dict[str, Tensor] = {}
    for layer in model.modules():
        if isinstance(layer, Experts):
            for name, loss in layer.imbalance.items() if layer.training else ():
                losses[name] = losses.get(name, 0) + loss * tokens
            layer.imbalance = {}
    return losses
