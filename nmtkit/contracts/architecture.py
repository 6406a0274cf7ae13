"""Checks of an architecture. The settings under test define the sizes. The vocabulary has 13 entries."""

import copy
import functools
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nmtkit.config import derive, to_dict
from nmtkit.contracts.checks import Contract, Subject, checks_of, require
from nmtkit.contracts.runs import check_resume
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Layout, Packed
from nmtkit.models import checkpoint
from nmtkit.models.architectures import ARCHITECTURES, Architecture, Vocabulary, contract
from nmtkit.models.layers.static_kv_cache import CacheLengths
from nmtkit.training import averaging
from nmtkit.translation.translator import Translator, prepare

SIZE = 13
VOCABULARY = Vocabulary(source=SIZE, target=SIZE, joint=True)
PADDING = (3, 2)  # lengths of two padding sentences
LAYOUT_HINT = "layers that read neighbouring tokens must respect sentence boundaries (layout.cu_seqlens, layout.mask)"


def build(subject: Subject[Architecture], seed: int) -> Architecture:
    """Returns a model in evaluation mode. Parameters that are zero become random, because zero gates hide errors."""
    torch.manual_seed(seed)
    model = subject.build(VOCABULARY)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=1.0 if parameter.dim() > 1 else 0.1)
    return model.eval()


@functools.lru_cache(maxsize=2)
def model_of(subject: Subject[Architecture]) -> Architecture:
    """Returns the model that most checks share. A check must not change this model."""
    return build(subject, seed=3)


def sources(subject: Subject[Architecture], *lengths: int, seed: int = 5) -> Packed:
    return contract.words(lengths, SIZE, seed, model_of(subject).max_source_positions)


def targets(subject: Subject[Architecture], *lengths: int) -> Packed:
    return contract.words(lengths, SIZE, 6, model_of(subject).max_target_positions)


# --- the forward pass -------------------------------------------------------------------------------------------------


def shapes_are_right(subject: Subject[Architecture]) -> None:
    with contract.evaluated(model_of(subject)):
        contract.check_shapes(model_of(subject), sources(subject, 5, 3), targets(subject, 8, 6), VOCABULARY)


def no_later_target_word_is_read(subject: Subject[Architecture]) -> None:
    with contract.evaluated(model_of(subject)):
        contract.check_causality(model_of(subject), sources(subject, 5, 3), targets(subject, 8, 6), VOCABULARY)


def sentences_do_not_mix(subject: Subject[Architecture]) -> None:
    with contract.evaluated(model_of(subject)):
        contract.check_sentences_apart(model_of(subject), sources(subject, 5, 3), targets(subject, 8, 6), VOCABULARY)


def alone_equals_in_any_batch(subject: Subject[Architecture]) -> None:
    model, source, target = model_of(subject), sources(subject, 4, 9, 1, 6), targets(subject, 7, 2, 5, 12)
    turned = torch.tensor([2, 0, 3, 1])
    with contract.evaluated(model):
        together = target.with_values(model(source, target)).split()
        again = target.select(turned).with_values(model(source.select(turned), target.select(turned))).split()
        for index in range(4):
            single = torch.tensor([index])
            alone = model(source.select(single), target.select(single))
            message = f"features of a sentence alone and in a batch of 4 differ by up to {{:.2g}}: {LAYOUT_HINT}"
            _require_close(together[index], alone, message)
            _require_close(again[turned.tolist().index(index)], alone, message)


