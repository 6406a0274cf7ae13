"""Runs that start from a checkpoint: with adapters, and validated on several subsets."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    log_records,
    save_tiny_transformer,
    save_transformer,
    tiny_tokenizer,
    tiny_transformer,
    write_corpus,
)
from click.testing import CliRunner

from nmtkit import load
from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.jobs.distributed import launch
from nmtkit.models import building, checkpoint
from nmtkit.training.config import JobConfig
from nmtkit.training.initial_weights import start_from
from nmtkit.training.parameters import adapters_of
from nmtkit.training.run_config import RunConfig
from nmtkit.training.run_facts import _base_facts
from nmtkit.translation.translator import Translator

FLAGS = shlex.split("""
    --arch transformer_tiny --d-model 16 --heads 2 --d-ff 31 --encoder-layers 1 --decoder-layers 1 --dropout 0.1
    --batch-tokens 400 --max-tokens 200 --precision fp32 --device cpu --lr 0.02 --warmup-updates 5
    --log-interval 1 --threads 1 --metrics accuracy
""")


def flags(data: Path, save_dir: Path, *more: object) -> list[str]:
    return ["train", str(data), *FLAGS, "--save-dir", str(save_dir), *map(str, more)]


def train(data: Path, save_dir: Path, *more: object) -> str:
    result = CliRunner().invoke(main, flags(data, save_dir, *more))
    assert result.exit_code == 0, result.output
    return result.stderr


def refusal(data: Path, save_dir: Path, *more: object) -> str:
    result = CliRunner().invoke(main, flags(data, save_dir, *more))
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def base(mirror_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    train(mirror_data, folder / "run", "--max-update", 5)
    return folder / "run/last.pt"


@pytest.fixture(scope="module")
def domain_data(base: Path, mirror_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a dataset of other text with the tokenizer of `base`. Its second valid set comes from `mirror_data`."""
    folder = tmp_path_factory.mktemp("domain")
    for seed, (name, pairs) in enumerate([("train", 120), ("valid", 15)], start=7):
        write_corpus(folder / name, pairs, seed)
    given = ["-s", "xx", "-t", "yy", "--trainpref", folder / "train", "--tokenizer-from", base]
    given += ["--validpref", f"{folder / 'valid'},{mirror_data.parent / 'valid'}", "--destdir", folder / "data-bin"]
    main(["preprocess", *map(str, given)], standalone_mode=False)
    return folder / "data-bin"


@pytest.mark.slow
def test_the_first_validation_is_that_of_the_unchanged_model(base: Path, mirror_data: Path, tmp_path: Path) -> None:
    train(mirror_data, tmp_path / "run", "--finetune-from", base, "--validate-first", "--max-update", 3)
    first, last = log_records(tmp_path / "run", "valid")
    (before,) = log_records(base.parent, "valid")
    assert (first["update"], last["update"]) == (0, 3)
    assert first["loss"] == pytest.approx(before["loss"], rel=1e-6) and last["loss"] != first["loss"]
    train(mirror_data, tmp_path / "run", "--finetune-from", base, "--validate-first", "--max-update", 6)  # resumes
    assert [record["update"] for record in log_records(tmp_path / "run", "valid")] == [0, 3, 6]
    refused = refusal(mirror_data, tmp_path / "no", "--validate-first", "--validate-interval", "none")
    assert "--validate-first" in refused and "--validate-interval" in refused


