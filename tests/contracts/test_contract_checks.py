"""Each contract check fails for a component that breaks its promise, and passes for our components."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TINY_CONFIGS, save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner
from torch import Tensor, nn

from nmtkit.cli import main
from nmtkit.config import derive, option
from nmtkit.config.registry import Registry
from nmtkit.contracts import (
    ContractError,
    check_architecture,
    check_callback,
    check_criterion,
    check_logits_processor,
    check_metric,
    check_optimizer,
    check_scheduler,
    check_transform,
)
from nmtkit.contracts.checks import Check, Contract, title
from nmtkit.contracts.runs import dataset
from nmtkit.data.dataset.transforms import TRANSFORMS, Transform
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.models.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.models.architectures.transformer import Transformer
from nmtkit.models.architectures.transformer_config import TransformerConfig
from nmtkit.scoring.segments import NEURAL_METRICS
from nmtkit.training.callbacks import CALLBACKS, Callback
from nmtkit.training.criterions import CRITERIONS, Criterion, Loss
from nmtkit.training.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, LRScheduler
from nmtkit.training.metrics import METRICS, Metric
from nmtkit.training.optimizers import OPTIMIZERS
from nmtkit.translation.search.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, LogitsProcessorState

# --- our components pass ----------------------------------------------------------------------------------------------

CHEAP = {"expected_reward": {"candidates_per_sentence": 2, "candidate_extra": 0}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the tokenizer of the contract checks."""
    return save_tiny_transformer(tmp_path_factory.mktemp("teacher") / "teacher.pt", dataset().tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        (["kd_cross_entropy", "--teacher"], {}),
        (["lm_fusion", "--lm"], {"encoder_layers": 0}),
        (["contrastive", "--contrast-source", "empty", "--contrast"], {}),
    ],
    ids=["teacher", "language-model", "contrasted-model"],
)
def test_a_component_is_checked_with_the_vocabulary_of_its_checkpoint(
    flags: list[str], kind: dict[str, Any], tmp_path: Path
) -> None:
    """The vocabulary has 330 pieces and differs from the vocabulary of the checks."""
    path = save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer(), **kind)
    result = CliRunner().invoke(main, ["check", *flags, str(path)])
    assert result.exit_code == 0, result.output
    assert re.search(r"(\d+) of \1 checks passed\n$", result.stdout)


def slow_if_trained(checks: Iterable[Check]) -> list[Any]:
    """Marks the check that trains three times as slow. tests/training/test_run.py resumes runs in the fast suite."""
    marks = {"resume is exact": [pytest.mark.slow]}
    return [pytest.param(check, id=title(check), marks=marks.get(title(check), [])) for check in checks]


@pytest.mark.parametrize("check", slow_if_trained(check_criterion.checks))
@pytest.mark.parametrize("name", CRITERIONS.names())
def test_criterions_keep_to_the_contract(name: str, check: Check, teacher: Path) -> None:
    settings = {"teacher": (teacher,)} if name == "kd_cross_entropy" else CHEAP.get(name, {})
    check(check_criterion.subject(name, **settings))


@pytest.mark.parametrize("check", slow_if_trained(check_optimizer.checks))
@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_optimizers_keep_to_the_contract(name: str, check: Check) -> None:
    check(check_optimizer.subject(name))


@pytest.mark.parametrize("check", check_scheduler.checks, ids=title)
@pytest.mark.parametrize("name", LR_SCHEDULERS.names())
def test_schedulers_keep_to_the_contract(name: str, check: Check) -> None:
    check(check_scheduler.subject(name))


@pytest.mark.slow
@pytest.mark.parametrize("check", check_metric.checks, ids=title)
@pytest.mark.parametrize("name", [name for name in METRICS.names() if name not in NEURAL_METRICS])  # need models
def test_metrics_keep_to_the_contract(name: str, check: Check) -> None:
    if name == "accuracy" or "resumes" not in title(check):  # a run is the same with all trackers
        check(check_metric.subject(name))