def padding_sentences_change_nothing(subject: Subject[Architecture]) -> None:
    model, source, target = model_of(subject), sources(subject, 4, 9), targets(subject, 7, 2)
    longest = min(64, model.max_source_positions or 64, model.max_target_positions or 64)

    def with_padding(packed: Packed) -> Packed:
        lengths = torch.cat([packed.layout.lengths, torch.tensor(PADDING)])
        values = torch.cat([packed.values, packed.values.new_full((sum(PADDING),), 2)])
        return Packed(values, Layout(lengths, longest, len(values)))

    with contract.evaluated(model):
        expected = model(source, target)
        got = model(with_padding(source), with_padding(target))[: len(expected)]
    message = (
        "features change by up to {:.2g} if padding sentences follow and layout.max_length is larger than the longest "
        "sentence, as in batches of a fixed shape; use max_length for the sizes of tensors only"
    )
    _require_close(got, expected, message)


def every_source_word_matters(subject: Subject[Architecture]) -> None:
    model, source, target = model_of(subject), sources(subject, 6), targets(subject, 6)
    if not model.reads_source:
        return
    with contract.evaluated(model):
        features = model(source, target)
        for index in range(source.layout.tokens):
            changed = source.values.clone()
            changed[index] = (changed[index] + 1) % SIZE
            same = torch.allclose(features, model(source.with_values(changed), target), rtol=0, atol=1e-6)
            words = source.layout.tokens
            require(not same, f"features do not depend on word {index} of a source sentence of {words} words")


# --- decoding ---------------------------------------------------------------------------------------------------------


