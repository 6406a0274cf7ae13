"""Imported models of fairseq give the log probabilities, translations and scores of fairseq.

fairseq/ has small models that fairseq trained, and their translations; make_fairseq.py makes the files. If FAIRSEQ
names a Python with the package, models are trained and compared live on more lines: lines of Multi30k if MULTI30K names
its folder.
"""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_fairseq
import pytest
import torch
from click.testing import CliRunner
from make_fairseq import FOLDER, LANGUAGES, LONGEST, SEARCHES
from make_huggingface import real_lines

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.tokenizer import BOS
from nmtkit.models.building import from_checkpoint
from nmtkit.models.formats import detect, fairseq, pickles
from nmtkit.translation.translator import Translator


def imported(folder: Path, temporary: Path) -> Translator:
    path = temporary / "imported.pt"
    checkpoint_file.save(path, detect.load(folder))
    model, tokenizer = from_checkpoint(path)
    return Translator([model], tokenizer)


def compare(translator: Translator, results: list[dict[str, Any]]) -> int:
    """Returns the number of equal beam searches. fairseq ends with the fourth hypothesis, and may miss the best: our
    hypothesis must be the same or have a higher probability."""
    same = 0
    for result in results:
        source, target = result["languages"]
        lines, longest = result["lines"], LONGEST
        options = {"lenpen": 0.0, "unkpen": 0.0, "keep_loops": True, "max_len_a": 0.0, "max_len_b": longest}
        options |= {"source_lang": source, "target_lang": target}
        for name, beam in SEARCHES.items():
            found = translator.translate([line["source"] for line in lines], beam=beam, **options)
            for translation, line in zip(found, lines, strict=True):
                (best,), expected = translation.hypotheses, line[name]
                if name == "greedy" or best.pieces == expected["pieces"]:
                    assert best.pieces == expected["pieces"], line["source"]
                    assert best.log_probability == pytest.approx(expected["score"], rel=1e-5, abs=2e-4)
                    same += name == "beam"
                else:
                    assert best.log_probability > expected["score"]
        for line in lines[:2]:
            compare_log_probabilities(translator, line, source, target)
    return same


def compare_log_probabilities(
    translator: Translator, line: dict[str, Any], source: str | None, target: str | None
) -> None:
    (model,), tokenizer = translator.models, translator.tokenizer
    ids = {piece: id for id, piece in enumerate(tokenizer.target_pieces(range(tokenizer.target_size)))}
    before, _ = tokenizer.language_ids(source, target)
    text = [*before, *tokenizer.encode_source([line["source"]]).ids.tolist()]
    start = [BOS, *(ids[piece] for piece in line["prefix"])]
    with torch.inference_mode():
        features = model(Packed.from_lists([text], "cpu"), Packed.from_lists([start], "cpu"))
        ours = model.output_projection(features).log_softmax(-1)
    theirs = {piece: values for piece, values in line["log_probabilities"].items() if piece != "<s>" and piece in ids}
    assert len(theirs) == len(line["log_probabilities"]) - 1
    expected = torch.tensor(list(theirs.values())).T
    assert torch.allclose(ours[:, [ids[piece] for piece in theirs]], expected, atol=1e-4)


@pytest.mark.parametrize("kind", LANGUAGES)
def test_an_imported_model_computes_and_translates_as_fairseq_did(kind: str, tmp_path: Path) -> None:
    results = json.loads((FOLDER / kind / "expected.json").read_text())
    lines = sum(len(result["lines"]) for result in results)
    assert compare(imported(FOLDER / kind, tmp_path), results) >= 0.6 * lines


@pytest.mark.parametrize("kind", LANGUAGES)
def test_models_that_fairseq_trains_translate_as_it_does(kind: str, tmp_path: Path) -> None:
    python = os.environ.get("FAIRSEQ") or pytest.skip("FAIRSEQ names no Python")
    command = [python, make_fairseq.__file__, kind, str(tmp_path / "model")]
    made = subprocess.run(command, input="\n".join(real_lines(200)), stdout=subprocess.PIPE, text=True, check=True)
    results = json.loads(made.stdout.splitlines()[-1])
    lines = sum(len(result["lines"]) for result in results)
    same = compare(imported(tmp_path / "model", tmp_path), results)
    print(f"{kind}: {same} of {lines} beam searches found the same")
    assert same >= 0.9 * lines


# --- models that are refused ------------------------------------------------------------------------------------------