@pytest.mark.parametrize("check", check_transform.checks, ids=title)
@pytest.mark.parametrize("name", [name for name in TRANSFORMS.names() if name != "tag"])  # the dataset has no tags
def test_transforms_keep_to_the_contract(name: str, check: Check) -> None:
    if name == "bpe_dropout" or "resume" not in title(check):
        check(check_transform.subject(name))


# --- broken promises are found ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Width:
    width: int = option(6, "Width.")


@pytest.fixture
def registered() -> Iterator[Any]:
    """Returns a function that registers a factory for this test alone, and returns its name."""
    added: list[tuple[Registry[Any], str]] = []

    def register(entries: Registry[Any], factory: Any) -> str:
        name = f"broken_{len(added)}"
        entries.register(name, Width())(factory)
        added.append((entries, name))
        return name

    yield register
    for entries, name in added:
        del entries.entries[name]


def failures(contract: Contract[Any], name: str, *titles: str) -> dict[str, str]:
    """Returns the reasons of the failed checks by title: of all checks, or of the checks with these titles."""
    checks = tuple(check for check in contract.checks if not titles or title(check) in titles)
    assert len(checks) == (len(titles) or len(contract.checks))
    chosen = Contract(contract.registry, contract.base, checks)
    return {result.name: result.reason for result in chosen.results(chosen.subject(name)) if result.error is not None}


class Sound(Architecture):
    """Adds the sum of the source to a running sum of the target. Each subclass breaks one promise."""

    def __init__(self, config: Width, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary.source, config.width)
        self.target = nn.Embedding(vocabulary.target, config.width)
        self.output_projection = nn.Linear(config.width, vocabulary.target)

    def encode(self, source: Packed) -> Packed:
        return source.with_values(self.source(source.values))

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        summary = torch.stack([part.sum(0) for part in memory.split()])
        sums = [part.cumsum(0) for part in self.target(target_input.values).split(target_input.layout.host_lengths)]
        return torch.cat(sums) + summary[target_input.layout.segment_ids]


class Peeks(Sound):
    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        own = self.target(target_input.values)
        return super().decode(memory, target_input) + torch.roll(own, -1, 0)


class Mixes(Sound):
    def encode(self, source: Packed) -> Packed:
        return source.with_values(self.source(source.values) + self.source(source.values).mean(0))


class ReturnsPadded(Sound):
    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        return target_input.with_values(super().decode(memory, target_input)).to_padded()


class EncodesATensor(Sound):
    def encode(self, source: Packed) -> Packed:
        return self.source(source.values)