@pytest.mark.slow
@pytest.mark.parametrize("words", ["config", "flags", "flags without --arch", "flags and vectors"])
def test_a_run_resumes_without_the_files_from_which_it_started(
    base: Path, mirror_data: Path, tmp_path: Path, words: str
) -> None:
    own, vectors, folder = tmp_path / "base.pt", tmp_path / "vectors.txt", tmp_path / "run"
    own.write_bytes(base.read_bytes())
    vectors.write_text("</s>" + " 0.5" * 16 + "\n")
    command = flags(mirror_data, folder, "--finetune-from", own)
    if words == "flags without --arch":
        command = [command[0], command[1], *command[16:]]  # the base has the architecture and its settings
    elif words == "flags and vectors":
        command += ["--encoder-embed-path", str(vectors)]
    assert CliRunner().invoke(main, [*command, "--max-update", "1"]).exit_code == 0
    own.unlink()
    vectors.unlink()
    if words == "config":
        command = ["train", "--config", str(folder / "config.toml")]
    result = CliRunner().invoke(main, [*command, "--max-update", "2"])
    assert result.exit_code == 0, result.output
    assert checkpoint_file.read(folder / "last.pt")["update"] == 2
    if words != "config":
        refused = CliRunner().invoke(main, [*command, "--save-dir", str(tmp_path / "new")])
        assert refused.exit_code == 2 and f"--finetune-from {own}" in refused.stderr.replace("\n", "")


@pytest.mark.slow
def test_finetune_from_none_overrides_the_base_of_a_config_file_and_its_architecture(
    base: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tuned.toml"
    file.write_text(f'[run]\nfinetune_from = "{base}"\n')
    for more, name in (([], "tiny"), (["--finetune-from", "none"], "base")):
        page = CliRunner().invoke(main, ["train", "--config", str(file), *more, "--help"]).output
        assert f"Architecture transformer_{name}" in page
    job = JobConfig.read(file, settings={"finetune_from": None})
    assert job.run.finetune_from is None and job.components["architecture"].name == "transformer_base"


@pytest.mark.slow
def test_adapters_are_saved_alone_and_merged_where_a_model_is_read(
    base: Path, domain_data: Path, tmp_path: Path
) -> None:
    said = train(domain_data, tmp_path, "--finetune-from", base, "--adapter-rank", 4, "--max-update", 6)
    contents = checkpoint_file.read(tmp_path / "last.pt")
    assert all(name.rpartition(".")[2] in ("adapter_a", "adapter_b") for name in contents["model"])
    # 16 wide: encoder qkv 16+48, out 32, fc1 and fc2 47 each; decoder the same, and q 32, kv 48, out 32
    trained = 4 * (2 * (64 + 32 + 47 + 47) + 32 + 48 + 32)
    assert sum(tensor.numel() for tensor in contents["model"].values()) == trained
    assert f"{trained / 1e6:.3f} M parameters" in said
    assert contents["adapters"]["base"] == str(base.resolve())
    whole, before = checkpoint.load(tmp_path / "last.pt")["model"], checkpoint.load(base)["model"]
    assert whole.keys() == before.keys()
    for name in before:
        adapted = re.search(r"\.((q|kv|qkv|out)_proj|fc1|fc2)\.weight$", name) is not None
        assert torch.equal(whole[name], before[name]) != adapted, name
    model, _ = building.from_checkpoint(tmp_path / "last.pt")
    valid = Dataset.open(domain_data)["valid"]
    batch = valid.batch(torch.arange(len(valid)).numpy())
    with torch.no_grad():
        logits = model.output_projection(model(batch.source, batch.target_input))
    correct = (logits.argmax(-1) == batch.target_output).float().mean().item()
    assert log_records(tmp_path, "valid")[-1]["accuracy"] == pytest.approx(100 * correct, abs=1e-3)
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "last.pt")]).output
    assert re.search(r"adapters +rank \d+, for ", shown) and f"{trained:,}" in shown and "average-checkpoints" in shown


# --- adapters in every command that reads a model ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(base: Path, domain_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run with adapters. `merged.pt` has the weights W + alpha / rank B A, computed here."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    flags = ["--finetune-from", base, "--adapter-rank", 4, "--adapter-alpha", 8, "--max-update", 6, "--lr", 0.5]
    train(domain_data, folder, *flags, "--save-interval-updates", 3, "--keep-last", 2)
    for name in ("update_00000003.pt", "update_00000006.pt"):
        saved, contents = checkpoint_file.read(folder / name)["model"], checkpoint_file.read(base)
        for adapter in [key for key in saved if key.endswith("adapter_a")]:
            layer = adapter.removesuffix(".adapter_a")
            product = saved[f"{layer}.adapter_b"] @ saved[adapter]
            assert product.abs().max() > 1e-3
            contents["model"][f"{layer}.weight"] = contents["model"][f"{layer}.weight"] + 8 / 4 * product
        contents.pop("training")
        checkpoint_file.save(folder.parent / f"merged_{name}", contents)
    return folder