def refused(source: Path) -> str:
    """Returns the single line of error of `nmtkit import`, which must not write a file."""
    target = source.parent / "model.out"
    result = CliRunner().invoke(main, ["import", str(source), str(target)], prog_name="nmtkit")
    assert result.exit_code != 0 and not target.exists()
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def state_of(folder: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([Namespace]):
        contents: dict[str, Any] = torch.load(folder / "checkpoint_best.pt", weights_only=True)
    return contents


def change(folder: Path, weights: dict[str, Any] | None = None, **settings: Any) -> None:
    """Changes settings or weights of a checkpoint. None removes a weight."""
    state = state_of(folder)
    (state["args"] or state["cfg"]["model"]).__dict__.update(settings)
    state["model"].update(weights or {})
    state["model"] = {name: tensor for name, tensor in state["model"].items() if tensor is not None}
    torch.save(state, folder / "checkpoint_best.pt")


def without(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def append_word(folder: Path, word: str = "extra", languages: tuple[str, ...] = ("en", "de")) -> None:
    for language in languages:
        with (folder / f"dict.{language}.txt").open("a") as file:
            file.write(f"{word} 1\n")


FC1 = "decoder.layers.0.fc1.bias"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda folder: os.truncate(folder / "checkpoint_best.pt", 40_000), "is damaged or incomplete"),
    "no checkpoint": (lambda folder: without(folder, "checkpoint_best.pt"), "does not contain a checkpoint"),
    "no pickle": (lambda folder: (folder / "checkpoint_best.pt").write_text("text"), "is damaged or incomplete"),
    "no dict": (lambda folder: change(folder, source_lang="fr"), "dict.fr.txt: no such file"),
    "no dict at all": (lambda folder: without(folder, "dict.en.txt", "dict.de.txt"), "dict.SRC.txt: no such file"),
    "nmtkit's": (
        lambda folder: torch.save({"nmtkit": 2}, folder / "checkpoint_best.pt"),
        "is already a checkpoint of nmtkit",
    ),
    "other dict": (append_word, "entries, but the encoder embeddings have 1"),
    "dictionaries differ": (lambda folder: append_word(folder, languages=("de",)), "the decoder embeddings have 1"),
    "dict without counts": (lambda folder: (folder / "dict.en.txt").write_text("a\n"), "dict.en.txt, line 1: 'a'"),
    "no tokenizer": (lambda folder: without(folder, "sentencepiece.bpe.model"), "does not hold a SentencePiece model"),
    "damaged tokenizer": (
        lambda folder: (folder / "sentencepiece.bpe.model").write_bytes(b"\x01\x02"),
        "not a Sentence",
    ),
    "codes": (
        lambda folder: (folder / "sentencepiece.bpe.model").rename(folder / "bpecodes"),
        "bpecodes belongs to fastBPE or subword-nmt",
    ),
    "two tokenizers": (lambda folder: (folder / "b.model").write_bytes(b""), "b.model, sentencepiece.bpe.model; keep"),
    "NaN": (lambda folder: change(folder, {FC1: torch.full((48,), torch.nan)}), "not finite"),
    "missing weights": (lambda folder: change(folder, {FC1: None}), f"has no weights {FC1}"),
    "more weights": (lambda folder: change(folder, {"adapter.weight": torch.ones(2)}), "has weights adapter.weight"),
    "more layers": (lambda folder: change(folder, decoder_layers=2), "decoder.layers.1"),
    "no layers": (lambda folder: change(folder, decoder_layers=0), "--decoder-layers is 0"),
    "wrong width": (lambda folder: change(folder, encoder_ffn_embed_dim=64, decoder_ffn_embed_dim=64), "do not match"),
    "not tied": (
        lambda folder: change(folder, {"decoder.output_projection.weight": torch.ones(160, 32)}),
        "share_decoder_input_output_embed, but different weights",
    ),
    "architecture": (lambda folder: change(folder, arch="fconv_iwslt_de_en"), "arch 'fconv_iwslt_de_en'"),
    "no architecture": (lambda folder: torch.save({"model": {}}, folder / "checkpoint_best.pt"), "neither args nor"),
    "task": (lambda folder: change(folder, task="denoising"), "task 'denoising'"),
    "two widths": (lambda folder: change(folder, decoder_embed_dim=16), "decoder_embed_dim 16"),
    "two norms": (lambda folder: change(folder, encoder_normalize_before=True), "encoder_normalize_before True, dec"),
    "activation": (lambda folder: change(folder, activation_fn="gelu_accurate"), "activation_fn 'gelu_accurate'"),
    "adaptive softmax": (lambda folder: change(folder, adaptive_softmax_cutoff="9"), "has adaptive_softmax_cutoff 9"),
    "cross self": (lambda folder: change(folder, cross_self_attention=True), "has cross_self_attention True"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_what_cannot_be_imported_is_refused_in_one_line(
    damage: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    shutil.copytree(FOLDER / "shared", folder)
    damage(folder)
    assert said in refused(folder)


class Hostile:
    """An object whose pickle calls a function when it is loaded without restrictions."""

    def __init__(self, call: Callable[..., Any], argument: str) -> None:
        self.reduced = call, (argument,)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("name", [f"{os.system.__module__}.system", "eval"])
def test_a_pickle_that_would_run_code_is_refused_by_the_name_of_what_it_calls(
    name: str, zipped: bool, tmp_path: Path
) -> None:
    folder, proof = tmp_path / "shared", tmp_path / "proof"
    shutil.copytree(FOLDER / "shared", folder)
    hostile = Hostile(os.system, f"touch {proof}")
    if name == "eval":
        hostile = Hostile(eval, f"__import__('pathlib').Path({str(proof)!r}).touch()")
    path = folder / "checkpoint_best.pt"
    torch.save(state_of(folder) | {"extra_state": hostile}, path, _use_new_zipfile_serialization=zipped)
    said = refused(folder)
    assert f"needs {name}, " in said and not proof.exists()
    torch.load(path, weights_only=False)
    assert proof.exists()  # it would have


def test_settings_of_omegaconf_are_read_without_it(tmp_path: Path) -> None:
    path = FOLDER / "tied" / "checkpoint_best.pt"
    assert "omegaconf.dictconfig.DictConfig" in torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    contents = pickles.load(path)
    settings = pickles.to_plain(contents["cfg"])
    assert settings["task"]["_name"] == "translation" and settings["model"]["decoder_layerdrop"] == 0.1
    assert settings["common"]["seed"] == 1 and settings["optimization"]["lr"] == [0.005]
    assert not any(name.partition(".")[0] in ("omegaconf", "fairseq") for name in sys.modules)


def test_settings_that_a_checkpoint_lacks_are_those_of_its_architecture(tmp_path: Path) -> None:
    given = {"share_all_embeddings": True, "encoder_layers": 2}
    for arch, width, inner, heads, dropout, pre_norm in (
        ("transformer", 512, 2048, 8, 0.1, False),
        ("transformer_iwslt_de_en", 512, 1024, 4, 0.1, False),
        ("transformer_vaswani_wmt_en_fr_big", 1024, 4096, 16, 0.1, False),
        ("transformer_wmt_en_de_big", 1024, 4096, 16, 0.3, False),
        ("transformer_wmt_en_de_big_t2t", 1024, 4096, 16, 0.3, True),
    ):
        settings = fairseq.settings_of({"args": {"arch": arch, **given}}, tmp_path)
        config = fairseq.config_of(settings, joint=True)
        assert (config.d_model, config.d_ff, config.heads) == (width, inner, heads)
        assert (config.dropout, config.pre_norm) == (dropout, pre_norm)
        assert (config.encoder_layers, config.decoder_layers) == (2, 6)


def test_weights_of_older_releases_have_other_names(tmp_path: Path) -> None:
    folder = tmp_path / "separate"
    shutil.copytree(FOLDER / "separate", folder)
    expected = detect.load(folder)["model"]
    state = state_of(folder)
    weights = state["model"]
    old: dict[str, Any] = {"decoder.embed_out": weights.pop("decoder.output_projection.weight")}
    for stack, attention in (("encoder", "self_attn"), ("decoder", "self_attn"), ("decoder", "encoder_attn")):
        layer = f"{stack}.layers.0"
        for kind in ("weight", "bias"):
            parts = [weights.pop(f"{layer}.{attention}.{part}_proj.{kind}") for part in "qkv"]
            old[f"{layer}.{attention}.in_proj_{kind}"] = torch.cat(parts)
    for stack, norms in (("encoder", "self_attn final"), ("decoder", "self_attn encoder_attn final")):
        for index, norm in enumerate(norms.split()):
            for kind in ("weight", "bias"):
                name = f"{stack}.layers.0.layer_norms.{index}.{kind}"
                old[name] = weights.pop(f"{stack}.layers.0.{norm}_layer_norm.{kind}")
    torch.save(state | {"model": weights | old}, folder / "checkpoint_best.pt")
    found = detect.load(folder)["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_which_dictionary_is_the_sources_must_be_known(tmp_path: Path) -> None:
    folder = tmp_path / "separate"
    shutil.copytree(FOLDER / "separate", folder)
    change(folder, source_lang=None, target_lang=None, data="data-bin")
    assert "contains dict.de.txt, dict.en.txt" in refused(folder)
    for name, language in (("source", "en"), ("target", "de")):
        (folder / f"dict.{language}.txt").rename(folder / f"dict.{name}.txt")
        (folder / f"spm.{language}.model").rename(folder / f"spm.{name}.model")
    assert len(detect.load(folder)["model"])
    (folder / "spm.source.model").rename(folder / "other.model")
    assert "SentencePiece models other.model, spm.target.model" in refused(folder)


def test_import_says_what_it_found_and_translates_a_line(tmp_path: Path) -> None:
    arguments = ["--try", "All are equal.", "--source-lang", "en", "--target-lang", "de"]
    result = CliRunner().invoke(main, ["import", str(FOLDER / "languages"), str(tmp_path / "model.pt"), *arguments])
    assert result.exit_code == 0, result.output
    assert "1 encoder and 1 decoder" in result.stderr
    assert "2 languages (de, en)" in result.stderr and "All are equal. → " in result.stderr


def test_tokens_of_languages_stand_where_the_model_has_them(tmp_path: Path) -> None:
    folder = tmp_path / "languages"
    shutil.copytree(FOLDER / "languages", folder)
    change(folder, encoder_langtok="tgt", decoder_langtok=False)
    tokenizer = imported(folder, tmp_path).tokenizer
    assert list(tokenizer.languages) == ["de", "en"]
    assert tokenizer.language_ids(None, "de") == ([tokenizer.languages["de"]], [])
    change(folder, encoder_langtok=None, decoder_langtok=True)
    assert "(None, 'tgt')" in refused(folder)