class Drops(Sound):
    def __init__(self, config: Width, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self.spare = nn.Linear(2, 2)


class IgnoresTheSource(Sound):
    def encode(self, source: Packed) -> Packed:
        return source.with_values(self.source(source.values) * (source.layout.position_ids > 0)[:, None])


class HidesState(Sound):
    def __init__(self, config: Width, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self.shift = torch.randn(config.width)

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        return super().decode(memory, target_input) + self.shift


class StepsOtherwise(Sound):
    def step(self, tokens: Tensor, state: Any) -> Tensor:
        return super().step(tokens, state).roll(1, 0)


class Remembers(Sound):
    passes = 0

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        self.passes += self.training
        return super().decode(memory, target_input) + self.passes


class ReadsWeights(Sound):
    """Reads the weight of a layer instead of calling it. A prepared model may store weights in another layout."""

    def __init__(self, config: Width, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self.hidden = nn.Linear(config.width, config.width)

    def decode(self, memory: Packed, target_input: Packed) -> Tensor:
        features = super().decode(memory, target_input)
        weight = self.hidden.weight if type(self.hidden) is nn.Linear else torch.zeros(6, 6)
        return features + nn.functional.linear(features, weight, self.hidden.bias)


class ForgetsHooks(Sound):
    """A module whose copies lack the hooks of the original."""

    class Table(nn.Embedding):
        def __deepcopy__(self, memo: Any) -> "ForgetsHooks.Table":
            copied = type(self)(self.num_embeddings, self.embedding_dim)
            copied.weight = nn.Parameter(self.weight.detach().clone())
            return copied

    def __init__(self, config: Width, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self.target = ForgetsHooks.Table(vocabulary.target, config.width)


class StaticOtherwise(Transformer):
    def __init__(self, config: Width, vocabulary: Vocabulary) -> None:
        super().__init__(derive(TransformerConfig, TINY_CONFIGS["transformer_tiny"], "test"), vocabulary)

    @property
    def supports_static_decoding(self) -> bool:
        return True

    def static_step(self, *arguments: Any) -> Tensor:
        return super().static_step(*arguments).roll(1, 0)


RUNS = "resume is exact and checkpoints average"  # begins with the checks of the forward pass
BROKEN = [
    (Peeks, ["no later target word is read", RUNS], "Peeks reads later target words, so its perplexity will be too"),
    (Mixes, ["sentences do not mix", RUNS], "Mixes mixes the sentences of a batch: a change of one source sentence"),
    (ReturnsPadded, ["shapes are right", RUNS], r"ReturnsPadded.decode returned a Tensor of shape \[2, 8, 6\] for"),
    (EncodesATensor, ["shapes are right", RUNS], "EncodesATensor.encode returned a Tensor of .* must return a Packed"),
    (Drops, ["every parameter gets a finite gradient"], "no gradient reaches spare.weight, spare.bias"),
    (IgnoresTheSource, ["every source word matters"], "features do not depend on word 0 of a source sentence of 6"),
    (HidesState, ["weights survive a round trip"], "must be parameters or registered buffers"),
    (StepsOtherwise, ["a step equals the full pass"], "step differs from the full pass at token 1 of row 0"),
    (ReadsWeights, ["a prepared model computes the same"], "not read its weights directly"),
    (ForgetsHooks, ["hooks of a copy are called"], "forward hooks of target are called in the model but not in a copy"),
    (StaticOtherwise, ["static steps equal steps"], "static_step differs from step at token 1"),
    (Remembers, ["training repeats with the seed"], "keep no state between passes"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "names", "message"), BROKEN, ids=[cls.__name__ for cls, *_ in BROKEN])
def test_an_architecture_that_breaks_a_promise(registered: Any, cls: type, names: list[str], message: str) -> None:
    name = registered(ARCHITECTURES, cls)
    found = failures(check_architecture, name)
    assert set(names) <= set(found)
    assert re.search(message, found[names[0]]), found[names[0]]


@pytest.mark.slow
def test_a_sound_architecture_passes(registered: Any) -> None:
    check_architecture(registered(ARCHITECTURES, Sound), width=4)


class Mine(CrossEntropy):
    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(CrossEntropyConfig(), tokenizer)


class Tensors(Mine):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        return super().compute_loss(model, batch).sum


class Unreduced(Mine):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        return Loss(super().compute_loss(model, batch).sum.expand(5), {"nll": torch.zeros(())})


class Means(Mine):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        loss = super().compute_loss(model, batch)
        return Loss(loss.sum / batch.target_tokens, loss.counts)


class OtherNll(Mine):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        loss = super().compute_loss(model, batch)
        return Loss(loss.sum, {"nll": loss.counts["nll"] * 2})


class Attached(Mine):
    def compute_loss(self, model: Any, batch: Any) -> Any:
        loss = super().compute_loss(model, batch)
        return Loss(loss.sum, {"nll": loss.counts["nll"], "mine": loss.sum})


class Trained(Mine):
    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.weight = nn.Parameter(torch.ones(()))


CRITERION_MISTAKES = [
    (Tensors, "a loss and its counts are returned", r"criterion Tensors returned a Tensor of shape \[\]; it must"),
    (Unreduced, "a loss and its counts are returned", r"returned a Tensor of shape \[5\] for 'sum'; it must be .* sum"),
    (Means, "the loss is a sum and no mean", "this looks like a mean. Return the sum over tokens"),
    (Means, "a batch that counts for nothing is taken", "the loss of a micro-batch without targets is nan"),
    (OtherNll, "nll is the negative log likelihood", "'nll' is .* but the negative log-likelihood of the target is"),
    (Attached, "a loss and its counts are returned", "the counts mine carry gradients"),
    (Trained, "it has no parameters of its own", "the criterion has the parameters weight"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "check", "message"), CRITERION_MISTAKES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_criterion_that_breaks_a_promise(registered: Any, cls: type[Criterion], check: str, message: str) -> None:
    found = failures(check_criterion, registered(CRITERIONS, cls), check)
    assert re.search(message, found[check]), found[check]
    assert not failures(check_criterion, "cross_entropy", check)


class Stuck(torch.optim.SGD):
    def __init__(self, config: Any, groups: Any) -> None:
        super().__init__(groups, lr=1e-3)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 1e-3
        super().step()


class Forgets(torch.optim.SGD):
    def __init__(self, config: Any, groups: Any) -> None:
        super().__init__(groups, lr=1e-3)
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] /= self.steps
        super().step()


class Partial(torch.optim.SGD):
    def __init__(self, config: Any, groups: Any) -> None:
        super().__init__(groups[:1], lr=1e-3)


def test_an_optimizer_that_works_on_no_shards_but_says_so(registered: Any) -> None:
    class Normed(torch.optim.SGD):
        def __init__(self, config: Any, groups: Any) -> None:
            super().__init__(groups, lr=1e-3)

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= parameter.grad.norm()
            super().step()

    name = registered(OPTIMIZERS, Normed)
    check = "a shard is stepped as the whole where declared"
    assert not failures(check_optimizer, name, check)
    OPTIMIZERS.on_shards = OPTIMIZERS.on_shards | {name}
    assert "leave out works_on_shards" in failures(check_optimizer, name, check)[check]
    OPTIMIZERS.on_shards = OPTIMIZERS.on_shards - {name}


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (Stuck, "the learning rate is the groups", "0.0001 and 0.01"),
        (Forgets, "its state survives a round trip", "must be in self.state"),
        (Partial, "every parameter is in a group", "missing in param_groups"),
    ],
)
def test_an_optimizer_that_breaks_a_promise(registered: Any, cls: Any, check: str, message: str) -> None:
    assert message in failures(check_optimizer, registered(OPTIMIZERS, cls), check)[check]


class Silent(LRScheduler):
    def __init__(self, config: Any, run: Any) -> None:
        self.asked = 0
        self.best = 9.0

    def lr(self, update: int) -> Any:
        return None


class Nan(Silent):
    def lr(self, update: int) -> float:
        return float("nan")


class Counts(Silent):
    def lr(self, update: int) -> float:
        self.asked += 1
        return 1 / self.asked


class Observes(Silent):
    def lr(self, update: int) -> float:
        return self.best

    def observe(self, score: float) -> None:
        self.best = score


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (Silent, "every rate is a finite number of at least zero", "Silent returned None for"),
        (Nan, "every rate is a finite number of at least zero", "Nan returned nan for"),
        (Counts, "a rate depends on its update alone", "calls lr again"),
        (Observes, "resume is exact", "everything that observe changes"),
    ],
)
def test_a_scheduler_that_breaks_a_promise(registered: Any, cls: Any, check: str, message: str) -> None:
    assert message in failures(check_scheduler, registered(LR_SCHEDULERS, cls), check)[check]