def assert_close(one: Path, other: Path) -> None:
    weights = [checkpoint.load(path)["model"] for path in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], atol=1e-6, rtol=1e-5)


def nmtkit(*arguments: object) -> str:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_second_fine_tuning_still_knows_the_origin_of_the_first_base(tmp_path: Path) -> None:
    origin = {"repository": "org/base", "commit": "0" * 40, "license": "cc-by-4.0"}
    contents = checkpoint.load(save_transformer(tmp_path / "base.pt"))
    for facts in ({"origin": origin}, {"run": {"base_origin": origin}}):
        checkpoint_file.save(tmp_path / "base.pt", contents | facts)
        assert _base_facts(tmp_path / "base.pt")["base_origin"] == origin


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 2])
def test_an_average_of_adapters_is_that_of_the_merged_models(adapted: Path, tmp_path: Path, members: int) -> None:
    names = ["update_00000003.pt", "update_00000006.pt"][-members:]
    nmtkit("average-checkpoints", *(adapted / name for name in names), "--output", tmp_path / "adapters.pt")
    contents = checkpoint_file.read(tmp_path / "adapters.pt")
    assert "adapters" not in contents
    merged = [checkpoint_file.read(adapted.parent / f"merged_{name}")["model"] for name in names]
    for key, tensor in contents["model"].items():
        expected = sum(member[key].double() for member in merged) / members
        torch.testing.assert_close(tensor.double(), expected, atol=1e-6, rtol=1e-5)


def test_adapters_have_the_shortlist_of_their_base_unless_they_have_their_own(adapted: Path, tmp_path: Path) -> None:
    def with_list(path: Path, target: int) -> None:
        lists = {"lengths": torch.tensor([1]), "targets": torch.tensor([target]), "frequent": torch.tensor([5])}
        checkpoint_file.save(tmp_path / path.name, checkpoint_file.read(path) | {"shortlist": lists})

    base = Path(checkpoint_file.read(adapted / "last.pt")["adapters"]["base"])
    with_list(base, 3)
    contents = checkpoint_file.read(adapted / "last.pt")
    contents["adapters"] |= {"base": str(tmp_path / base.name)}
    checkpoint_file.save(tmp_path / "adapters.pt", contents)
    assert checkpoint.load(tmp_path / "adapters.pt")["shortlist"]["targets"].tolist() == [3]
    with_list(tmp_path / "adapters.pt", 4)
    assert checkpoint.load(tmp_path / "adapters.pt")["shortlist"]["targets"].tolist() == [4]


@pytest.mark.slow
def test_a_run_keeps_the_shortlist_of_its_start_if_the_vocabulary_is_the_same(
    base: Path, mirror_data: Path, domain_data: Path, tmp_path: Path
) -> None:
    lists = {"lengths": torch.tensor([1]), "targets": torch.tensor([3]), "frequent": torch.tensor([5])}
    start = tmp_path / "start.pt"
    checkpoint_file.save(start, checkpoint_file.read(base) | {"shortlist": lists})

    def shortlist_of(folder: str) -> Any:
        kept = checkpoint_file.read(tmp_path / folder / "last.pt").get("shortlist")
        return kept and {name: part.tolist() for name, part in kept.items()}

    expected = {"lengths": [1], "targets": [3], "frequent": [5]}
    train(domain_data, tmp_path / "run", "--finetune-from", start, "--max-update", 1)
    assert shortlist_of("run") == expected
    train(domain_data, tmp_path / "run", "--finetune-from", start, "--max-update", 2)  # resumes
    assert checkpoint_file.read(tmp_path / "run/last.pt")["update"] == 2 and shortlist_of("run") == expected
    train(domain_data, tmp_path / "few", "--finetune-from", start, "--max-update", 1, "--adapter-rank", 2)
    assert shortlist_of("few") is None  # the base has a shortlist
    assert checkpoint.load(tmp_path / "few/last.pt")["shortlist"]["targets"].tolist() == [3]
    own = tmp_path / "few/update_00000001.pt"
    checkpoint_file.save(own, checkpoint_file.read(own) | {"shortlist": lists | {"targets": torch.tensor([4])}})
    train(domain_data, tmp_path / "few", "--finetune-from", start, "--max-update", 2, "--adapter-rank", 2)
    assert shortlist_of("few") == expected | {"targets": [4]}  # a resumed run keeps the shortlist of its checkpoint
    smaller = ["-s", "xx", "-t", "yy", "--trainpref", mirror_data.parent / "valid", "--vocab-size", "300"]
    smaller += ["--validpref", mirror_data.parent / "test"]
    main(["preprocess", *map(str, smaller), "--destdir", str(tmp_path / "bin")], standalone_mode=False)
    said = train(tmp_path / "bin", tmp_path / "other", "--finetune-from", start, "--max-update", 1)
    assert f"the shortlist of {start}" in said.replace("\n", " ")
    assert shortlist_of("other") is None


