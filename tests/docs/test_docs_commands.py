"""The shell commands of docs/models.md, docs/fine-tuning.md and docs/multilingual.md, typed for tiny models.

Tiny models have the names of the pages: opus-mt-en-de is a bilingual Marian model of transformers, and
nllb-200-distilled-600M a model of many languages. Only `train` and
`generate` get more flags, so that a command takes a second.
"""

import re
import shlex
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from builders import REAL_LINES
from click.testing import CliRunner
from digits import digit_rows, write_digits

from nmtkit.cli import main
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.demo.run import read_corpus

pytest.importorskip("safetensors")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/models/formats/huggingface"  # models that transformers saved
SHORT = "--max-update 2 --device cpu --precision fp32 --metrics none --save-interval-updates 1"
TINY = "--d-model 16 --d-ff 32 --heads 2 --encoder-layers 1 --decoder-layers 1"
# Languages that the commands for one pair of languages need with a model of many languages.
LANGUAGES = {
    "preprocess": ["--source-language-token", "eng_Latn", "--target-language-token", "deu_Latn"],
    "generate": ["--source-lang", "eng_Latn", "--target-lang", "deu_Latn"],
}


def blocks(page: str) -> list[list[str]]:
    """Returns the nmtkit commands of a page, block by block."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = [block.replace("\\\n", " ") for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    return [[line for line in block.splitlines() if line.startswith("nmtkit ")] for block in found]


def typed(line: str, multilingual: bool) -> str:
    """Runs a command as a shell does, with < and >. Returns the messages on stderr."""
    words = shlex.split(line, comments=True)
    files = {sign: Path(words.pop(words.index(sign) + 1)) for sign in "<>" if sign in words}
    words = [word for word in words[1:] if word not in files]
    if multilingual and "nllb.pt" not in words and "--source-lang" not in words and "opus-mt-en-de" not in words:
        words += LANGUAGES.get(words[0], [])
    if words[0] == "train":
        words += shlex.split(SHORT) + (shlex.split(TINY) if "--arch" in words else [])
    if words[0] == "generate":
        words += ["--max-len-a", "0", "--max-len-b", "4"]
    text = files["<"].read_text(encoding="utf-8") if "<" in files else None
    result = CliRunner().invoke(main, words, input=text)
    assert result.exit_code == 0, f"{line}\n{result.output}"
    if ">" in files:
        files[">"].write_text(result.stdout, encoding="utf-8")
    if words[0] == "generate" and "--output" not in words:
        assert result.stdout.count("\n") == len(REAL_LINES)
    return result.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FOLDER / "marian", "opus-mt-en-de")
    shutil.copytree(FOLDER / "nllb", "nllb-200-distilled-600M")
    Path("data").mkdir()
    for language in ("en", "de"):
        for name in ("raw", "domain.train", "domain.val", "general.val", "data/train", "data/val"):
            Path(f"{name}.{language}").write_text("".join(f"{line}\n" for line in REAL_LINES))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("multilingual", [False, True], ids=["bilingual", "multilingual"])
def test_the_commands_of_the_page_about_fine_tuning(folder: Path, multilingual: bool) -> None:
    first, smaller, imported, languages, new_language, adapters = blocks("fine-tuning.md")
    # on the page, averaged.pt is the model of the user; here it is an imported model
    typed(f"nmtkit import {'nllb-200-distilled-600M' if multilingual else 'opus-mt-en-de'} averaged.pt", False)
    for line in first:
        typed(line, multilingual)
    for line in smaller:
        typed(line, multilingual)
    for line in adapters:
        typed(line, multilingual)
    shutil.rmtree("domain-bin")
    shutil.rmtree("adapters")
    if multilingual:
        shutil.rmtree("tuned")
        for line in languages:
            typed(line, True)
        shutil.copytree(FOLDER / "m2m_100", "m2m_100")
        typed("nmtkit import m2m_100 many.pt", False)
        for name in ("train", "val"):
            write_digits(Path(name), digit_rows(30, 5), ("en", "fr"))
            Path(f"{name}.fr").rename(f"{name}.qq")
        for line in new_language:  # the tiny model has Polish, but no Czech
            for name, other in (("pl", "qq"), ("cs", "de"), ("4000", "5")):
                line = re.sub(rf"\b{name}\b", other, line)
            typed(line, False)
    else:
        for line in imported:
            typed(line, False)


@pytest.mark.slow
@pytest.mark.parametrize("multilingual", [False, True], ids=["bilingual", "multilingual"])
def test_the_commands_of_the_page_about_models(folder: Path, multilingual: bool) -> None:
    # the commands with names of the Hub need the server of tests/models/formats/test_hub_models.py
    _, imports, languages, _, huggingface, m2m, marian, argos, browsers, others = blocks("models.md")
    if multilingual:
        typed("nmtkit import nllb-200-distilled-600M nllb.pt", True)
        for line in languages:
            typed(line, True)
        typed("nmtkit train data-bin --finetune-from nllb.pt --save-dir checkpoints", True)
        typed("nmtkit average-checkpoints checkpoints --best 1 --output averaged.pt", True)
        typed("nmtkit generate --path averaged.pt < raw.en > translated.de", True)
        result = CliRunner().invoke(main, shlex.split(huggingface[0])[1:])
        assert result.exit_code == 2 and "M2M100ForConditionalGeneration needs" in result.stderr, result.output
        shutil.copytree(FOLDER / "m2m_100", "m2m_100")
        typed("nmtkit import m2m_100 m2m100.pt", False)
        typed("nmtkit preprocess -s en -t de --trainpref data/train --validpref data/val --destdir tuned-bin "
              "--tokenizer-from m2m100.pt --source-language-token en --target-language-token de", False)  # fmt: skip
        for line in m2m:
            typed(line, False)
        typed("nmtkit import tuned-m2m100 again.pt", False)
        return
    for line in imports:
        typed(line, False)
    typed("nmtkit preprocess -s en -t de --trainpref data/train --validpref data/val --destdir data-bin "
          "--tokenizer-from en-de.pt", False)  # fmt: skip
    train, export = marian
    typed(train, False)
    typed("nmtkit average-checkpoints checkpoints --last 2 --output averaged.pt", False)
    typed(export, False)
    assert {"model.npz", "decoder.yml"} <= {path.name for path in Path("en-de-marian").iterdir()}
    typed("nmtkit preprocess -s en -t de --trainpref data/train --validpref data/val --destdir student-bin "
          "--vocab-size 400", False)  # fmt: skip
    shutil.copy("data/val.en", "valid.en")
    train, export = browsers
    sizes = "--d-model 64 --d-ff 64 --heads 2 --encoder-layers 1 --decoder-layers 1"  # multiples of 64
    command = shlex.split(f"{train.replace('data-bin', 'student-bin')} {SHORT} {sizes}")[1:]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    typed(export, False)
    plain = f"train student-bin --arch transformer_tiny --save-dir plain {SHORT} {sizes}"
    assert CliRunner().invoke(main, shlex.split(plain)).exit_code == 0
    typed(argos[0].replace("averaged.pt", "plain"), False)  # the tokenizer of averaged.pt has two SentencePiece models
    assert Path("en_de.argosmodel").is_file()
    assert {"vocab.spm", "lex.s2t.bin", "config.yml"} <= {path.name for path in Path("en-de-bergamot").iterdir()}
    shutil.copy("en-de.pt", "averaged.pt")  # transformers has the positions of this model
    for line in (*huggingface, *others):
        typed(line, False)
    typed("nmtkit import en-de again.pt", False)
    typed("nmtkit generate --path again.pt < raw.en > again.de", False)
    typed("nmtkit generate --path averaged.pt < raw.en > averaged.de", False)
    assert Path("again.de").read_text() == Path("averaged.de").read_text()


def test_the_commands_from_an_opus_download_to_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs all three commands, for German instead of Italian, in a folder that has only the archive."""
    monkeypatch.chdir(tmp_path)
    rows = read_corpus()["train"][:3500]
    with zipfile.ZipFile("en-de.txt.zip", "w") as archive:  # the members of an archive of OPUS
        for index, language in enumerate(("de", "en")):
            text = "".join(f"{row[1 - index]}\n" for row in rows)
            archive.writestr(f"Books.en-de.{language}", text)
        archive.writestr("Books.en-de.xml", "<linkGrp />\n")
        for name in ("README", "LICENSE"):
            archive.writestr(name, "Corpus Name: Books\n")
    page = (ROOT / "docs/corpora.md").read_text(encoding="utf-8")
    section = page[page.index("## From an OPUS download") :]
    block = section[section.index("```sh\n") + 6 : section.index("\n```\n")]
    commands = re.sub(r"\bit\b", "de", block).splitlines()
    assert len(commands) == 3 and "Three commands" in section[: section.index("```sh")]
    for command in commands:
        if command.startswith("nmtkit "):
            small = " --vocab-size 800" if "preprocess" in command else " --filters empty,length,language --workers 1"
            typed(command + small, False)
        else:
            subprocess.run(["sh", "-c", command], check=True)
    kept = Path("clean.tsv").read_text().splitlines()[1:]
    assert len(kept) > 3000 and Path("cleaning.html").exists()
    sizes = [Dataset.open(Path("data-bin"))[subset] for subset in ("train", "valid", "test")]
    assert [len(split) for split in sizes] == [len(kept) - 2000, 1000, 1000]
    assert sizes[2].source_lines() == [line.split("\t")[0] for line in kept[1000:2000]]


