"""Commands that need a translation model refuse a language model before they do any work."""

from pathlib import Path

import pytest
from builders import save_tiny_transformer, save_transformer, tiny_tokenizer
from click.testing import CliRunner

import nmtkit
from nmtkit.cleaning.dual_cross_entropy import DualCrossEntropy
from nmtkit.cli import main
from nmtkit.data.dataset.binarized import Dataset

USE = "{lm} is a language model, which reads no source; give a translation model. A language model is for nmtkit score"
COMMANDS = {
    "generate": ["generate", "--path", "{lm}"],
    "an ensemble": ["generate", "--path", "{model}", "--path", "{lm}"],
    "the first step of a pivot": ["generate", "--path", "{many}", "--pivot-path", "{lm}", "--pivot", "en",
                                  "--source-lang", "it", "--target-lang", "de"],
    "shards": ["generate", "--path", "{lm}", "--input", "{text}", "--output-dir", "{folder}/shards"],
    "serve": ["serve", "--path", "en-de={lm}", "--port", "0", "--device", "cpu"],
    "distill": ["distill", "{data}", "--path", "{of data}"],
    "a teacher": ["train", "{data}", "--arch", "transformer_tiny", "--criterion", "kd_cross_entropy", "--teacher",
                  "{of data}", "--device", "cpu", "--save-dir", "{folder}/run"],
    "attention": ["attention", "--path", "{lm}", "A dog.", "--output", "{folder}/page.html"],
    "shortlist": ["shortlist", "{data}", "--path", "{of data}"],
    "clean": ["clean", "-s", "en", "-t", "de", "{text}", "--output", "{folder}/o.tsv", "--forward", "{model}",
              "--backward", "{lm}"],
}  # fmt: skip


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory, mirror_data: Path) -> dict[str, str]:
    """Returns the paths that the names in `COMMANDS` stand for."""
    folder, tokenizer = tmp_path_factory.mktemp("kinds"), tiny_tokenizer()
    of_data = Dataset.open(mirror_data).tokenizer
    (folder / "text.tsv").write_text("a dog\tein Hund\n")
    paths = {
        "folder": folder,
        "text": folder / "text.tsv",
        "data": mirror_data,
        "model": save_tiny_transformer(folder / "model.pt", tokenizer),
        "lm": save_tiny_transformer(folder / "lm.pt", tokenizer, encoder_layers=0),
        "of data": save_tiny_transformer(folder / "of_data.pt", of_data, encoder_layers=0),
        "many": save_transformer(folder / "many.pt", languages=("en", "it", "de")),
    }
    return {name: str(path) for name, path in paths.items()}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_language_model_does_not_translate(arguments: list[str], names: dict[str, str]) -> None:
    if arguments[0] == "serve":
        pytest.importorskip("starlette")
    files = set(Path(names["folder"]).iterdir())
    result = CliRunner().invoke(main, [word.format(**names) for word in arguments], input="a dog\n")
    lm = names["of data" if "{of data}" in arguments else "lm"]
    assert result.exit_code == 2, result.output
    assert USE.format(lm=lm) in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert {path for path in Path(names["folder"]).iterdir() if path.name != "run"} == files


def test_a_language_model_does_not_translate_in_python(names: dict[str, str]) -> None:
    model = nmtkit.load(names["lm"])
    with pytest.raises(ValueError, match="is a language model"):
        model.translate("a dog")
    assert model.score("", "a dog") < 0


def test_clean_names_the_languages_of_a_multilingual_model(names: dict[str, str]) -> None:
    many = Path(names["many"])
    scorer = DualCrossEntropy(many, many, ("it", "de"))
    scorer.fit([], [])
    model = nmtkit.load(many)
    texts = ["all human beings"], ["free"]
    forward, backward = (
        -model.score(one[0], other[0], source_lang=codes[0], target_lang=codes[1]) / len(pieces)
        for one, other, codes, pieces in (
            (*texts, ("it", "de"), model.score(*texts, per_piece=True, source_lang="it", target_lang="de")[0]),
            (
                *texts[::-1],
                ("de", "it"),
                model.score(*texts[::-1], per_piece=True, source_lang="de", target_lang="it")[0],
            ),
        )
    )
    expected = 2.718281828459045 ** -(abs(forward - backward) + (forward + backward) / 2)
    assert scorer.score(*texts) == pytest.approx([expected], rel=1e-4)


def test_clean_needs_languages_that_a_multilingual_model_has(names: dict[str, str]) -> None:
    flags = ["--forward", names["many"], "--backward", names["many"], "--output", f"{names['folder']}/o.tsv"]
    result = CliRunner().invoke(main, ["clean", "-s", "eng", "-t", "de", names["text"], *flags])
    assert result.exit_code == 2
    message = "many.pt is a model of several languages and does not know eng; give --source-lang and --target-lang as"
    assert message in " ".join(result.stderr.split())