def a_step_equals_the_full_pass(subject: Subject[Architecture]) -> None:
    """Reorders, drops and inserts sentences of a search. Compares each step with a full pass over each prefix."""
    model = model_of(subject)
    with contract.evaluated(model):
        search = _Search(model, [ids.tolist() for ids in sources(subject, 4, 7, 2).split()], beams=2)
        fresh = [ids.tolist() for ids in sources(subject, 9, 3, seed=8).split()]
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
    """A search in which every step is compared with full passes over the prefixes."""

    def __init__(self, model: Architecture, sources: list[list[int]], beams: int) -> None:
        self.model, self.beams = model, beams
        self.state = model.start(model.encode(Packed.from_lists(sources)), beams)
        self.sources = sources
        self.prefixes: list[list[int]] = [[] for _ in range(len(sources) * beams)]
        self.last = "start"

    def step(self, column: Tensor) -> None:
        logits: object = self.model.step(column, self.state)
        if not isinstance(logits, Tensor) or list(logits.shape) != [len(column), SIZE]:
            raise contract.ContractError(
                f"step returned {contract.described(logits)} for {len(column)} rows; it must return logits [N, V] of "
                f"shape [{len(column)}, {SIZE}]"
            )
        for row, token in enumerate(column.tolist()):
            self.prefixes[row] = [*self.prefixes[row], token]
            source, prefix = self.sources[row // self.beams], self.prefixes[row]
            features = self.model(Packed.from_lists([source]), Packed.from_lists([prefix]))
            expected = self.model.output_projection(features[-1:])[0]
            position = f"at token {len(prefix)} of row {row}, after {self.last}"
            _require_close(logits[row], expected, f"step differs from the full pass {position}, by up to {{:.2g}}")
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


def attention_weights_are_distributions_or_refused(subject: Subject[Architecture]) -> None:
    model, source, target = model_of(subject), sources(subject, 5, 8), targets(subject, 7, 4)
    with contract.evaluated(model):
        try:
            kinds = model.attention_weights(source, target)
        except ValueError:
            return
    for kind, layers in kinds.items():
        queries = source.layout if kind == "encoder" else target.layout
        for weights in layers:
            message = f"attention weights {kind!r} [B, H, L, M]: sums over M (the keys) differ from 1 by up to {{:.2g}}"
            _require_close(weights.sum(-1)[:, 0], queries.mask.float(), message, 1e-4)


# --- inference --------------------------------------------------------------------------------------------------------


def a_prepared_model_computes_the_same(subject: Subject[Architecture]) -> None:
    """Compares features and logits of the model and of the copy that validation and `nmtkit generate` use on a CPU."""
    model, prepared = model_of(subject), _prepared(model_of(subject))
    source, target = sources(subject, 4, 9), targets(subject, 7, 2)
    with contract.evaluated(model):
        expected = model(source, target)
        got = prepared(source, target)
        message = (
            "on a CPU, validation and generate use a copy of the model that is prepared for inference; features or "
            "logits of the copy differ by up to {:.2g}; call each layer, and do not read its weights directly"
        )
        _require_close(got, expected, message, 1e-4)
        _require_close(prepared.output_projection(got), model.output_projection(expected), message, 1e-4)


def hooks_of_a_copy_are_called(subject: Subject[Architecture]) -> None:
    """Compares the forward hooks that a full pass calls in the model and in a prepared copy of the model."""
    called: list[str] = []
    model = copy.deepcopy(model_of(subject))
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    source, target = sources(subject, 4, 9), targets(subject, 7, 2)
    with contract.evaluated(model):
        model(source, target)
        expected = set(called)
        called.clear()
        _prepared(model)(source, target)
    missing = sorted(expected - set(called))
    require(
        not missing,
        f"forward hooks of {', '.join(missing[:5])} are called in the model but not in a copy of the model, which "
        "validation uses; copy.deepcopy must keep the hooks of a module",
    )


def _prepared(model: Architecture) -> Architecture:
    return prepare(copy.deepcopy(model), "cpu", "fp32")


def static_steps_equal_steps(subject: Subject[Architecture]) -> None:
    """Compares the results of `static_step` with the results of `step`. A search on a GPU uses `static_step`."""
    model, slots, beams = model_of(subject), 2, 3
    if not model.supports_static_decoding:
        return
    generator = torch.Generator().manual_seed(1)
    row = torch.arange(slots * beams).view(slots, beams)
    with contract.evaluated(model):
        memory = model.encode(sources(subject, 4, 9))
        static, state = model.static_start(slots, beams, 12, 12), model.start(memory, beams)
        static.insert(torch.arange(slots), memory)
        position = torch.zeros(slots, dtype=torch.int64)
        for count in range(8):
            if count == 4:  # a new sentence replaces the second sentence
                memory = model.encode(sources(subject, 3, seed=8))
                for search in (static, state):
                    search.insert(torch.tensor([1]), memory)
                position[1] = 0
            tokens = torch.randint(3, SIZE, (slots * beams,), generator=generator)
            lengths = CacheLengths(int(position.max()) + 1, 9)
            got = model.static_step(tokens, position, static, lengths)
            message = f"static_step differs from step at token {count + 1}, by up to {{:.2g}}"
            _require_close(got, model.step(tokens, state), message, 1e-4)
            parents = torch.randint(0, beams, (slots, beams), generator=generator)
            static.reorder(parents, lengths)
            state.reorder((parents + row[:, :1]).flatten())
            position += 1


# --- training ---------------------------------------------------------------------------------------------------------


def every_parameter_gets_a_finite_gradient(subject: Subject[Architecture]) -> None:
    model = build(subject, seed=3).train()
    target = targets(subject, 7, 4, 9)
    features = model(sources(subject, 5, 8, 3), target)
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
        f"no gradient reaches {', '.join(unused[:5])}: the forward pass must use every parameter; remove these "
        "parameters, or if only some passes use them, let find_unused_parameters return True",
    )


def bf16_autocast_trains_and_steps(subject: Subject[Architecture]) -> None:
    model = copy.deepcopy(model_of(subject)).train()
    source, target = sources(subject, 5, 8, 3), targets(subject, 7, 4, 9)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.output_projection(model(source, target)).float().logsumexp(-1).sum()
        loss = torch.stack([loss, *model.auxiliary_losses().values()]).sum()
    loss.backward()
    for name, parameter in model.named_parameters():
        finite = parameter.grad is None or parameter.grad.isfinite().all()
        require(finite, f"under torch.autocast to bf16, the gradient of {name} is not finite")
    for cast in (False, True):
        model = (copy.deepcopy(model_of(subject)).bfloat16() if cast else model).eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not cast):
            state = model.start(model.encode(source), 2)
            for column in target.values[:12].view(2, 6):
                logits = model.step(column, state)
                how = "with weights in bf16" if cast else "under torch.autocast to bf16"
                require(logits.isfinite().all(), f"{how}, step returned logits that are not finite")


