"""Checks of an architecture, at the sizes its settings give it and a vocabulary of 13."""

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit import checkpoint
from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary, contract
from nmtkit.config import derive, to_dict
from nmtkit.layers.packed import Layout, Packed
from nmtkit.testing.checks import Check, require, require_all
from nmtkit.testing.runs import check_resume
from nmtkit.training import averaging
from nmtkit.translation.translator import Translator

SIZE = 13
VOCABULARY = Vocabulary(source=SIZE, target=SIZE, joint=True)
PADDING = (3, 2)  # lengths of sentences of padding
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class ArchitectureSubject:
    """An architecture under test: its registered name, and settings over its preset."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.settings = settings
        entry = ARCHITECTURES[name]
        self.config = derive(entry.preset, settings, f"architecture {name}")
        self.factory = entry.factory

    def __str__(self) -> str:
        return f"architecture {self.name}"

    @functools.cached_property
    def model(self) -> Architecture:
        """A model in evaluation mode. What is all zero, as gates may be, is random: it would hide what lies behind."""
        return self.build(seed=3)

    def build(self, seed: int) -> Architecture:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: object = self.factory(self.config, VOCABULARY)
            require(
                isinstance(model, Architecture),
                f"the factory of {self.name!r} returned {contract.described(model)}; it must return an Architecture",
            )
            assert isinstance(model, Architecture)
            for parameter in model.parameters():
                if not parameter.any():
                    nn.init.normal_(parameter, std=1.0 if parameter.dim() > 1 else 0.1)
        return model.eval()

    def sources(self, *lengths: int, seed: int = 5) -> Packed:
        return contract.words(lengths, SIZE, seed, self.model.max_source_positions)

    def targets(self, *lengths: int, seed: int = 6) -> Packed:
        return contract.words(lengths, SIZE, seed, self.model.max_target_positions)


def check_architecture(name: str, **settings: Any) -> None:
    """Raises ContractError unless the architecture passes all checks. Small `settings` make it fast."""
    require_all(ARCHITECTURE_CHECKS, ArchitectureSubject(name, settings))


# --- the forward pass -------------------------------------------------------------------------------------------------


def shapes_are_right(subject: ArchitectureSubject) -> None:
    with contract.evaluated(subject.model):
        contract.check_shapes(subject.model, subject.sources(5, 3), subject.targets(8, 6), VOCABULARY)


def no_later_target_word_is_read(subject: ArchitectureSubject) -> None:
    with contract.evaluated(subject.model):
        contract.check_causality(subject.model, subject.sources(5, 3), subject.targets(8, 6), VOCABULARY)


def sentences_do_not_mix(subject: ArchitectureSubject) -> None:
    with contract.evaluated(subject.model):
        contract.check_sentences_apart(subject.model, subject.sources(5, 3), subject.targets(8, 6), VOCABULARY)


def alone_equals_in_any_batch(subject: ArchitectureSubject) -> None:
    model, source, target = subject.model, subject.sources(4, 9, 1, 6), subject.targets(7, 2, 5, 12)
    turned = torch.tensor([2, 0, 3, 1])
    with contract.evaluated(model):
        together = target.with_values(model(source, target)).split()
        again = target.select(turned).with_values(model(source.select(turned), target.select(turned))).split()
        for index in range(4):
            single = torch.tensor([index])
            alone = model(source.select(single), target.select(single))
            message = (
                f"features of a sentence differ between alone and in a batch of 4, by up to {{:.2g}}: {LAYOUT_HINT}"
            )
            _require_close(together[index], alone, message)
            _require_close(again[turned.tolist().index(index)], alone, message)


LAYOUT_HINT = "layers that look at neighbours must know where sentences end (layout.cu_seqlens, layout.mask)"


def padding_sentences_change_nothing(subject: ArchitectureSubject) -> None:
    model, source, target = subject.model, subject.sources(4, 9), subject.targets(7, 2)
    longest = min(64, model.max_source_positions or 64, model.max_target_positions or 64)

    def with_padding(packed: Packed) -> Packed:
        lengths = torch.cat([packed.layout.lengths, torch.tensor(PADDING)])
        values = torch.cat([packed.values, packed.values.new_full((sum(PADDING),), 2)])
        return Packed(values, Layout(lengths, longest, len(values)))

    with contract.evaluated(model):
        expected = model(source, target)
        got = model(with_padding(source), with_padding(target))[: len(expected)]
    message = (
        "features change by up to {:.2g} where layout.max_length is a loose bound and sentences of padding follow, as "
        "in batches of a fixed shape; derive nothing from max_length but the sizes of tensors"
    )
    _require_close(got, expected, message)


def every_source_word_matters(subject: ArchitectureSubject) -> None:
    model, source, target = subject.model, subject.sources(6), subject.targets(6)
    with contract.evaluated(model):
        features = model(source, target)
        for index in range(source.layout.tokens):
            changed = source.values.clone()
            changed[index] = (changed[index] + 1) % SIZE
            require(
                not torch.allclose(features, model(source.with_values(changed), target), rtol=0, atol=1e-6),
                f"no feature depends on word {index} of a source sentence of {source.layout.tokens} words",
            )


# --- decoding ---------------------------------------------------------------------------------------------------------


def a_step_equals_the_full_pass(subject: ArchitectureSubject) -> None:
    """A search over three sentences is shuffled, thinned and topped up; each row still follows its own prefix."""
    model = subject.model
    with contract.evaluated(model):
        search = _Search(model, [ids.tolist() for ids in subject.sources(4, 7, 2).split()], beams=2)
        fresh = [ids.tolist() for ids in subject.sources(9, 3, seed=8).split()]
        tokens = torch.randint(3, SIZE, (9, 6), generator=torch.Generator().manual_seed(1))
        search.step(tokens[0])
        search.reorder([1, 1, 2, 3, 5, 4])
        search.step(tokens[1])
        search.drop_finished([0, 2])
        search.step(tokens[2, :4])
        search.insert([1], fresh[:1])
        search.step(tokens[3, :4])
        search.reorder([1, 0, 3, 2])
        search.step(tokens[4, :4])
        search.insert([1, 0], fresh)
        for column in tokens[5:]:
            search.step(column[:4])
        search.drop_finished([0])
        search.step(tokens[0, :2])


class _Search:
    """Steps beside full passes over the prefix of each row."""

    def __init__(self, model: Architecture, sources: list[list[int]], beams: int) -> None:
        self.model, self.beams = model, beams
        self.state = model.start(model.encode(Packed.from_lists(sources)), beams)
        self.sources = sources
        self.prefixes: list[list[int]] = [[] for _ in range(len(sources) * beams)]
        self.last = "start"

    def step(self, column: Tensor) -> None:
        logits: object = self.model.step(column, self.state)
        require(
            isinstance(logits, Tensor) and list(logits.shape) == [len(column), SIZE],
            f"step returned {contract.described(logits)} for {len(column)} rows; it must return logits [N, V] of shape "
            f"[{len(column)}, {SIZE}]",
        )
        assert isinstance(logits, Tensor)
        for row, token in enumerate(column.tolist()):
            self.prefixes[row] = [*self.prefixes[row], token]
            source, prefix = self.sources[row // self.beams], self.prefixes[row]
            features = self.model(Packed.from_lists([source]), Packed.from_lists([prefix]))
            expected = self.model.output_projection(features[-1:])[0]
            place = f"at token {len(prefix)} of row {row}, after {self.last}"
            _require_close(logits[row], expected, f"step differs from the full pass {place}, by up to {{:.2g}}")
        self.last = "step"

    def reorder(self, parents: list[int]) -> None:
        self.state.reorder(torch.tensor(parents))
        self.prefixes = [self.prefixes[parent] for parent in parents]
        self.last = "reorder"

    def drop_finished(self, kept: list[int]) -> None:
        self.state.drop_finished(torch.tensor(kept))
        rows = [index * self.beams + row for index in kept for row in range(self.beams)]
        self.sources, self.prefixes = [self.sources[index] for index in kept], [self.prefixes[row] for row in rows]
        self.last = "drop_finished"

    def insert(self, slots: list[int], sources: list[list[int]]) -> None:
        self.state.insert(torch.tensor(slots), self.model.encode(Packed.from_lists(sources)))
        for slot, source in zip(slots, sources, strict=True):
            self.sources[slot] = source
            self.prefixes[slot * self.beams : (slot + 1) * self.beams] = [[] for _ in range(self.beams)]
        self.last = "insert"


def attention_weights_are_distributions_or_refused(subject: ArchitectureSubject) -> None:
    model, source, target = subject.model, subject.sources(5, 8), subject.targets(7, 4)
    with contract.evaluated(model):
        try:
            kinds = model.attention_weights(source, target)
        except ValueError:
            return
    for kind, layers in kinds.items():
        queries = source.layout if kind == "encoder" else target.layout
        for weights in layers:
            message = f"attention weights {kind!r} [B, H, L, M] do not sum to 1 over M: they are off by up to {{:.2g}}"
            _require_close(weights.sum(-1)[:, 0], queries.mask.float(), message, 1e-4)


# --- training ---------------------------------------------------------------------------------------------------------


def every_parameter_gets_a_finite_gradient(subject: ArchitectureSubject) -> None:
    model = subject.build(seed=3).train()
    target = subject.targets(7, 4, 9)
    with torch.random.fork_rng(devices=[]):
        features = model(subject.sources(5, 8, 3), target)
        words = contract.words((target.layout.tokens,), SIZE, 7).values
        loss = F.cross_entropy(model.output_projection(features), words, reduction="sum")
        torch.stack([loss, *model.auxiliary_losses().values()]).sum().backward()
    named = dict(model.named_parameters())
    trained = {name: parameter.grad for name, parameter in named.items() if parameter.requires_grad}
    unused = [name for name, gradient in trained.items() if gradient is None or not gradient.any()]
    infinite = [name for name, gradient in trained.items() if gradient is not None and not gradient.isfinite().all()]
    require(not infinite, f"the gradient of {', '.join(infinite[:5])} is not finite")
    require(
        not unused or model.find_unused_parameters,
        f"no gradient reaches {', '.join(unused[:5])}: the forward pass must use every parameter; remove it, or let "
        "find_unused_parameters return True if some passes leave it out",
    )


def bf16_autocast_trains_and_steps(subject: ArchitectureSubject) -> None:
    model = copy.deepcopy(subject.model).train()
    source, target = subject.sources(5, 8, 3), subject.targets(7, 4, 9)
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", torch.bfloat16):
        loss = model.output_projection(model(source, target)).float().logsumexp(-1).sum()
        loss = torch.stack([loss, *model.auxiliary_losses().values()]).sum()
    loss.backward()
    for name, parameter in model.named_parameters():
        finite = parameter.grad is None or bool(parameter.grad.isfinite().all())
        require(finite, f"under torch.autocast to bf16, the gradient of {name} is not finite")
    for cast in (False, True):
        model = (copy.deepcopy(subject.model).bfloat16() if cast else model).eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not cast):
            state = model.start(model.encode(source), 2)
            for column in target.values[:12].view(2, 6):
                logits = model.step(column, state)
                how = "with weights in bf16" if cast else "under torch.autocast to bf16"
                require(logits.isfinite().all(), f"{how}, step returned logits that are not finite")


def training_repeats_with_the_seed(subject: ArchitectureSubject) -> None:
    model = copy.deepcopy(subject.model).train()
    source, target = subject.sources(5, 8, 3), subject.targets(7, 4, 9)

    def features() -> Tensor:
        torch.manual_seed(11)
        return model(source, target)

    with torch.random.fork_rng(devices=[]):
        equal = torch.equal(features(), features())
    require(
        equal,
        "two forward passes in training mode differ after the same torch.manual_seed; draw random numbers from torch's "
        "generator alone, and keep no state from one pass to the next",
    )


def auxiliary_losses_are_silent_in_evaluation(subject: ArchitectureSubject) -> None:
    model = subject.model
    with contract.evaluated(model):
        model(subject.sources(5, 8), subject.targets(7, 4))
    losses = model.auxiliary_losses()
    require(losses == {}, f"in evaluation mode auxiliary_losses returned {losses}; it must return {{}}")


# --- saving -----------------------------------------------------------------------------------------------------------


def the_config_survives_a_round_trip(subject: ArchitectureSubject) -> None:
    again = derive(ARCHITECTURES[subject.name].preset, to_dict(subject.config), subject.name)
    require(again == subject.config, f"the config {subject.config} comes back from a checkpoint as {again}")


def weights_survive_a_round_trip(subject: ArchitectureSubject) -> None:
    other = subject.build(seed=4)
    other.load_state_dict(subject.model.state_dict())
    source, target = subject.sources(5, 8), subject.targets(7, 4)
    with contract.evaluated(subject.model), contract.evaluated(other):
        equal = torch.equal(subject.model(source, target), other(source, target))
    require(
        equal,
        "a model that has loaded the state_dict of another computes other features; tensors that features depend on "
        "must be parameters or registered buffers",
    )


def resume_is_exact_and_checkpoints_average(subject: ArchitectureSubject) -> None:
    settings = {"lr": 0.01, "warmup_updates": 4} | subject.settings
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_resume({"architecture": subject.name}, settings, folder)
        paths = averaging.last_of(folder / "whole", 2)
        averaged = averaging.average(paths)
        members = [checkpoint.load(path)["model"] for path in paths]
        for key, tensor in averaged["model"].items():
            mean = torch.stack([member[key].double() for member in members]).mean(0)
            _require_close(tensor.double(), mean, f"the average of {key} over two checkpoints is off by up to {{:.2g}}")
        checkpoint.save(folder / "averaged.pt", averaged)
        lines = ["bado kelu", "", "miro sate vonu pika"]
        single = Translator.load(folder / "averaged.pt").translate(lines, beam=2, max_len_b=3)
        several = Translator.load([folder / "averaged.pt"] * 2).translate(lines, beam=2, max_len_b=3)
        texts = [[translation.text for translation in found] for found in (single, several)]
        require(texts[0] == texts[1], f"an ensemble of a model with itself translates {texts[1]}, not {texts[0]}")


def _require_close(got: Tensor, expected: Tensor, message: str, tolerance: float = 1e-5) -> None:
    """Raises ContractError, {} in its message the largest difference, unless both are close."""
    bound = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0) + 1e-5
    difference = float((got - expected).abs().max()) if expected.numel() else 0.0
    require(difference <= bound, message.format(difference))


ARCHITECTURE_CHECKS: tuple[Check, ...] = (
    shapes_are_right,
    no_later_target_word_is_read,
    sentences_do_not_mix,
    alone_equals_in_any_batch,
    padding_sentences_change_nothing,
    every_source_word_matters,
    a_step_equals_the_full_pass,
    attention_weights_are_distributions_or_refused,
    every_parameter_gets_a_finite_gradient,
    bf16_autocast_trains_and_steps,
    training_repeats_with_the_seed,
    auxiliary_losses_are_silent_in_evaluation,
    the_config_survives_a_round_trip,
    weights_survive_a_round_trip,
    resume_is_exact_and_checkpoints_average,
)