class Score(Metric):
    def __init__(self, config: Any) -> None:
        self.calls = 0

    def score(self, outputs: Any) -> Any:
        return 1.0


class Nothing(Score):
    def score(self, outputs: Any) -> Any:
        return None


class NotANumber(Score):
    translates = True

    def score(self, outputs: Any) -> Any:
        words = sum(len(line.split()) for line in outputs.hypotheses)
        return 1.0 if words else float("nan")


class Unasked(Score):
    def score(self, outputs: Any) -> Any:
        return len([line for line in outputs.hypotheses if line])


class Upside(Score):
    translates = True

    def score(self, outputs: Any) -> Any:
        return sum(line != other for line, other in zip(outputs.hypotheses, outputs.references, strict=True))


class Remembering(Score):
    def score(self, outputs: Any) -> Any:
        self.calls += 1
        return self.calls


class Averaging(Score):
    def count(self, model: Any, batch: Any) -> Any:
        return {"length": batch.target_output.float().mean()}


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (Nothing, "a finite number is returned", "score returned None"),
        (
            NotANumber,
            "a finite number is returned",
            "nan for empty lines",
        ),
        (Unasked, "a finite number is returned", "set translates = True"),
        (Upside, "references score no worse than nothing", "higher_is_better = True"),
        (Remembering, "the score repeats", "keep no state"),
        (Averaging, "counts are sums", "looks like a mean"),
    ],
)
def test_a_metric_that_breaks_a_promise(registered: Any, cls: Any, check: str, message: str) -> None:
    assert message in failures(check_metric, registered(METRICS, cls), check)[check]


