"""The sparsely-gated mixture-of-experts layer (Shazeer et al. 2017, section 2)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.layers.dropout import Dropout

# T tokens, D width of input and output, F hidden width of an expert, X experts, k of them active for a token


class Experts(nn.Module):
    """Each token is sent to the k experts that a noisy gate ranks highest; their outputs are summed by its weights.

    An expert is max(0, x W) V, without biases (appendix E). While training, `imbalance` holds the losses of section 4
    and appendix A for the last tokens seen; without noise, in evaluation, every token goes its own way alone.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        active: int,
        importance_weight: float,
        load_weight: float,
        dropout: float,
    ) -> None:
        super().__init__()
        assert 0 < active < experts, "the load of an expert is defined against one that was not chosen"
        self.active = active
        self.importance_weight, self.load_weight = importance_weight, load_weight
        # no signal and some noise at first, so that all experts start with an equal load (appendix A)
        self.gate = nn.Parameter(torch.zeros(width, experts))
        self.noise = nn.Parameter(torch.zeros(width, experts))
        self.inner = nn.Parameter(torch.empty(experts, width, hidden).uniform_(-1, 1) * (6 / (width + hidden)) ** 0.5)
        self.outer = nn.Parameter(torch.empty(experts, hidden, width).uniform_(-1, 1) * (6 / (width + hidden)) ** 0.5)
        self.dropout = Dropout(dropout)  # after the ReLU
        self.imbalance: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """T D -> T D."""
        weights, chosen = self.gates(x)
        # tokens in the order of their experts, so that each expert's are one run: T k -> T*k
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.inner)).tolist()
        token = order // self.active
        runs = zip(x[token].split(counts), self.inner.unbind(0), self.outer.unbind(0), strict=True)
        outputs = [self.dropout((run @ inner).relu()) @ outer for run, inner, outer in runs if len(run)]
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        return weighted.new_zeros(x.shape).index_add(0, token, weighted).to(x.dtype)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights T k and indices T k of each token's experts (equations 3 to 5)."""
        with torch.autocast(x.device.type, enabled=False):  # a rounded gate would choose other experts
            x = x.float()
            clean = x @ self.gate.float()
            if not self.training:
                values, chosen = clean.topk(self.active, -1)
                return values.softmax(-1), chosen
            deviation = F.softplus(x @ self.noise.float())
            noisy = clean + torch.randn_like(clean) * deviation
            values, ranked = noisy.topk(self.active + 1, -1)
            chosen, weights = ranked[:, : self.active], values[:, : self.active].softmax(-1)
            importance = torch.zeros_like(clean).scatter(1, chosen, weights).sum(0)
            self.imbalance = {
                "importance": self.importance_weight * variation(importance),
                "load": self.load_weight * variation(self.load(clean, deviation, values, chosen)),
            }
            return weights, chosen

    def load(self, clean: Tensor, deviation: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
        """Expected number of tokens of each expert, X, were its noise alone drawn again (equations 8 to 10).

        An expert is chosen when it beats the k-th highest of the others: the (k+1)-th of all if it is among the k.
        """
        among = torch.zeros_like(clean, dtype=torch.bool).scatter(1, chosen, True)
        threshold = torch.where(among, values[:, self.active, None], values[:, self.active - 1, None])
        return torch.special.ndtr((clean - threshold) / deviation.clamp(min=1e-6)).sum(0)


def variation(loads: Tensor) -> Tensor:
    """Squared coefficient of variation (equations 7 and 11)."""
    return loads.var(unbiased=False) / loads.mean().square().clamp(min=1e-10)


def take_imbalance(model: nn.Module, tokens: int) -> dict[str, Tensor]:
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
