"""Languages of imported models in documents and in the service: imports, and a fine-tuned checkpoint, by commands.

Small random models stand for large models. A document must have the translations of the same text as a line with the
languages of the pair; the other languages of a model give other translations.
"""

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from make_huggingface import FOLDER
from test_language_tokens import preprocessed

from nmtkit.cli import main

pytest.importorskip("safetensors")

# Codes of the languages, codes of another target language, and the number of plural forms of that language.
PAIRS = {
    "m2m_100": ("en", "de", "pl", 3),
    "nllb": ("eng_Latn", "deu_Latn", "zho_Hans", 1),
    "mbart_50": ("en_XX", "de_DE", "fr_XX", 2),
    "marian_languages": (None, "deu", "nld", 2),
}
TEXT = "All are equal"
DOCUMENTS = {
    "html": ("<p>{}</p>\n", "<p>(.*)</p>\n"),
    "srt": ("1\n00:00:01,000 --> 00:00:02,000\n{}\n", "1\n00:00:01,000 --> 00:00:02,000\n(.*)\n"),
    "vtt": ("WEBVTT\n\n00:01.000 --> 00:02.000\n{}\n", "WEBVTT\n\n00:01.000 --> 00:02.000\n(.*)\n"),
    "po": ('msgid "{}"\nmsgstr ""\n', '#, fuzzy\nmsgid "All are equal"\nmsgstr "(.*)"\n'),
    "xliff": (
        '<xliff version="1.2"><file><body><trans-unit id="1"><source>{}</source></trans-unit></body></file></xliff>',
        ".*<target [^>]*>(.*)</target></trans-unit></body></file></xliff>",
    ),
}


def run(*arguments: object, text: str | None = None) -> str:
    result = CliRunner().invoke(main, list(map(str, arguments)), input=text)
    assert result.exit_code == 0, result.output
    return result.stdout


def flags(name: str, target: str) -> list[str]:
    source = PAIRS[name][0]
    return [*([] if source is None else ["--source-lang", source]), "--target-lang", target]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("languages")
    for name in PAIRS:
        run("import", FOLDER / name, folder / f"{name}.pt", "--try", "")
    return {name: folder / f"{name}.pt" for name in PAIRS}


def generate(path: Path, text: str, *more: object) -> str:
    return run("generate", "--path", path, "--device", "cpu", "--max-len-a", 0, "--max-len-b", 4, *more, text=text)


def test_a_line_to_try_needs_a_target_language(tmp_path: Path) -> None:
    """The line of --try was not translated, and no message said so."""
    words = ["import", str(FOLDER / "m2m_100"), str(tmp_path / "a.pt"), "--try", TEXT]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and "without --target-lang" in " ".join(result.stderr.split())
    assert not (tmp_path / "a.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("format", DOCUMENTS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_document_is_translated_into_the_language_that_is_asked_for(
    models: dict[str, Path], name: str, format: str
) -> None:
    template, pattern = DOCUMENTS[format]
    found = []
    for target in PAIRS[name][1:3]:
        document = generate(models[name], template.format(TEXT), "--input-format", format, *flags(name, str(target)))
        match = re.fullmatch(pattern, document)
        assert match, document
        also = ["--markup", "html", *(["--protect-spans"] if format in ("po", "xliff") else [])]
        assert match[1] + "\n" == generate(models[name], f"{TEXT}\n", *flags(name, str(target)), *also)
        found.append(match[1])
    assert found[0] != found[1]


@pytest.mark.parametrize("name", PAIRS)
def test_a_catalogue_gets_the_plural_forms_of_the_target_language(models: dict[str, Path], name: str) -> None:
    _, german, other, forms = PAIRS[name]
    catalogue = 'msgid ""\nmsgstr ""\n\nmsgid "right"\nmsgid_plural "all"\nmsgstr[0] ""\nmsgstr[1] ""\n'
    for target, count in ((german, 2), (other, forms)):
        found = generate(models[name], catalogue, "--input-format", "po", *flags(name, str(target)))
        assert f"nplurals={count};" in found and found.count("\nmsgstr[") == count, found


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns an NLLB model after one update on files with the names text.en and text.de."""
    folder = tmp_path_factory.mktemp("fine-tuned")
    dataset = preprocessed("nllb", folder)
    more = ["--max-update", 1, "--lr", 1e-3, "--device", "cpu", "--metrics", "none", "--save-dir", folder / "run"]
    run("train", dataset.folder, "--finetune-from", folder / "model.pt", *more)
    return folder / "run/last.pt"


def test_inspect_shows_the_languages_of_a_fine_tuned_model(fine_tuned: Path) -> None:
    shown = " ".join(run("inspect", fine_tuned).split())
    assert f"nmtkit generate --path {fine_tuned} --source-lang eng_Latn --target-lang deu_Latn < source.txt" in shown


# --- the service ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(models: dict[str, Path], fine_tuned: Path) -> Iterator[Any]:
    for package in ("starlette", "uvicorn", "python_multipart", "pydantic"):
        pytest.importorskip(package)
    from serving_process import serving

    paths = {(name, str(target)): models[name] for name in PAIRS for target in PAIRS[name][1:3]}
    chosen = [f"{served_source(name)}-{target}={path}" for (name, target), path in paths.items() if name != "nllb"]
    arguments = [word for path in (*chosen, str(fine_tuned)) for word in ("--path", path)]
    with serving(
        fine_tuned.parent, *arguments, "--workers", "1", "--max-len-a", "0", "--max-len-b", "4", "--split-sentences"
    ) as server:
        yield server


def served_source(name: str) -> str:
    """Returns the source language of a served pair: any code, for a model that has target languages only."""
    return PAIRS[name][0] or "eng"


SERVED = [(name, target) for name in PAIRS for target in PAIRS[name][1:3] if (name, target) != ("nllb", "zho_Hans")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), SERVED, ids="-".join)
def test_the_service_translates_texts_and_documents_into_the_language_of_the_pair(
    models: dict[str, Path], fine_tuned: Path, server: Any, name: str, target: str
) -> None:
    path, pair = fine_tuned if name == "nllb" else models[name], {"source": served_source(name), "target": target}
    expected = generate(path, f"{TEXT}\n", *flags(name, target)).rstrip("\n")
    assert server.ask("/translate", {"q": TEXT, **pair}) == (200, {"translatedText": expected})
    page = f"<p>{TEXT}</p>\n"
    assert server.translate(page, format="html", **pair) == generate(
        path, page, "--input-format", "html", *flags(name, target)
    )
    body = b"".join(
        f'--x\r\nContent-Disposition: form-data; name="{field}"{extra}\r\n\r\n{value}\r\n'.encode()
        for field, extra, value in (
            ("file", '; filename="a.srt"', DOCUMENTS["srt"][0].format(TEXT)),
            *((field, "", value) for field, value in pair.items()),
        )
    )
    status, answer = server.ask(
        "/translate_file", body + b"--x--\r\n", {"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert status == 200, answer
    with urllib.request.urlopen(answer["translatedFileUrl"]) as file:
        assert file.read().decode() == DOCUMENTS["srt"][0].format(expected)
