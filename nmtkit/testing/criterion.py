"""Checks of a criterion, on a tiny Transformer and a few pairs of a tiny dataset."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nmtkit.architectures import ARCHITECTURES, Architecture
from nmtkit.architectures.contract import described
from nmtkit.config import derive
from nmtkit.criterions import CRITERIONS, Criterion, Loss
from nmtkit.layers.packed import IGNORE_INDEX, Batch
from nmtkit.models import vocabulary_of
from nmtkit.testing.checks import Check, require, require_all
from nmtkit.testing.runs import TINY_TRANSFORMER, batch, check_resume, dataset


class CriterionSubject:
    """A criterion under test: its registered name, and settings over its preset."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.settings = settings
        entry = CRITERIONS[name]
        self.config = derive(entry.preset, settings, f"criterion {name}")
        self.factory = entry.factory

    def __str__(self) -> str:
        return f"criterion {self.name}"

    @functools.cached_property
    def criterion(self) -> Criterion:
        criterion: object = self.factory(self.config, dataset().tokenizer)
        require(
            isinstance(criterion, Criterion),
            f"the factory of {self.name!r} returned {described(criterion)}; it must return a Criterion",
        )
        assert isinstance(criterion, Criterion)
        return criterion

    def model(self) -> Architecture:
        """Returns a fresh tiny Transformer, its parameters always the same."""
        entry = ARCHITECTURES["transformer_tiny"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            config = derive(entry.preset, TINY_TRANSFORMER, "check")
            return entry.factory(config, vocabulary_of(dataset().tokenizer))

    def loss(self, model: Architecture, pairs: Batch, training: bool, seed: int = 1) -> Loss:
        """Returns the loss as a training or a validation has it; random numbers are drawn from `seed`."""
        model.train(training)
        self.criterion.train(training)
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
            torch.manual_seed(seed)
            return self.criterion(model, pairs)


def check_criterion(name: str, **settings: Any) -> None:
    """Raises ContractError unless the criterion passes all checks."""
    require_all(CRITERION_CHECKS, CriterionSubject(name, settings))


def a_loss_and_its_counts_are_returned(subject: CriterionSubject) -> None:
    for training in (True, False):
        loss = subject.loss(subject.model(), batch(0, 1, 2), training)
        values = {"sum": loss.sum, **loss.counts}
        infinite = [name for name, value in values.items() if not value.isfinite()]
        require(not infinite, f"{', '.join(infinite)} of the loss is not finite on a fresh model")
        attached = [name for name, value in loss.counts.items() if value.requires_grad]
        require(not attached, f"the counts {', '.join(attached)} carry gradients; count value.detach()")


def the_loss_is_a_sum_and_no_mean(subject: CriterionSubject) -> None:
    model = subject.model()
    once, twice = (subject.loss(model, batch(*pairs), False) for pairs in ((0, 1, 2), (0, 1, 2, 0, 1, 2)))
    for name, single in {"sum": once.sum, **once.counts}.items():
        double = float(twice.sum if name == "sum" else twice.counts[name])
        averaged = abs(float(single)) > 1e-4 and abs(double / float(single) - 1) < 0.2
        require(
            not averaged,
            f"{name!r} is {float(single):.4g} for a batch and {double:.4g} for the batch twice over: it is a mean. "
            "Return the sum over tokens; the trainer divides by the target tokens of the whole update",
        )


def nll_is_the_negative_log_likelihood(subject: CriterionSubject) -> None:
    model, pairs = subject.model(), batch(0, 1, 2)
    got = float(subject.loss(model, pairs, False).counts["nll"])
    with torch.no_grad():
        logits = model.eval().output_projection(model(pairs.source, pairs.target_input))
        expected = float(F.cross_entropy(logits, pairs.target_output, reduction="sum"))
    require(
        abs(got - expected) < 1e-3 * expected,
        f"'nll' is {got:.4f} where the negative log-likelihood of the target is {expected:.4f} (natural logarithm, "
        "summed over tokens); perplexity is computed from it",
    )


def gradients_reach_the_model_and_are_finite(subject: CriterionSubject) -> None:
    model = subject.model()
    loss = subject.loss(model, batch(0, 1, 2), True)
    require(loss.sum.requires_grad, "the loss has no gradient; it must be computed from the model's outputs")
    loss.sum.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    require(any(gradient.any() for gradient in gradients.values()), "the gradient of every parameter is zero")
    for name, gradient in gradients.items():
        require(gradient.isfinite().all(), f"the gradient of the model's {name} is not finite")


def a_batch_that_counts_for_nothing_is_taken(subject: CriterionSubject) -> None:
    pairs = batch(0)
    dummy = replace(pairs, target_output=torch.full_like(pairs.target_output, IGNORE_INDEX), target_tokens=0)
    model = subject.model()
    loss = subject.loss(model, dummy, True)
    require(
        loss.sum.isfinite(),
        f"the loss of a micro-batch without targets is {loss.sum.item()}; with several processes there are such "
        "(target_tokens is 0, every target IGNORE_INDEX), and it must be finite: divide by nothing that counts tokens",
    )
    if loss.sum.requires_grad:
        loss.sum.backward()


def training_repeats_with_the_seed(subject: CriterionSubject) -> None:
    def losses() -> list[Tensor]:
        loss = subject.loss(subject.model(), batch(0, 1, 2), True, seed=7)
        return [loss.sum, *loss.counts.values()]

    equal = all(torch.equal(one, other) for one, other in zip(losses(), losses(), strict=True))
    require(
        equal, "two calls differ after the same torch.manual_seed; draw random numbers from torch's generator alone"
    )


def it_has_no_parameters_of_its_own(subject: CriterionSubject) -> None:
    names = [name for name, parameter in subject.criterion.named_parameters() if parameter.requires_grad]
    require(not names, f"its parameters {', '.join(names)} would never be trained or saved; they belong to a model")


def resume_is_exact(subject: CriterionSubject) -> None:
    names = {"architecture": "transformer_tiny", "criterion": subject.name}
    with tempfile.TemporaryDirectory() as folder:
        check_resume(names, {**TINY_TRANSFORMER, "lr": 0.01, **subject.settings}, Path(folder))


CRITERION_CHECKS: tuple[Check, ...] = (
    a_loss_and_its_counts_are_returned,
    the_loss_is_a_sum_and_no_mean,
    nll_is_the_negative_log_likelihood,
    gradients_reach_the_model_and_are_finite,
    a_batch_that_counts_for_nothing_is_taken,
    training_repeats_with_the_seed,
    it_has_no_parameters_of_its_own,
    resume_is_exact,
)
