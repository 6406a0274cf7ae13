"""Imported models of transformers give the log probabilities and translations of the originals.

huggingface/ has small models and their translations by transformers; make_huggingface.py makes the files. If the
package is installed, more lines are compared live: lines of Multi30k if MULTI30K names its folder.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from make_huggingface import FOLDER, LANGUAGES, LINES, LONGEST, Original, real_lines

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.packed import Packed
from nmtkit.data.tokenizers.spm_model import pieces_of
from nmtkit.data.tokenizers.tokenizer import BOS
from nmtkit.models import checkpoint
from nmtkit.models.building import from_checkpoint, tokenizer_of
from nmtkit.models.formats import huggingface
from nmtkit.translation.search.types import Request
from nmtkit.translation.translator import Translator

Languages = tuple[str | None, str | None]

pytest.importorskip("safetensors")


def imported(name: str, folder: Path, source: Path = FOLDER) -> Translator:
    path = folder / f"{name}.pt"
    checkpoint_file.save(path, huggingface.load(source / name))
    model, tokenizer = from_checkpoint(path)
    return Translator([model], tokenizer)


# in the search of transformers, <unk> is a piece like others
def compare(
    translator: Translator, expected: list[dict[str, Any]], languages: Languages, longest: int = LONGEST
) -> None:
    source, target = languages
    given = {
        "lenpen": 0,
        "unkpen": 0,
        "keep_loops": True,
        "max_len_a": 0,
        "max_len_b": longest,
        "source_lang": source,
        "target_lang": target,
    }
    for name, beam in (("greedy", 1), ("beam", 4)):
        lines = [line for line in expected if line[name] is not None]
        for found, line in zip(
            translator.translate([it["source"] for it in lines], beam=beam, **given), lines, strict=True
        ):
            (best,) = found.hypotheses
            assert best.pieces == line[name]["pieces"], line["source"]
            assert best.log_probability == pytest.approx(line[name]["score"], rel=1e-5, abs=2e-4)


def compare_nbest(
    translator: Translator, expected: list[dict[str, Any]], languages: Languages, longest: int = LONGEST
) -> int:
    """Compares the n-best lists in which every hypothesis ended by itself. Returns the number of these lists."""
    source, target = languages
    lines = [line for line in expected if line["nbest"] is not None]
    options = {"lenpen": 0.0, "unkpen": 0.0, "keep_loops": True, "max_len_a": 0.0, "max_len_b": longest}
    options |= {"source_lang": source, "target_lang": target, "beam": 4, "nbest": 4}
    found = translator.translate([line["source"] for line in lines], **options)
    for translation, line in zip(found, lines, strict=True):
        assert [it.pieces for it in translation.hypotheses] == [it["pieces"] for it in line["nbest"]], line["source"]
        scores = [it["score"] for it in line["nbest"]]
        assert [it.log_probability for it in translation.hypotheses] == pytest.approx(scores, rel=1e-5, abs=2e-4)
    return len(lines)


@pytest.mark.parametrize("name", LANGUAGES)
def test_an_imported_model_translates_as_the_original_did(name: str, tmp_path: Path) -> None:
    translator = imported(name, tmp_path)
    for found in json.loads((FOLDER / name / "expected.json").read_text()):
        compare(translator, found["lines"], found["languages"])
        compare_nbest(translator, found["lines"], found["languages"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "languages"), [(name, pair) for name, pairs in LANGUAGES.items() for pair in pairs], ids=str
)
def test_log_probabilities_and_translations_are_those_of_transformers(
    name: str, languages: Languages, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    shutil.copytree(FOLDER / name, tmp_path / name)
    original, lines = Original(tmp_path / name), real_lines(200)
    original.train(lines, *languages)
    original.model.save_pretrained(tmp_path / name)
    translator = imported(name, tmp_path, tmp_path)
    expected = original.expected(lines, *languages, longest=40)
    assert sum(line["beam"] is not None for line in expected) > 0.75 * len(lines)
    assert len({tuple(line["greedy"]["pieces"]) for line in expected}) > len(lines) // 5
    compare(translator, expected, languages, longest=40)
    assert compare_nbest(translator, expected, languages, longest=40) > 0.75 * len(lines)
    (model,), tokenizer = translator.models, translator.tokenizer
    before, begin = tokenizer.language_ids(*languages)
    ours_of = {piece: id for id, piece in enumerate(tokenizer.target_pieces(range(tokenizer.target_size)))}
    theirs_of = original.target_ids()
    shared = {piece: id for piece, id in theirs_of.items() if ours_of.get(piece, BOS) != BOS}
    known = torch.tensor([(id, ours_of[piece]) for piece, id in shared.items()])  # <s> is the first token in nmtkit
    assert len(known) >= len(theirs_of) - 5
    for line in expected[:20]:
        pieces = line["greedy"]["pieces"]
        forced = [] if languages[0] is None else [original.language_id(str(languages[1]))]
        start = [original.model.config.decoder_start_token_id, *forced]
        theirs = original.log_probabilities(line["source"], *languages, [*start, *(theirs_of[it] for it in pieces)])
        source = [*before, *tokenizer.encode_source([line["source"]]).ids.tolist()]
        target = [BOS, *begin, *(ours_of[piece] for piece in pieces)]
        with torch.inference_mode():
            features = model(Packed.from_lists([source], "cpu"), Packed.from_lists([target], "cpu"))
            ours = model.output_projection(features).log_softmax(-1)
        assert torch.allclose(ours[:, known[:, 1]], theirs[:, known[:, 0]], atol=1e-4)


# --- models that are refused ------------------------------------------------------------------------------------------


def refused(folder: Path, *arguments: str) -> str:
    """Returns the single line of error of `nmtkit import`, which must not write a file."""
    target = folder.parent / "model.pt"
    result = CliRunner().invoke(main, ["import", str(folder), str(target), *arguments], prog_name="nmtkit")
    assert result.exit_code != 0 and not target.exists()
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def change_settings(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in settings.items() if value != "left out"}))


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path) | changes
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, path)


def pickled(folder: Path, contents: Any) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(contents, folder / "pytorch_model.bin")


FC1 = "model.encoder.layers.0.fc1"
ROWS = json.loads((FOLDER / "marian/config.json").read_text())["vocab_size"]
DAMAGES: dict[str, tuple[Any, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "no tokenizer": (lambda folder: (folder / "source.spm").unlink(), "source.spm"),
    "no table": (lambda folder: (folder / "vocab.json").unlink(), "vocab.json"),
    "damaged tokenizer": (lambda folder: (folder / "target.spm").write_bytes(b"\x01\x02"), "target.spm"),
    "other type": (lambda folder: change_settings(folder, model_type="t5"), "'t5' is not supported"),
    "keys left out": (lambda folder: change_settings(folder, encoder_layers="left out"), "encoder_layers"),
    "two widths": (lambda folder: change_settings(folder, encoder_ffn_dim=7), "encoder_ffn_dim 7"),
    "wrong shape": (lambda folder: change_settings(folder, d_model=64), "do not match"),
    "more layers": (lambda folder: change_settings(folder, decoder_layers=3), "model.decoder.layers.2"),
    "activation": (lambda folder: change_settings(folder, activation_function="tanh"), "'tanh' is not supported"),
    "small vocabulary": (lambda folder: change_settings(folder, vocab_size=9, decoder_vocab_size=9), "vocab_size is 9"),
    "few rows": (lambda folder: change_weights(folder, **{"model.shared.weight": torch.zeros(5, 32)}), "5 rows"),
    "NaN": (
        lambda folder: change_weights(folder, **{f"{FC1}.bias": torch.full((48,), torch.nan)}),
        "not finite",
    ),
    "missing": (lambda folder: change_weights(folder, **{f"{FC1}.bias": None}), f"has no weights {FC1}.bias"),
    "more": (lambda folder: change_weights(folder, adapter=torch.ones(2)), "has weights adapter, which do not belong"),
    "not tied": (
        lambda folder: change_weights(folder, **{"lm_head.weight": torch.ones(ROWS, 32)}),
        "tie_word_embeddings, but different weights: model.shared.weight and lm_head.weight",
    ),
    "not shared": (
        lambda folder: change_weights(folder, **{"model.decoder.embed_tokens.weight": torch.ones(ROWS, 32)}),
        "share_encoder_decoder_embeddings, but different weights",
    ),
    "tied in the weights alone": (
        lambda folder: change_settings(folder, tie_word_embeddings=False),
        "has no weights lm_head.weight",
    ),
    "more rows": (
        lambda folder: change_weights(folder, **{"model.shared.weight": torch.zeros(ROWS + 1, 32)}),
        f"vocab_size is {ROWS}, but the embeddings have {ROWS + 1} rows",
    ),
    "truncated": (lambda folder: os.truncate(folder / "model.safetensors", 40_000), "model.safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors"),
    "code": (lambda folder: pickled(folder, {"a": print}), "needs print, which is not part of a model"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_folder_that_cannot_be_imported_is_refused_in_one_line(damage: Any, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "marian"
    shutil.copytree(FOLDER / "marian", folder)
    damage(folder)
    assert said in refused(folder)


def test_mbart_before_50_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mbart"
    shutil.copytree(FOLDER / "mbart_50", folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "MBartTokenizer"}')
    assert "mBART-50" in refused(folder)


def test_nllb_has_the_language_before_the_source_and_at_the_beginning_of_the_target(tmp_path: Path) -> None:
    tokenizer = imported("nllb", tmp_path).tokenizer
    assert len(tokenizer.languages) == 202
    before, begin = tokenizer.language_ids("deu_Latn", "fra_Latn")
    assert tokenizer.source_pieces(before) == ["deu_Latn"] and tokenizer.target_pieces(begin) == ["fra_Latn"]
    template = json.loads((FOLDER / "nllb/tokenizer.json").read_text())["post_processor"]["single"]
    kinds = [next(iter(part)) for part in template]  # the original has language, text, end
    assert kinds == ["SpecialToken", "Sequence", "SpecialToken"] and template[0]["SpecialToken"]["id"] == "eng_Latn"


def tokenizer_json(name: str) -> dict[str, Any]:
    """Returns the tokenizer.json of a fixture. mBART-50 was saved without the file, so it is made by hand."""
    if (FOLDER / name / "tokenizer.json").is_file():
        found: dict[str, Any] = json.loads((FOLDER / name / "tokenizer.json").read_text())
        return found
    names = json.loads((FOLDER / name / "special_tokens_map.json").read_text())["additional_special_tokens"]
    special = [["<s>", 0.0], ["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0]]
    pieces = pieces_of((FOLDER / name / "sentencepiece.bpe.model").read_bytes())[3:]
    vocabulary = [*special, *([it.text, it.score] for it in pieces), *([token, 0.0] for token in [*names, "<mask>"])]
    ids = {piece: id for id, (piece, _) in enumerate(vocabulary)}
    return {
        "model": {"type": "Unigram", "vocab": vocabulary, "unk_id": 3, "byte_fallback": False},
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        ]},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "added_tokens": [{"id": ids[token], "content": token} for token in ["<s>", "<pad>", *names, "<mask>"]],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["nllb", "mbart_50"])
def test_tokenizer_json_does_for_the_sentencepiece_model_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    expected = imported(name, tmp_path)
    folder = tmp_path / "folder"
    shutil.copytree(FOLDER / name, folder)
    (folder / "sentencepiece.bpe.model").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(name)))
    contents = huggingface.load(folder)
    assert all(
        torch.equal(contents["model"][key], it) for key, it in checkpoint.load(tmp_path / f"{name}.pt")["model"].items()
    )
    tokenizer = tokenizer_of(contents, folder)
    lines = [*LINES, "  two   spaces, and none at the end", "unknown: Ω ЖЖ Ω", "", "ab" * 40]
    ours, theirs = tokenizer.encode_source(lines), expected.tokenizer.encode_source(lines)
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert list(tokenizer.languages) == list(expected.tokenizer.languages)
    for part, value in (
        ("normalizer", {"type": "Lowercase"}),
        ("pre_tokenizer", {"type": "ByteLevel"}),
        ("model", {"type": "WordPiece", "vocab": {}}),
    ):
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(name) | {part: value}))
        assert "copy sentencepiece.bpe.model into" in refused(folder)


def test_a_language_after_the_source_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "nllb"
    shutil.copytree(FOLDER / "nllb", folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"legacy_behaviour": True}))
    assert "legacy_behaviour" in refused(folder)


def check_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_weights_may_lie_in_a_pickle_or_in_parts(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    expected = huggingface.load(FOLDER / "marian")["model"]
    weights = load_file(FOLDER / "marian/model.safetensors")
    folder = tmp_path / "pickle"
    shutil.copytree(FOLDER / "marian", folder)
    pickled(folder, weights)
    check_weights(huggingface.load(folder)["model"], expected)
    folder = tmp_path / "parts"
    shutil.copytree(FOLDER / "marian", folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / part)
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weights(huggingface.load(folder)["model"], expected)


# --- languages ------------------------------------------------------------------------------------------------------


def test_import_says_what_it_found_and_translates_a_line(tmp_path: Path) -> None:
    arguments = ["--try", "All are equal.", "--source-lang", "en", "--target-lang", "de"]
    result = CliRunner().invoke(main, ["import", str(FOLDER / "m2m_100"), str(tmp_path / "model.pt"), *arguments])
    assert result.exit_code == 0, result.output
    assert "1 encoder and 1 decoder" in result.stderr and "100 languages" in result.stderr
    assert "All are equal. → " in result.stderr


@pytest.mark.parametrize("codes", ["wmt21", "wmt20"])
def test_the_languages_of_a_tokenizer_are_those_of_its_language_codes(codes: str, tmp_path: Path) -> None:
    """The models of WMT 2021 are M2M-100 models with eight languages."""
    folder = tmp_path / "model"
    shutil.copytree(FOLDER / "m2m_100", folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"language_codes": codes}))
    (tmp_path / "again").mkdir()
    if codes == "wmt20":
        with pytest.raises(ValueError, match=r"language_codes 'wmt20' .*m2m100, wmt21"):
            huggingface.load(folder)
        return
    plain, other = imported("m2m_100", tmp_path), imported("model", tmp_path / "again", tmp_path)
    assert list(other.tokenizer.languages) == ["en", "ha", "is", "ja", "cs", "ru", "zh", "de"]
    # the eight tokens have the rows of the first eight tokens of M2M-100, af to br
    plain_rows, rows = (
        part.models[0].state_dict()["source_embedding.tokens.weight"][list(part.tokenizer.languages.values())]
        for part in (plain, other)
    )
    assert torch.equal(rows, plain_rows[:8])


@pytest.mark.parametrize(
    ("name", "given", "languages"),
    [
        ("marian", [], ""),
        ("marian_languages", [], " --target-lang deu"),
        ("marian_languages", ["--target-lang", "deu"], " --target-lang deu"),
        ("nllb", [], " --source-lang eng_Latn --target-lang deu_Latn"),
        ("mbart_50", ["--source-lang", "en_XX", "--target-lang", "de_DE"], " --source-lang en_XX --target-lang de_DE"),
    ],
)
def test_import_and_inspect_show_the_command_with_the_languages_that_the_model_needs(
    name: str, given: list[str], languages: str, tmp_path: Path
) -> None:
    model = tmp_path / "model.pt"
    result = CliRunner().invoke(main, ["import", str(FOLDER / name), str(model), *given])
    assert result.stderr.endswith(f"\nnext: nmtkit generate --path {model}{languages} < source.txt\n")
    known = None if given else languages
    shown = CliRunner().invoke(main, ["inspect", str(model)]).stdout
    assert known is None or f"nmtkit generate --path {model}{known} < source.txt" in " ".join(shown.split())


def test_languages_are_required_of_a_model_that_has_them_and_refused_by_others(tmp_path: Path) -> None:
    several, targets, none = (imported(name, tmp_path) for name in ("m2m_100", "marian_languages", "marian"))
    with pytest.raises(ValueError, match=r"--source-lang and --target-lang, .*af, am"):
        several.translate(["right"])
    with pytest.raises(ValueError, match=r"--target-lang xx: .*af, am"):
        several.translate(["right"], source_lang="en", target_lang="xx")
    with pytest.raises(ValueError, match=r"--target-lang, .*deu, nld"):
        targets.translate(["right"])
    with pytest.raises(ValueError, match="--source-lang has no effect"):
        targets.translate(["right"], source_lang="nld", target_lang="deu")
    with pytest.raises(ValueError, match="--target-lang"):
        none.translate(["right"], target_lang="deu")


def test_a_given_translation_scores_as_the_search_says(tmp_path: Path) -> None:
    translator = imported("mbart_50", tmp_path)
    languages = {"source_lang": "en_XX", "target_lang": "de_DE"}
    (found,) = translator.translate(["All are equal before the law."], lenpen=0, **languages)
    request = Request(found.source, reference=found.text)
    (scored,) = translator.translate([request], score_reference=True, lenpen=0, **languages)
    assert scored.text == found.text
    if scored.hypotheses[0].pieces == found.hypotheses[0].pieces:
        assert scored.hypotheses[0].score == pytest.approx(found.hypotheses[0].score, abs=1e-4)