class Fusion(LogitsProcessor):
    """Adds the log probabilities of a bigram model, and never lets a row have a token twice."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        size = tokenizer.target_size
        self.table = torch.randn(size, size, generator=torch.Generator().manual_seed(4)).log_softmax(1)

    def start(self, source: Packed, max_length: Tensor, beams: int) -> LogitsProcessorState:
        return self.state(self, source.layout.sentences * beams, beams)

    class State(LogitsProcessorState):
        def __init__(self, processor: Any, rows: int, beams: int) -> None:
            super().__init__(beams)
            self.table = processor.table
            self.used = torch.zeros(rows, len(self.table), dtype=torch.bool)

        def step(self, tokens: Tensor, log_probs: Tensor) -> Any:
            self.used = self.used.clone()
            self.used[torch.arange(len(tokens)), tokens] = tokens != EOS
            return (log_probs + self.table[tokens]).masked_fill(self.used, -torch.inf)

        def reorder(self, beam_index: Tensor) -> None:
            self.used = self.used[beam_index]

    state: Any = State


def fusion(**methods: Any) -> type[Fusion]:
    """Returns a subclass of Fusion whose state has other methods."""
    return type("Broken", (Fusion,), {"state": type("BrokenState", (Fusion.State,), methods)})


def mixed_rows(self: Any, tokens: Tensor, log_probs: Tensor) -> Tensor:
    changed = Fusion.State.step(self, tokens, log_probs)
    return torch.minimum(changed, changed.roll(self.beams, 0))


def counted(self: Any, tokens: Tensor, log_probs: Tensor) -> Tensor:
    self.table[:, 0] -= 1  # the table belongs to the processor, so that all searches change it
    return Fusion.State.step(self, tokens, log_probs)


def all_forbidden(self: Any, tokens: Tensor, log_probs: Tensor) -> Tensor:
    last = self.used.sum(1, keepdim=True) > 4
    return Fusion.State.step(self, tokens, log_probs).masked_fill(last, -torch.inf)


def dropped_from_the_end(self: Any, sentences: Tensor) -> None:
    self.used = self.used[: len(sentences) * self.beams]


def overwrites_tokens(self: Any, tokens: Tensor, log_probs: Tensor) -> Tensor:
    return Fusion.State.step(self, tokens.clamp_(min=3), log_probs)


SHAPE = "log probabilities of the same shape are returned"
PROCESSOR_MISTAKES = {
    "no state": (type("Stateless", (Fusion,), {"start": lambda *_: None}), SHAPE, "start returned None; it must"),
    "shape": (fusion(step=lambda self, tokens, log_probs: log_probs[0]), SHAPE, "for 9 rows; it must return log prob"),
    "positive": (fusion(step=lambda self, tokens, log_probs: -log_probs), SHAPE, "log probabilities must be at most 0"),
    "nan": (fusion(step=lambda self, tokens, log_probs: log_probs * torch.nan), SHAPE, "step returned NaN at token 0"),
    "tokens": (fusion(step=overwrites_tokens), SHAPE, "step changes its argument `tokens` in place"),
    "dead": (fusion(step=all_forbidden), "a token is always allowed", "every token is forbidden after 5 tokens"),
    "shared": (fusion(step=counted), "the same search gives the same log probabilities", "keep the data of a sear"),
    "random": (
        fusion(step=lambda self, tokens, log_probs: log_probs - torch.rand_like(log_probs)),
        "the same search gives the same log probabilities",
        "two searches for the same sentences differ at token 0",
    ),
    "mixes": (fusion(step=mixed_rows), "a sentence is searched alone as in a batch", "row n belongs to sentence n //"),
    "reorder": (fusion(reorder=lambda self, beam_index: None), "rows follow reorder", "after reorder, a row at token"),
    "drop": (fusion(drop_finished=dropped_from_the_end), "sentences can be dropped", "after drop_finished, the remain"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PROCESSOR_MISTAKES)
def test_a_logits_processor_that_breaks_a_promise(registered: Any, mistake: str) -> None:
    cls, check, message = PROCESSOR_MISTAKES[mistake]
    found = failures(check_logits_processor, registered(LOGITS_PROCESSORS, cls), check)
    assert message in found[check], found[check]


def test_a_sound_logits_processor_passes(registered: Any) -> None:
    check_logits_processor(registered(LOGITS_PROCESSORS, Fusion), width=3)


class Listening(Callback):
    """A callback as users of other toolkits write it. Each subclass makes one mistake."""

    def __init__(self, config: Any) -> None:
        self.seen = 0

    def validation(self, run: Any, scores: Any) -> None:
        self.count(scores)

    def count(self, scores: Any) -> None:
        self.seen += len(scores)


class LikeLightning(Listening):
    def on_validation_end(self, run: Any, scores: Any) -> None:
        self.seen += 1


class Misspelt(Listening):
    def valdation(self, run: Any, scores: Any) -> None:
        self.seen += 1


class OtherArguments(Listening):
    def log(self, run: Any) -> None:
        self.seen += 1


class Hookless(Callback):
    def __init__(self, config: Any) -> None:
        pass


CALLBACK_MISTAKES = [
    (LikeLightning, "LikeLightning.on_validation_end is not a hook, so no run calls it; did you mean validation?"),
    (Misspelt, "Misspelt.valdation is not a hook, so no run calls it; did you mean validation?"),
    (OtherArguments, "OtherArguments.log does not take the arguments of the hook; write log(self, run, metrics)"),
    (Hookless, "Hookless overrides no hook, so it has no effect; the hooks are start, update, log"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "message"), CALLBACK_MISTAKES, ids=[cls.__name__ for cls, _ in CALLBACK_MISTAKES])
def test_a_callback_whose_hooks_no_run_calls(registered: Any, cls: Any, message: str) -> None:
    check = "every hook has a name that a run calls"
    assert message in failures(check_callback, registered(CALLBACKS, cls), check)[check]
    assert not failures(check_callback, registered(CALLBACKS, Listening))


class Same(Transform):
    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.calls = 0

    def transform(self, source: Any, target: Any, generator: Any) -> Any:
        return source, target


class One(Same):
    def transform(self, source: Any, target: Any, generator: Any) -> Any:
        return source


class Outside(Same):
    def transform(self, source: Any, target: Any, generator: Any) -> Any:
        return source + 10_000, target


class Lists(Same):
    def transform(self, source: Any, target: Any, generator: Any) -> Any:
        return source.tolist(), target


class InPlace(Same):
    def transform(self, source: Any, target: Any, generator: Any) -> Any:
        source[:1] = 5
        return source, target


class CountsPairs(Same):
    def transform(self, source: Any, target: Any, generator: Any) -> Any:
        self.calls += 1
        return (source[:1], target) if self.calls % 2 else (source, target)


KIND = "pairs of its level are returned"


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (One, KIND, "returned a ndarray"),
        (Outside, KIND, "ids outside the vocabulary"),
        (Lists, KIND, "source is a list"),
        (InPlace, "what is given is left alone", "change and return copies"),
        (CountsPairs, "it repeats with the generator", "depends on earlier pairs"),
    ],
)
def test_a_transform_that_breaks_a_promise(registered: Any, cls: Any, check: str, message: str) -> None:
    assert message in failures(check_transform, registered(TRANSFORMS, cls), check)[check]


# --- the functions and the command ----------------------------------------------------------------------------------


def test_the_functions_name_all_that_failed(registered: Any) -> None:
    name = registered(LR_SCHEDULERS, Nan)
    with pytest.raises(ContractError) as caught:
        check_scheduler(name)
    assert str(caught.value).startswith(f"lr-scheduler {name}: 4 of 4")
    for function in (check_architecture, check_criterion, check_optimizer):
        with pytest.raises(ValueError, match="unknown"):
            function("nothing")
    with pytest.raises(ValueError, match="has no setting 'wide'"):
        check_scheduler(name, wide=3)


PLUGIN = """
from dataclasses import dataclass
import torch
from nmtkit.training.lr_schedulers import LR_SCHEDULERS, FixedConfig, Fixed

