"""The command `nmtkit shortlist`, and the flag `--shortlist` of `generate`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders import save_tiny_transformer, tiny_tokenizer
from click.testing import CliRunner, Result

import nmtkit
from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.models import checkpoint
from nmtkit.translation.search.options import SearchOptions


def run(*arguments: object, input: str | None = None) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], input=input)


@pytest.fixture(scope="module")
def model(mirror_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shortlist") / "a.pt"
    return save_tiny_transformer(path, Dataset.open(mirror_data).tokenizer, sharpness=4.0)


@pytest.fixture
def path(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(model, tmp_path))


@pytest.mark.slow
def test_lists_are_added_to_the_checkpoint_and_limit_translations(path: Path, mirror_data: Path) -> None:
    before = checkpoint.load(path)
    result = run("shortlist", mirror_data, "--path", path, "--entries", 2, "--frequent", 3)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "3 target pieces" in said and "valid: the lists have" in said
    assert said.partition("next: ")[2].split()[1:5] == ["generate", "--path", str(path), "--shortlist"]
    after = checkpoint.load(path)
    assert set(after) - set(before) == {"shortlist"} and checkpoint_file.fingerprint(
        after
    ) == checkpoint_file.fingerprint(before)

    assert f"{len(after['shortlist']['targets']):,} entries, for --shortlist" in run("inspect", path, "--all").stdout

    text = "bado kelu\nmiro sate vonu\n"
    generated = run(
        "generate", "--device", "cpu", "--path", path, "--shortlist", "--format", "jsonl", "--nbest", 4, input=text
    )
    assert generated.exit_code == 0, generated.output
    lists = after["shortlist"]
    ends = lists["lengths"].cumsum(0).tolist()
    tokenizer = Dataset.open(mirror_data).tokenizer
    for line, source in zip(generated.stdout.splitlines(), text.splitlines(), strict=True):
        ids = {0, 1, 2} | set(lists["frequent"].tolist())
        for piece in tokenizer.encode_source([source]).ids.tolist():
            ids |= set(lists["targets"][ends[piece] - int(lists["lengths"][piece]) : ends[piece]].tolist())
        allowed = set(tokenizer.target_pieces(sorted(ids)))
        assert all(set(hypothesis["pieces"]) <= allowed for hypothesis in json.loads(line)["hypotheses"])
    free = run("generate", "--device", "cpu", "--path", path, input=text).stdout
    assert free != "".join(
        json.loads(line)["hypotheses"][0]["text"] + "\n" for line in generated.stdout.splitlines()
    )  # the lists are short, and the weights random
    python = nmtkit.load(path).translate(text.splitlines(), shortlist=True)
    assert python == [json.loads(line)["hypotheses"][0]["text"] for line in generated.stdout.splitlines()]


@pytest.mark.parametrize("name", ["lex.s2t", "lex.bin"])
def test_a_written_lexicon_gives_the_same_lists(name: str, path: Path, mirror_data: Path) -> None:
    lexicon, other = path.parent / name, path.parent / "other.pt"
    result = run("shortlist", mirror_data, "--path", path, "--entries", 5, "--write-lexicon", lexicon)
    assert result.exit_code == 0, result.output
    data = () if name == "lex.bin" else (mirror_data,)  # a text file has no frequent pieces
    again = run("shortlist", *data, "--lexicon", lexicon, "--path", path, "--output", other)
    assert again.exit_code == 0, again.output
    one, two = checkpoint.load(path)["shortlist"], checkpoint.load(other)["shortlist"]
    if name == "lex.s2t":
        assert all((one[part] == two[part]).all() for part in one)
    else:  # frequent pieces are in the list of eos
        begin = int(two["lengths"][:2].sum())
        assert set(one["frequent"].tolist()) <= set(two["targets"][begin : begin + int(two["lengths"][2])].tolist())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path", "a.pt"], "--lexicon FILE"),
        (["{data}", "--path", "a.pt", "--vocab", "x.spm"], "--vocab needs --lexicon"),
        (["{data}", "--path", "a.pt", "--subset", "nothing"], "nothing"),
        (["{data}", "--path", "other.pt"], "other.pt have different tokenizers"),
        (["--path", "a.pt", "--lexicon", "text", "--vocab", "x.spm"], "leave out --vocab"),
        (["--path", "a.pt", "--lexicon", "text"], "text, line 1: "),
    ],
    ids=["no_data", "vocab", "subset", "tokenizer", "vocab_of_text", "text"],
)
def test_mistakes_are_told(
    arguments: list[str], message: str, path: Path, mirror_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    save_tiny_transformer(Path("other.pt"), tiny_tokenizer())
    Path("text").write_text("no lexicon\n")
    Path("x.spm").touch()
    before = path.read_bytes()
    result = run("shortlist", *(argument.format(data=mirror_data) for argument in arguments))
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
    assert path.read_bytes() == before


def test_the_next_command_names_the_plug_ins_of_the_checkpoint(path: Path, mirror_data: Path) -> None:
    checkpoint_file.save(path, checkpoint_file.read(path) | {"plugins": ["my model.py"]})
    said = " ".join(run("shortlist", mirror_data, "--path", path).stderr.split())
    assert "--plugin 'my model.py' --shortlist" in said


def test_generate_tells_that_a_checkpoint_has_no_shortlist(path: Path) -> None:
    result = run("generate", "--device", "cpu", "--path", path, "--shortlist", input="bado\n")
    assert result.exit_code == 2
    message = f"{path} has no shortlist; add one with nmtkit shortlist DATA"
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"logits_processors": ("x",)}, "need all target pieces"),
        ({"score_reference": True}, "there is no search"),
    ],
    ids=["processors", "references"],
)
def test_a_shortlist_excludes_options_that_need_all_pieces(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchOptions(shortlist=True, **other)