@pytest.mark.slow
def test_the_commands_of_the_page_about_many_languages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name, count, languages in (
        ("en-de", 40, "en de"),
        ("en-it", 30, "en it"),
        ("val", 4, "en de it"),
        ("test", 4, "en de it"),
    ):
        write_digits(Path("data") / name, digit_rows(count, len(name)), tuple(languages.split()))
    Path("raw.en").write_text("".join(f"{line}\n" for line in REAL_LINES))
    page = (ROOT / "docs/multilingual.md").read_text(encoding="utf-8")
    (toml,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    Path("corpora.toml").write_text(toml)
    (prepare, train, *use), (generate,), imported, pivot, denoise, extend = blocks("multilingual.md")
    typed(f"{prepare} --vocab-size 300", False)
    typed(train, False)
    for line in use:
        typed(line.replace("--last 5", "--last 2"), False)
    assert len(Path("test.out").read_text().splitlines()) == 4 * 6
    typed(generate, False)
    for language in ("it", "de"):
        shutil.copy(f"data/test.{language}", f"test.{language}")
    for line in pivot:
        typed(line, False)
    shutil.copytree(FOLDER / "m2m_100", "facebook/m2m100_418M")  # here a folder, on the page a name of the Hub
    for line in imported:
        typed(line.replace("hf:", ""), False)
    shutil.rmtree("tuned-bin")
    shutil.rmtree("tuned")
    Path("mono.toml").write_text('[[corpus]]\nlanguages = ["it"]\ntrain = "data/en-it"\n')
    # The tokenizer needs the tokens of the languages in corpora.toml.
    for language in ("en", "de"):
        with Path("mono.toml").open("a") as file:
            file.write(f'[[corpus]]\nlanguages = ["{language}"]\ntrain = "data/en-de"\n')
    for line in denoise:
        typed(line.replace("--vocab-size 16000", "--vocab-size 300"), False)
    write_digits(Path("data/en-fr"), digit_rows(30, 5), ("en", "fr"))
    Path("more.toml").write_text(toml + '\n[[corpus]]\nlanguages = ["en", "fr"]\ntrain = "data/en-fr"\n')
    for line in extend:
        typed(line.replace("--extend-tokenizer 4000", "--extend-tokenizer 5"), False)