@pytest.mark.parametrize("kind", ["safetensors", "huggingface"])
def test_an_export_of_adapters_is_that_of_the_merged_model(adapted: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("safetensors")
    paths = {"adapters": adapted / "last.pt", "merged": adapted.parent / "merged_update_00000006.pt"}
    for name, path in paths.items():
        nmtkit("export", path, tmp_path / name, "--format", kind)
        if kind == "safetensors":
            nmtkit("export", tmp_path / name, tmp_path / f"{name}.pt", "--format", "checkpoint")
        else:
            nmtkit("import", tmp_path / name, tmp_path / f"{name}.pt", "--try", "")
    assert_close(tmp_path / "adapters.pt", tmp_path / "merged.pt")


@pytest.mark.slow
def test_scripts_and_the_service_translate_with_the_merged_model(adapted: Path, domain_data: Path) -> None:
    lines = Dataset.open(domain_data)["valid"].source_lines()
    merged = load(adapted.parent / "merged_update_00000006.pt")
    expected = merged.translate(lines)
    assert load(adapted / "last.pt").translate(lines) == expected
    served = Translator.load([adapted / "last.pt", adapted.parent / "merged_update_00000006.pt"], precision="fp32")
    assert [it.text for it in served.translate(lines)] == expected  # an ensemble of a model with itself
    assert building.languages_of(adapted / "last.pt") == ("xx", "yy")


@pytest.mark.slow
def test_a_resumed_run_of_adapters_goes_on_exactly(base: Path, domain_data: Path, tmp_path: Path) -> None:
    more = ["--finetune-from", base, "--adapter-rank", 4, "--adapter-alpha", 8, "--ema-decay", 0.9, "--clip-norm", 1]
    train(domain_data, tmp_path / "whole", *more, "--max-update", 6)
    for updates in (3, 6):
        train(domain_data, tmp_path / "parts", *more, "--max-update", updates)
    whole, parts = (checkpoint.load(tmp_path / name / "last.pt")["model"] for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    said = refusal(domain_data, tmp_path / "parts", *more, "--max-update", 9, "--adapter-alpha", 4)
    assert "run that cannot continue" in said and "adapters: alpha 8 4" in said
    full = refusal(domain_data, tmp_path / "parts", "--finetune-from", base, "--max-update", 9)
    assert "adapters: rank 4 none" in full


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_make_the_adapters_of_one(base: Path, domain_data: Path, tmp_path: Path, parallel: str) -> None:
    more = ["--finetune-from", base, "--adapter-rank", 3, "--clip-norm", 1, "--ema-decay", 0.9]
    train(domain_data, tmp_path / "one", *more, "--max-update", 4)
    for updates in (4,) if parallel == "ddp" else (2, 4):
        command = flags(domain_data, tmp_path / "two", *more, "--max-update", updates, "--parallel", parallel)
        assert launch(command, 2) == 0
    one, two = (checkpoint_file.read(tmp_path / name / "last.pt") for name in ("one", "two"))
    assert one["model"].keys() == two["model"].keys()
    for name, tensor in one["model"].items():
        torch.testing.assert_close(two["model"][name], tensor, atol=2e-4, rtol=1e-3)
    assert two["scores"]["loss"] == pytest.approx(one["scores"]["loss"], rel=1e-3)


@pytest.mark.slow
def test_adapters_refuse_what_would_change_the_base(
    base: Path, domain_data: Path, mirror_data: Path, tmp_path: Path
) -> None:
    start = ["--finetune-from", base, "--max-update", 1]
    assert "--adapter-rank does nothing" in refusal(domain_data, tmp_path, "--adapter-rank", 4)
    assert "--adapter-alpha does nothing" in refusal(domain_data, tmp_path, "--adapter-alpha", 4)
    both = refusal(domain_data, tmp_path, *start, "--adapter-rank", 4, "--freeze", "encoder.*")
    assert "--freeze" in both and "other weights are frozen" in both
    for name, pairs in (("train", 50), ("valid", 5)):
        write_corpus(tmp_path / name, pairs, 99)
    other = ["-s", "xx", "-t", "yy", "--trainpref", tmp_path / "train", "--validpref", tmp_path / "valid"]
    other += ["--vocab-size", 300, "--destdir", tmp_path / "other"]
    main(["preprocess", *map(str, other)], standalone_mode=False)
    said = refusal(tmp_path / "other", tmp_path / "run", *start, "--adapter-rank", 4)
    assert f"preprocess with --tokenizer-from {base}" in said
    train(domain_data, tmp_path / "adapters", *start, "--adapter-rank", 4)
    adapted = tmp_path / "adapters/last.pt"
    said = refusal(domain_data, tmp_path / "run", "--finetune-from", adapted, "--adapter-rank", 4)
    assert "holds adapters; " in said
    train(
        domain_data, tmp_path / "full", "--finetune-from", adapted, "--max-update", 1
    )  # all weights, from the merged model model


def test_adapters_of_a_model_that_lacks_a_part_of_the_base_are_refused(tmp_path: Path) -> None:
    """The merged model would have the part, which the settings of the run do not describe."""
    tokenizer = tiny_tokenizer()
    path = save_tiny_transformer(tmp_path / "base.pt", tokenizer, output_bias=True)
    model, run = tiny_transformer(building.vocabulary_of(tokenizer)), RunConfig(adapter_rank=2, finetune_from=path)
    start_from(model, "transformer_tiny", model.config, tokenizer, path)
    with pytest.raises(ValueError, match=r"output_projection\.bias"):
        adapters_of(model, tokenizer, run, path)


@pytest.mark.slow
def test_each_subset_is_validated_and_one_of_them_is_followed(base: Path, domain_data: Path, tmp_path: Path) -> None:
    subsets = ["--valid-subset", "valid,valid1", "--metrics", "bleu,accuracy", "--validate-interval-updates", 2]
    start = ["--finetune-from", base, "--max-update", 4, "--lr", 1e-9, *subsets]
    train(domain_data, tmp_path / "both", *start, "--best-checkpoint-metric", "accuracy@valid1")
    alone = [*start, "--valid-subset", "valid1"]
    train(domain_data, tmp_path / "alone", *alone, "--best-checkpoint-metric", "accuracy")
    both, one = log_records(tmp_path / "both", "valid")[0], log_records(tmp_path / "alone", "valid")[0]
    for name in ("loss", "ppl", "bleu", "accuracy"):
        assert both[f"{name}@valid1"] == pytest.approx(one[name], rel=1e-6)
    assert both["loss"] != both["loss@valid1"]
    saved = checkpoint_file.read(tmp_path / "both/last.pt")
    assert saved["training"]["objective"] == ["accuracy@valid1", True]
    assert {"bleu", "bleu@valid1", "accuracy@valid1"} <= set(saved["maximized"])
    assert "loss@valid1 by update" in (tmp_path / "both/report.html").read_text()


@pytest.mark.slow
def test_patience_follows_the_subset_that_is_named(base: Path, domain_data: Path, tmp_path: Path) -> None:
    more = ["--finetune-from", base, "--valid-subset", "valid,valid1", "--validate-interval-updates", 1]
    more += ["--patience", 2, "--max-update", 300, "--lr", 0.5, "--best-checkpoint-metric", "loss@valid1"]
    assert "no better loss@valid1 in" in train(domain_data, tmp_path, *more)
    losses = [record["loss@valid1"] for record in log_records(tmp_path, "valid")]
    assert min(losses) == losses[-3]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--valid-subset", "valid,valid"], "each subset once"),
        (["--valid-subset", "valid,valid7"], "valid7"),
        (["--best-checkpoint-metric", "loss@valid1"], "or loss@SUBSET with"),
        (["--valid-subset", "valid,valid1", "--best-checkpoint-metric", "loss@other"], "loss@valid1"),
        (
            ["--valid-subset", "valid,valid1", "--best-checkpoint-metric", "odd@valid1"],
            "odd@valid1:min",
        ),
    ],
)
def test_a_wrong_subset_is_named(domain_data: Path, tmp_path: Path, more: list[str], message: str) -> None:
    assert message in refusal(domain_data, tmp_path / "run", "--max-update", 1, *more)