def training_repeats_with_the_seed(subject: Subject[Architecture]) -> None:
    model = copy.deepcopy(model_of(subject)).train()
    source, target = sources(subject, 5, 8, 3), targets(subject, 7, 4, 9)

    def features() -> Tensor:
        torch.manual_seed(11)
        return model(source, target)

    require(
        torch.equal(features(), features()),
        "two forward passes in training mode differ after the same torch.manual_seed; draw random numbers only from "
        "the generator of torch, and keep no state between passes",
    )


def auxiliary_losses_are_silent_in_evaluation(subject: Subject[Architecture]) -> None:
    model = model_of(subject)
    with contract.evaluated(model):
        model(sources(subject, 5, 8), targets(subject, 7, 4))
    losses = model.auxiliary_losses()
    require(losses == {}, f"in evaluation mode auxiliary_losses returned {losses}; it must return {{}}")


# --- saving -----------------------------------------------------------------------------------------------------------


def the_config_survives_a_round_trip(subject: Subject[Architecture]) -> None:
    again = derive(ARCHITECTURES[subject.name].preset, to_dict(subject.config), subject.name)
    require(again == subject.config, f"the config {subject.config} becomes {again} in a checkpoint")


def weights_survive_a_round_trip(subject: Subject[Architecture]) -> None:
    model, other = model_of(subject), build(subject, seed=4)
    other.load_state_dict(model.state_dict())
    source, target = sources(subject, 5, 8), targets(subject, 7, 4)
    with contract.evaluated(model):
        equal = torch.equal(model(source, target), other(source, target))
    require(
        equal,
        "a model that loads the state_dict of another model computes different features; tensors that features "
        "depend on must be parameters or registered buffers",
    )


def resume_is_exact_and_checkpoints_average(subject: Subject[Architecture]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_resume(subject, folder)
        paths = averaging.last_of(folder / "whole", 2)
        averaged = averaging.average(paths)
        members = [checkpoint.load(path)["model"] for path in paths]
        for key, tensor in averaged["model"].items():
            mean = torch.stack([member[key].double() for member in members]).mean(0)
            _require_close(tensor.double(), mean, f"the average of {key} over two checkpoints is off by up to {{:.2g}}")
        checkpoint_file.save(folder / "averaged.pt", averaged)
        loaded = Translator.load(folder / "averaged.pt", trainable=True).models[0]
        lost = sorted(dict(build(subject, seed=3).named_parameters()).keys() - dict(loaded.named_parameters()).keys())
        require(not lost, f"a model that is loaded for training lacks the parameters {', '.join(lost[:5])}")
        lines = ["bado kelu", "", "miro sate vonu pika"]
        single = Translator.load(folder / "averaged.pt").translate(lines, beam=2, max_len_b=3)
        several = Translator.load([folder / "averaged.pt"] * 2).translate(lines, beam=2, max_len_b=3)
        texts = [[translation.text for translation in translations] for translations in (single, several)]
        require(texts[0] == texts[1], f"an ensemble of a model with itself translates {texts[1]}, not {texts[0]}")


def _require_close(got: Tensor, expected: Tensor, message: str, tolerance: float = 1e-5) -> None:
    """Raises ContractError unless both tensors are close. The {} of `message` is replaced by the largest difference."""
    bound = tolerance * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0) + 1e-5
    difference = float((got - expected).abs().max()) if expected.numel() else 0.0
    require(difference <= bound, message.format(difference))


check_architecture = Contract(ARCHITECTURES, Architecture, checks_of(__name__))