@LR_SCHEDULERS.register("checked_well", FixedConfig())
class Well(Fixed):
    pass

@LR_SCHEDULERS.register("checked_ill", FixedConfig())
class Ill(Fixed):
    def lr(self, update):
        return self.no_such_rate
"""


def test_the_command_shows_a_table_and_exits_with_1_where_a_check_failed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    plugin = ["--plugin", str(tmp_path / "mine.py")]
    well = CliRunner().invoke(main, ["check", *plugin, "checked_well"])
    assert well.exit_code == 0, well.output
    assert well.stdout.splitlines()[0] == "lr-scheduler checked_well"
    assert "  ok      resume is exact" in well.stdout and well.stdout.endswith("4 of 4 checks passed\n")
    ill = CliRunner().invoke(main, ["check", *plugin, "checked_ill", "checked_well"])
    assert ill.exit_code == 1
    assert "  failed  a rate depends on its update alone\n" in ill.stdout
    assert "AttributeError: 'Ill' object has no attribute 'no_such_rate'" in ill.stdout
    assert 'mine.py", line 13, in lr\n' in ill.stdout and "return self.no_such_rate" in ill.stdout
    assert "as above: every rate" in ill.stdout and ill.stdout.endswith("4 of 8 checks passed, 4 failed\n")
    unknown = CliRunner().invoke(main, ["check", *plugin, "nothing"])
    assert unknown.exit_code == 2 and "called 'nothing'" in unknown.stderr


PEEKING = """
from nmtkit.models.architectures import ARCHITECTURES
import torch

