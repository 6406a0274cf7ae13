"""Guided alignment against arithmetic on the attention weights, link by link."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import TINY_CONFIGS, WITHOUT_ATTENTION, tiny_tokenizer, tiny_transformer, write_corpus
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.config import derive
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.data.packed import Batch, Packed
from nmtkit.models.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.models.architectures.interface import layer_index
from nmtkit.models.building import from_checkpoint
from nmtkit.training.config import JobConfig
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.criterions.guided_alignment import GuidedAlignment
from nmtkit.training.setup import build_trainer

SOURCE, TARGET = [[3, 5, 7, 2], [4, 2]], [[6, 4, 2], [5, 6, 2]]
LINKS = [(0, 1, 0), (0, 0, 0), (0, 2, 1), (1, 1, 2)]  # sentence, source, target: two links of one target token


def batch(alignments: list[tuple[int, int, int]] | None = LINKS) -> Batch:
    inputs = [[1, *ids[:-1]] for ids in TARGET]
    output = torch.tensor([token for ids in TARGET for token in ids])
    links = None if alignments is None else torch.tensor(alignments, dtype=torch.int64).view(-1, 3)
    pairs = torch.arange(len(SOURCE))
    return Batch(Packed.from_lists(SOURCE), Packed.from_lists(inputs), output, len(output), pairs, links)


def criterion(**settings: Any) -> GuidedAlignment:
    entry = CRITERIONS["guided_alignment"]
    made = entry.factory(derive(entry.preset, settings, "test"), SimpleNamespace())
    assert isinstance(made, GuidedAlignment)
    return made.train()


def model(**changes: Any) -> Architecture:
    torch.manual_seed(3)
    return tiny_transformer(**{"decoder_layers": 3, "heads": 2, "dropout": 0.0, **changes}).train()


def expected(net: Architecture, layer: int, head: int | None) -> float:
    """-sum over the links of log attention, each over the number of links of its target token."""
    made = batch()
    weights = net.attention_weights(made.source, made.target_input)["cross"][layer]
    total = 0.0
    for sentence, source, target in LINKS:
        heads = weights[sentence, :, target, source].tolist()
        attention = sum(heads) / len(heads) if head is None else heads[head]
        total -= math.log(attention) / sum(link[::2] == (sentence, target) for link in LINKS)
    return total


@pytest.mark.parametrize(
    ("settings", "layer", "head"),
    [
        ({}, 1, 0),  # the second of three layers
        ({"alignment_layer": 3, "alignment_head": 2}, 2, 1),
        ({"alignment_layer": 1, "alignment_head": None}, 0, None),
    ],
)
def test_the_loss_is_the_cross_entropy_of_attention_with_the_links(
    settings: dict[str, Any], layer: int, head: int | None
) -> None:
    net = model()
    loss = criterion(alignment_weight=0.3, **settings)(net, batch())
    likelihood = CRITERIONS["label_smoothed_cross_entropy"]
    smoothed = likelihood.factory(likelihood.preset, SimpleNamespace())(net, batch())  # type: ignore[arg-type]
    assert float(loss.counts["alignment"]) == pytest.approx(expected(net, layer, head), rel=1e-4)
    assert float(loss.sum.detach()) == pytest.approx(
        float(smoothed.sum.detach()) + 0.3 * expected(net, layer, head), rel=1e-5
    )
    assert float(loss.counts["nll"]) == pytest.approx(float(smoothed.counts["nll"]), rel=1e-6)


def test_words_are_aligned_by_the_last_layer_but_one_and_of_two_by_the_last() -> None:
    assert [layer_index(None, layers) for layers in (1, 2, 3, 6)] == [0, 1, 1, 4]
    assert layer_index(1, 6) == 0


@pytest.mark.parametrize("layer", [0, -1, 7])
def test_a_layer_that_does_not_exist_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=f"layer {layer}"):
        layer_index(layer, 6)


def test_its_gradient_reaches_the_attention_of_that_layer_and_none_above() -> None:
    net = model()
    criterion(alignment_weight=1.0, alignment_layer=2)(net, batch())
    features, weights = net.forward_with_attention(batch().source, batch().target_input, 2)
    assert weights is not None and not features.isnan().any()
    weights[0, 0, 0, 0].log().backward()
    grads = {name: parameter.grad for name, parameter in net.named_parameters()}
    assert any(grad is not None and grad.any() for name, grad in grads.items() if "decoder.1.cross" in name)
    assert not any(grad is not None and grad.any() for name, grad in grads.items() if "decoder.2" in name)


@pytest.mark.slow
def test_training_with_it_aligns() -> None:
    net, made = model(), batch()
    loss_of = criterion(alignment_weight=1.0)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss_of(net, made).sum.backward()
        optimizer.step()
    weights = net.eval().attention_weights(made.source, made.target_input)["cross"][1][:, 0]
    assert float(weights[0, 1, 2].detach()) > 0.9 and float(weights[1, 2, 1].detach()) > 0.9
    assert 0.4 < float(weights[0, 0, 0].detach()) < 0.6 and 0.4 < float(weights[0, 0, 1].detach()) < 0.6


def test_pairs_without_links_cost_the_cross_entropy_alone() -> None:
    net = model()
    loss = criterion()(net, batch([]))
    assert float(loss.counts["alignment"]) == 0.0


def test_training_without_alignments_is_refused_and_validation_is_not() -> None:
    net = model()
    with pytest.raises(ValueError, match="preprocess with --alignments"):
        criterion()(net, batch(None))
    assert set(criterion().eval()(net, batch(None)).counts) == {"nll"}


def test_layers_and_heads_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 4; .*is 3"):
        criterion(alignment_layer=4)(model(), batch())
    with pytest.raises(ValueError, match=r"--alignment-head is 3; .*2 heads"):
        criterion(alignment_head=3)(model(), batch())


def test_an_update_that_leaves_the_layer_out_has_no_alignment_loss() -> None:
    net = model(decoder_layerdrop=0.99)
    net.begin_update(torch.Generator().manual_seed(1))
    assert set(criterion()(net, batch()).counts) == {"nll"}


@pytest.mark.slow
def test_preprocess_and_train_teach_a_model_to_align(tmp_path: Path) -> None:
    """Trains on words that are translated in reverse order."""
    write_corpus(tmp_path / "train", 300, seed=1)
    lengths = [len(line.split()) for line in (tmp_path / "train.xx").read_text().splitlines()]
    links = (" ".join(f"{i}-{n - 1 - i}" for i in range(n)) for n in lengths)
    (tmp_path / "train.align").write_text("".join(f"{line}\n" for line in links))
    flags = f"preprocess -s xx -t yy --trainpref {tmp_path}/train --vocab-size 320"
    flags += f" --alignments {tmp_path}/train.align --destdir {tmp_path}/data"
    main(flags.split(), standalone_mode=False)
    flags = f"train {tmp_path}/data --save-dir {tmp_path}/run --arch transformer_tiny --criterion guided_alignment"
    flags += " --alignment-weight 1 --encoder-layers 1 --decoder-layers 1 --d-model 32 --d-ff 64 --heads 2 --dropout 0"
    flags += " --batch-tokens 400 --max-update 150 --lr 0.01 --warmup-updates 20"
    flags += " --device cpu --precision fp32 --validate-interval none"
    trained = CliRunner().invoke(main, flags.split())
    assert trained.exit_code == 0, trained.output
    net, _ = from_checkpoint(tmp_path / "run" / "last.pt")
    made = Dataset.open(tmp_path / "data")["train"].batch(np.arange(300))
    assert made.alignments is not None
    weights = net.eval().attention_weights(made.source, made.target_input)["cross"][0][:, 0].detach()
    sentence, source, target = made.alignments.unbind(1)
    on_links = float(weights[sentence, target, source].sum())
    uniform = float((1 / made.source.layout.lengths[sentence]).sum())
    assert on_links > 2 * uniform


@pytest.mark.parametrize("name", [name for name in TINY_CONFIGS if name not in WITHOUT_ATTENTION])
def test_every_architecture_with_attention_can_be_guided(name: str) -> None:
    entry = ARCHITECTURES[name]
    torch.manual_seed(3)
    config = derive(entry.preset, TINY_CONFIGS[name] | {"dropout": 0.0}, "test")
    net = entry.factory(config, Vocabulary(source=13, target=13, joint=True)).eval()
    made = batch()
    features, weights = net.forward_with_attention(made.source, made.target_input, 1)
    torch.testing.assert_close(features, net(made.source, made.target_input))
    torch.testing.assert_close(weights, net.attention_weights(made.source, made.target_input)["cross"][0])


def test_an_architecture_without_attention_says_so() -> None:
    entry = ARCHITECTURES["bytenet_small"]
    config = derive(entry.preset, TINY_CONFIGS["bytenet_small"], "test")
    net = entry.factory(config, Vocabulary(source=13, target=13, joint=True)).train()
    with pytest.raises(ValueError, match="no cross-attention to supervise"):
        criterion()(net, batch())


@pytest.mark.parametrize(
    ("criterion", "settings"),
    [
        ("guided_alignment", {"parallel": "fsdp"}),
        ("guided_alignment", {"compile": True}),
        ("expected_reward", {"compile": True}),
        ("simcut", {"compile": True}),
    ],
)
def test_what_sees_the_models_forward_alone_is_refused(
    criterion: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    names = {"architecture": "transformer_tiny", "criterion": criterion}
    with pytest.raises(ValueError, match=f"--criterion {criterion}"):
        job = JobConfig.read(names=names, settings={"save_dir": tmp_path, "device": "cpu"} | settings)
        build_trainer(job, tiny_tokenizer(), torch.device("cpu"))
