"""Checks of a criterion, on a tiny Transformer and a few pairs of a tiny dataset."""

import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.contracts.checks import Contract, Subject, checks_of, require
from nmtkit.contracts.runs import batch, dataset, resume_is_exact, tiny_model
from nmtkit.data.packed import IGNORE_INDEX, Batch
from nmtkit.models.architectures import Architecture
from nmtkit.training.criterions import CRITERIONS, Criterion, Loss
from nmtkit.training.criterions.interface import check_sum


@functools.lru_cache(maxsize=2)
def criterion_of(subject: Subject[Criterion]) -> Criterion:
    return subject.build(dataset(subject.tokenizer).tokenizer)


def pairs_of(subject: Subject[Criterion], *pairs: int) -> Batch:
    return batch(*pairs, tokenizer=subject.tokenizer)


def loss_of(subject: Subject[Criterion], model: Architecture, pairs: Batch, training: bool, seed: int = 1) -> Loss:
    """Returns the loss of a training step or a validation step. `seed` seeds the random numbers."""
    criterion = criterion_of(subject).train(training)
    model.train(training)
    torch.manual_seed(seed)
    with torch.set_grad_enabled(training):
        return criterion(model, pairs)


def a_loss_and_its_counts_are_returned(subject: Subject[Criterion]) -> None:
    for training in (True, False):
        loss = loss_of(subject, tiny_model(subject.tokenizer), pairs_of(subject, 0, 1, 2), training)
        values = {"sum": loss.sum, **loss.counts}
        infinite = [name for name, value in values.items() if not value.isfinite()]
        require(not infinite, f"the loss of a new model is not finite: {', '.join(infinite)}")
        attached = [name for name, value in loss.counts.items() if value.requires_grad]
        require(not attached, f"the counts {', '.join(attached)} carry gradients; return value.detach()")


def the_loss_is_a_sum_and_no_mean(subject: Subject[Criterion]) -> None:
    once, twice = pairs_of(subject, 0, 1, 2), pairs_of(subject, 0, 1, 2, 0, 1, 2)
    check_sum(criterion_of(subject), tiny_model(subject.tokenizer), once, twice)


def nll_is_the_negative_log_likelihood(subject: Subject[Criterion]) -> None:
    model, pairs = tiny_model(subject.tokenizer), pairs_of(subject, 0, 1, 2)
    firsts = pairs.target_input.layout.cu_seqlens[:-1].long()
    output = pairs.target_output.index_fill(0, firsts, IGNORE_INDEX)
    fewer = replace(pairs, target_output=output, target_tokens=pairs.target_tokens - len(firsts))
    for counted in (pairs, fewer):
        got = float(loss_of(subject, model, counted, False).counts["nll"])
        with torch.no_grad():
            logits = model.eval().output_projection(model(pairs.source, pairs.target_input))
            expected = float(F.cross_entropy(logits, counted.target_output, reduction="sum"))
        require(
            abs(got - expected) < 1e-3 * expected,
            f"'nll' is {got:.4f}, but the negative log-likelihood of the target is {expected:.4f} (natural logarithm, "
            "summed over all targets except IGNORE_INDEX, which replaces language tokens); perplexity is computed from "
            "'nll'",
        )


def gradients_reach_the_model_and_are_finite(subject: Subject[Criterion]) -> None:
    model = tiny_model(subject.tokenizer)
    loss = loss_of(subject, model, pairs_of(subject, 0, 1, 2), True)
    require(loss.sum.requires_grad, "the loss has no gradient; it must be computed from the model's outputs")
    loss.sum.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    require(any(gradient.any() for gradient in gradients.values()), "the gradient of every parameter is zero")
    for name, gradient in gradients.items():
        require(gradient.isfinite().all(), f"the gradient of the model's {name} is not finite")


def a_batch_that_counts_for_nothing_is_taken(subject: Subject[Criterion]) -> None:
    pairs = pairs_of(subject, 0)
    dummy = replace(pairs, target_output=torch.full_like(pairs.target_output, IGNORE_INDEX), target_tokens=0)
    loss = loss_of(subject, tiny_model(subject.tokenizer), dummy, True)
    require(
        loss.sum.isfinite(),
        f"the loss of a micro-batch without targets is {loss.sum.item()}, but it must be finite; runs of several "
        "processes have such micro-batches (target_tokens is 0, every target is IGNORE_INDEX): do not divide by tokens",
    )
    if loss.sum.requires_grad:
        loss.sum.backward()


def training_repeats_with_the_seed(subject: Subject[Criterion]) -> None:
    def losses() -> list[Tensor]:
        loss = loss_of(subject, tiny_model(subject.tokenizer), pairs_of(subject, 0, 1, 2), True, seed=7)
        return [loss.sum, *loss.counts.values()]

    equal = all(torch.equal(value, other) for value, other in zip(losses(), losses(), strict=True))
    require(
        equal, "two calls differ after the same torch.manual_seed; draw random numbers only from the generator of torch"
    )


def it_has_no_parameters_of_its_own(subject: Subject[Criterion]) -> None:
    criterion = criterion_of(subject)
    names = ", ".join(name for name, parameter in criterion.named_parameters() if parameter.requires_grad)
    require(
        not names,
        f"the criterion has the parameters {names}, which a run never trains or saves; move them to an architecture",
    )


check_criterion = Contract(CRITERIONS, Criterion, checks_of(__name__, resume_is_exact))
