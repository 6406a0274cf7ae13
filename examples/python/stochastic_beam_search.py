"""Samples different translations of each text: stochastic beam search (Kool et al. 2019, algorithm 1)."""

import torch
from torch import Tensor

import nmtkit
from nmtkit.extend import EOS

# B texts, R samples of each text, T tokens of the longest sample, V target vocabulary


@torch.no_grad()
def stochastic_beam_search(
    model: nmtkit.Model, texts: list[str], samples: int, max_length: int, **languages: str
) -> tuple[Tensor, Tensor]:
    """Returns the samples B R T, which end with eos or after `max_length` tokens, and their log probabilities B R.

    The samples of a text are drawn without replacement. If a text has fewer outputs, the log probability is -inf.
    """
    module, batch = model.architectures[0], model.batch(texts, **languages)
    state = module.start(module.encode(batch.source), samples)
    for tokens in batch.target_input.to_padded().T:  # bos; for models of several languages also the language token
        logits = module.step(tokens.repeat_interleave(samples), state)
    log_prob = torch.zeros(len(texts), samples, dtype=torch.float64, device=logits.device)
    log_prob[:, 1:] = -torch.inf  # the rows of a text are still equal, so only the first row counts
    perturbed, ids = log_prob, torch.empty(*log_prob.shape, 0, dtype=torch.int64, device=logits.device)
    first = torch.arange(len(texts), device=logits.device)[:, None] * samples  # B 1: the first row of each text
    for length in range(max_length):
        following = logits.double().log_softmax(-1).unflatten(0, log_prob.shape)  # B R V
        if length:  # a finished sample continues with eos
            following[ids[:, :, -1] == EOS] = -torch.inf
            following[:, :, EOS].masked_fill_(ids[:, :, -1] == EOS, 0.0)
        total = log_prob[:, :, None] + following
        noisy = total - torch.empty_like(total).exponential_().log()  # plus Gumbel noise
        # Shifts the noise so that the largest value of each row is the perturbed log probability of this row.
        excess = perturbed[:, :, None] - noisy + (-(noisy - noisy.amax(-1, keepdim=True)).exp()).log1p()
        noisy = perturbed[:, :, None] - excess.relu() - (-excess.abs()).exp().log1p()
        noisy[total == -torch.inf] = -torch.inf
        perturbed, chosen = noisy.flatten(1).topk(samples)  # B R
        log_prob, row, token = total.flatten(1).gather(1, chosen), chosen // logits.shape[1], chosen % logits.shape[1]
        ids = torch.cat([ids.gather(1, row[:, :, None].expand_as(ids)), token[:, :, None]], 2)
        if (token == EOS).all():
            break
        state.reorder((first + row).flatten())
        logits = module.step(token.flatten(), state)
    return ids, log_prob