def test_the_architecture_is_that_of_the_checkpoint_unless_one_is_named(
    base: Path, domain_data: Path, tmp_path: Path
) -> None:
    short = ["train", str(domain_data), "--finetune-from", str(base), "--device", "cpu", "--max-update", "1"]
    short += ["--metrics", "none", "--batch-tokens", "200", "--dropout", "0.3"]
    result = CliRunner().invoke(main, [*short, "--save-dir", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    tuned, before = checkpoint.load(tmp_path / "run/last.pt"), checkpoint.load(base)
    assert tuned["architecture"] == before["architecture"]
    assert tuned["config"] == before["config"] | {"dropout": 0.3}
    (tmp_path / "run.toml").write_text(f'[run]\nfinetune_from = "{base}"\nmax_update = 1\n')
    named = JobConfig.read(tmp_path / "run.toml", {"architecture": "transformer_big"})
    assert named.components["architecture"].config.d_model == 1024
    assert JobConfig.read(tmp_path / "run.toml").components["architecture"].config.d_model == 16
    wrong = CliRunner().invoke(main, ["train", str(domain_data), "--finetune-from", str(tmp_path / "absent.pt")])
    assert "absent.pt: no such file" in wrong.stderr


@pytest.mark.slow
def test_a_smaller_model_starts_with_the_parameters_that_fit(base: Path, mirror_data: Path, tmp_path: Path) -> None:
    shape = ["--decoder-self-attention", "ssru", "--d-ff", 20]
    shape += ["--max-update", 1, "--lr", 1e-30, "--lr-scheduler", "fixed"]
    assert "--finetune-partial" in refusal(mirror_data, tmp_path / "run", *shape, "--finetune-from", base)
    fresh = tmp_path / "fresh"
    train(mirror_data, fresh, *shape)
    said = train(mirror_data, tmp_path / "run", *shape, "--finetune-from", base, "--finetune-partial")
    old, new, start = (checkpoint.load(path)["model"] for path in (base, tmp_path / "run/last.pt", fresh / "last.pt"))
    fitting = {name for name in new if name in old and old[name].shape == new[name].shape}
    assert len(fitting) > 10 and len(set(new) - fitting) > 4
    for name in new:
        torch.testing.assert_close(new[name], old[name] if name in fitting else start[name], rtol=0, atol=1e-12)
    assert f"{len(fitting)} of {len(new)} parameters start" in said


def test_a_model_without_a_fitting_parameter_is_refused(base: Path, mirror_data: Path, tmp_path: Path) -> None:
    more = ["--finetune-from", base, "--finetune-partial", "--d-model", 24, "--d-ff", 20]
    assert "no parameter with a" in refusal(mirror_data, tmp_path / "run", *more)
    assert not (tmp_path / "run/last.pt").exists()
