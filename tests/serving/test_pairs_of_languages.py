"""Names, lists and detection of languages with the codes of models of many languages."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner

pytest.importorskip("starlette")
pytest.importorskip("python_multipart")
pytest.importorskip("pydantic")
pytest.importorskip("prometheus_client")

from nmtkit.cli import main
from nmtkit.serving.content_translator import ContentTranslator
from nmtkit.serving.door import Door
from nmtkit.serving.languages import Detector, deepl_code, deepl_target_codes, described, served_code_for_deepl
from nmtkit.serving.loading import ServedModel, through_pivot
from nmtkit.serving.pool import Pool
from nmtkit.serving.reading import PlainText, TextThreads
from nmtkit.text.languages import name_of
from nmtkit.translation.options import TextOptions
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import Translator

ITALIAN = "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti."


@pytest.mark.parametrize(
    ("code", "name"),
    [("en", "English"), ("eng_Latn", "English (eng_Latn)"), ("pt-BR", "Portuguese (pt-BR)"), ("qaa", "qaa")],
)
def test_codes_have_names_that_differ(code: str, name: str) -> None:
    assert name_of(code) == name


def test_a_message_lists_a_few_pairs_and_the_languages_of_many() -> None:
    codes = ["da", "de", "en", "it", "pl"]
    pairs = [(source, target) for source in codes for target in codes if source != target]
    assert described(pairs[:2]) == "da to de, da to en"
    assert described([*pairs, ("fr", "en")]) == "21 pairs of da, de, en, fr, it, pl"


@pytest.mark.slow
@pytest.mark.parametrize("codes", [("eng_Latn", "ita_Latn"), ("en_XX", "it_IT"), ("en", "it")])
def test_a_language_is_detected_under_the_code_of_the_model(codes: tuple[str, str]) -> None:
    pytest.importorskip("py3langid")
    best, other = Detector(codes).detect([ITALIAN])
    assert best[0] == codes[1] and best[1] > 90 and other[0] == codes[0]


@pytest.mark.parametrize(
    ("pairs", "target", "chosen"),
    [
        ([("en", "pt_BR"), ("de", "en"), ("pt_PT", "en")], "en", "pt_PT"),  # only the other code is a source
        ([("en", "pt_BR"), ("en", "pt_PT")], "pt_PT", "pt_PT"),  # the text is in the target language
        ([("en", "pt_BR"), ("en", "pt_PT")], "pt_BR", "pt_BR"),
        ([("pt_BR", "pt_PT"), ("en", "pt_PT")], "pt_PT", "pt_BR"),  # a model translates between both
    ],
)
def test_a_detected_language_has_the_code_of_the_pair(pairs: list[tuple[str, str]], target: str, chosen: str) -> None:
    """The detector knows languages without regions, so a Portuguese text was read as pt_BR, and then as German."""
    pytest.importorskip("py3langid")
    door = cast(Door, SimpleNamespace(threads=TextThreads()))
    translator = ContentTranslator(door, cast(Pool, SimpleNamespace(pairs=pairs)))
    text = PlainText("Todos os seres humanos nascem livres e iguais em dignidade e em direitos.")
    found, languages = asyncio.run(translator.pairs_of("auto", target, [text]))
    assert found == [(chosen, target)]
    assert languages is not None and languages[0]["confidence"] > 90


def test_options_of_the_target_language_belong_to_the_second_step_of_a_pivot() -> None:
    later = {"diverse_groups": 3, "replace_unknown": True, "unkpen": 1.0}  # the options of `generate --pivot` too
    search = SearchOptions(beam=3, logits_processors=("lm_fusion",), **later)
    translator = cast(Translator, SimpleNamespace(directions=frozenset()))
    models = {pair: ServedModel(translator, search, TextOptions()) for pair in (("it", "en"), ("en", "de"))}
    both = through_pivot(models, "en")["it", "de"]
    assert both.search == search and both.first is not None
    assert both.first.search == SearchOptions(beam=3)
    assert models["it", "en"].search == search, "the direct translation into en has the processors"


@pytest.mark.parametrize(
    ("engines", "shown"), [(("numba", "numba"), "numba"), (("torch (bf16)", "numba"), "torch (bf16), then numba")]
)
def test_a_pivot_has_the_engines_of_both_steps(engines: tuple[str, str], shown: str) -> None:
    models = {}
    for pair, engine in zip((("it", "en"), ("en", "de")), engines, strict=True):
        decoder = SimpleNamespace(choice=lambda options, engine=engine: engine)
        translator = cast(Translator, SimpleNamespace(directions=frozenset(), decoder=decoder))
        models[pair] = ServedModel(translator, SearchOptions(), TextOptions())
    assert through_pivot(models, "en")["it", "de"].engine == shown
    assert [model.engine for model in models.values()] == [*engines]


def test_a_pivot_and_a_glossary_are_refused(tmp_path: Path) -> None:
    (terms := tmp_path / "terms.tsv").write_text("dog\tHund\n")
    flags = ["--path", "it-en=a.pt", "--path", "en-de=b.pt", "--pivot", "en", "--glossary", str(terms)]
    result = CliRunner().invoke(main, ["serve", *flags])
    assert result.exit_code == 2 and "--pivot and --glossary" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("code", "served", "found"),
    [
        ("EN-US", ["de", "en"], "en"),
        ("EN", ["en_GB", "en_US"], "en_GB"),
        ("EN-US", ["en_GB", "en_US"], "en_US"),
        ("EN-US", ["en_GB"], None),
        ("PT-BR", ["pt_PT", "pt"], "pt"),
        ("pt-br", ["pt", "pt_BR"], "pt_BR"),
        ("ZH-HANS", ["zh"], "zh"),
        ("ZH-HANT", ["zh_CN", "zh_TW"], "zh_TW"),
        ("ZH", ["zho_Hant", "zho_Hans"], "zho_Hans"),
        ("ZH-HANT", ["zho_Hans"], None),
        ("EN-GB", ["eng_Latn"], "eng_Latn"),
        ("NB", ["no"], "no"),
        ("NB", ["nob_Latn"], "nob_Latn"),
        ("ES-419", ["es"], "es"),
        ("SR", ["srp_Cyrl"], "srp_Cyrl"),
        ("IT", ["en", "de"], None),
    ],
)
def test_a_code_of_deepl_selects_a_served_language(code: str, served: list[str], found: str | None) -> None:
    assert served_code_for_deepl(code, served) == found


@pytest.mark.parametrize(
    "served", [["en", "pt"], ["eng_Latn", "zho_Hans", "zho_Hant"], ["pt_BR", "pt_PT"], ["no", "sr_Latn"], ["en_US"]]
)
def test_every_listed_code_selects_its_language(served: list[str]) -> None:
    for code in served:
        for shown in (deepl_code(code, served), *deepl_target_codes(code, served)):
            assert served_code_for_deepl(shown, served) == code
        assert not {"EN", "PT"} & set(deepl_target_codes(code, served))  # DeepL's client refuses these targets
