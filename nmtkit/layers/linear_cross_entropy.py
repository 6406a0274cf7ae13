"""The output projection and the label-smoothed cross-entropy behind it, summed over tokens."""

from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.packed import IGNORED

# T tokens, D model width, V vocabulary


def output_cross_entropy(
    output: nn.Module, features: Tensor, target: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Sums over the tokens of T (those with target `IGNORED` left out) of the smoothed loss, and of the plain one.

    The target distribution is mixed with the uniform one over all V entries, u(k) = 1 / V (Szegedy et al. 2015,
    section 7), so with eps = `label_smoothing` a token's loss is

        (1 - eps) * -log p(target) + eps / V * sum over the vocabulary of -log p(k)

    Natural logarithms. features T D, target T -> two scalars; the second, for the log, carries no gradient.
    """
    log_probabilities = F.log_softmax(output(features).float(), -1)
    counted = target != IGNORED
    nll = -log_probabilities.gather(1, target.clamp(min=0)[:, None])[:, 0].where(counted, 0).sum()
    if not label_smoothing:
        return nll, nll.detach()
    uniform = -log_probabilities.mean(-1).where(counted, 0).sum()
    return (1 - label_smoothing) * nll + label_smoothing * uniform, nll.detach()