@ARCHITECTURES.register("peeking_gru", GRUConfig(width=8))
class PeekingGRU(GRU):
    def decode(self, memory, target_input):
        return super().decode(memory, target_input) + torch.roll(self.target(target_input.values), -1, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dry", [True, False])
def test_a_model_that_peeks_is_not_trained(mirror_data: Path, tmp_path: Path, dry: bool) -> None:
    gru = (Path(__file__).parents[2] / "examples/plugin/gru.py").read_text()
    text = gru.replace('"gru"', f'"hidden_gru_{dry}"') + PEEKING.replace("peeking_gru", f"peeking_gru_{dry}")
    (tmp_path / "peeks.py").write_text(text)
    flags = ["--plugin", str(tmp_path / "peeks.py"), "--lr", "0.01", "--save-dir", str(tmp_path / "run")]
    flags += ["--dry-run"] if dry else ["--max-update", "1"]
    peeking = CliRunner().invoke(main, ["train", str(mirror_data), "--arch", f"peeking_gru_{dry}", *flags])
    assert peeking.exit_code == 2
    assert "PeekingGRU reads later" in peeking.stderr
    if dry:
        sound = CliRunner().invoke(main, ["train", str(mirror_data), "--arch", f"hidden_gru_{dry}", *flags])
        assert sound.exit_code == 0 and "no later target words" in sound.stdout


MEAN = """
from nmtkit.training.criterions import CRITERIONS, Loss
from nmtkit.training.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig

@CRITERIONS.register("mean_loss", CrossEntropyConfig())
class MeanLoss(CrossEntropy):
    def compute_loss(self, model, batch):
        loss = super().compute_loss(model, batch)
        return Loss(loss.sum / max(1, batch.target_tokens), loss.counts)
"""


def test_a_criterion_that_returns_a_mean_is_not_trained(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "mean.py").write_text(MEAN)
    flags = ["--plugin", str(tmp_path / "mean.py"), "--criterion", "mean_loss", "--arch", "transformer_tiny"]
    flags += ["--save-dir", str(tmp_path / "run"), "--max-update", "1", "--device", "cpu"]
    result = CliRunner().invoke(main, ["train", str(mirror_data), *flags])
    assert result.exit_code == 2
    assert "criterion MeanLoss: 'sum' is" in result.stderr and "looks like a mean" in result.stderr
