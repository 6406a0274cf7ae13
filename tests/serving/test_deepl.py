"""DeepL's own client for Python, pointed at the service: the same translations as `generate`, and DeepL's errors."""

import json
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")
pytest.importorskip("pydantic")
pytest.importorskip("deepl")

import deepl
from builders import REAL_LINES, save_ending_transformer
from click.testing import CliRunner
from serving_process import Server, serving

import nmtkit
from nmtkit.cli import main
from nmtkit.translation.translator import Translator

pytestmark = pytest.mark.slow  # a server, and a client of another project
LINES = REAL_LINES[:4]
KEYS = "main\nother account=other\nagain account=other\nsmall characters=100/day\nslow requests=2/minute\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepl") / "model.pt"
    return save_ending_transformer(path, tags=["<formal>", "<informal>"])


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    plain = save_ending_transformer(model.parent / "plain.pt")
    (model.parent / "keys").write_text(KEYS)
    flags = ["--workers", "2", "--api-keys", str(model.parent / "keys"), "--char-limit", "3000", "--batch-limit", "50"]
    paths = [f"--path=en-de={model}", f"--path=en-pt_BR={plain}", f"--path=zh_Hans-en={plain}"]
    with serving(model.parent, *paths, *flags, "--state", str(model.parent / "state")) as server:
        yield server


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepl.http_client, "max_network_retries", 0)


def client_of(server: Server, key: str = "main") -> Any:
    return deepl.DeepLClient(key, server_url=server.url)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return client_of(server)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    translations = Translator.load(model).translate(LINES)
    return {line: translation.text for line, translation in zip(LINES, translations, strict=True)}


# --- texts ------------------------------------------------------------------------------------------------------------


def test_texts_have_the_translations_of_generate(client: Any, expected: dict[str, str]) -> None:
    one = client.translate_text(LINES[0], source_lang="EN", target_lang="DE")
    assert (one.text, one.detected_source_lang, one.billed_characters) == (expected[LINES[0]], "EN", len(LINES[0]))
    several = client.translate_text([*LINES, ""], source_lang="en", target_lang="de", context="ignored")
    assert [each.text for each in several] == [*(expected[line] for line in LINES), ""]
    pytest.importorskip("py3langid")
    english = '<a href="http://example.org/with-the-name-of-the-page/and-what-they-have-written-there-which-you-read">'
    german = f"{english}Alle sind frei geboren.</a>"
    assert client.translate_text(german, target_lang="DE", tag_handling="html").text == german
    detected = client.translate_text([LINES[0], LINES[1]], target_lang="DE")
    assert [(each.text, each.detected_source_lang) for each in detected] == [
        (expected[line], "EN") for line in LINES[:2]
    ]
    for preserved in (True, False):
        settings = {"preserve_formatting": preserved, "model_type": "quality_optimized"}
        assert (
            client.translate_text(LINES[1], source_lang="EN", target_lang="DE", **settings).text == expected[LINES[1]]
        )


def test_generate_and_the_clients_of_both_interfaces_agree(client: Any, server: Server, model: Path) -> None:
    generated = CliRunner().invoke(
        main, ["generate", "--path", str(model)], input="".join(f"{line}\n" for line in LINES)
    )
    assert generated.exit_code == 0, generated.output
    libretranslate = pytest.importorskip("libretranslatepy").LibreTranslateAPI(server.url, "main")
    assert [libretranslate.translate(line, "en", "de") for line in LINES] == generated.stdout.splitlines()
    answers = client.translate_text(LINES, source_lang="EN", target_lang="DE")
    assert [answer.text for answer in answers] == generated.stdout.splitlines()


def test_the_service_can_be_the_teacher_of_a_student(
    server: Server, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NMTKIT_SERVER_KEY", "main")
    (tmp_path / "a.en").write_text("".join(f"{line}\n" for line in LINES))
    flags = ["-s", "en", "-t", "de", "--from-server", server.url, "--server-api", "deepl"]
    result = CliRunner().invoke(
        main, ["distill", str(tmp_path / "a.en"), *flags, "--output-dir", str(tmp_path / "shards")]
    )
    assert result.exit_code == 0, result.output
    (shard,) = (tmp_path / "shards").glob("*.jsonl")
    assert [json.loads(line) for line in shard.read_text().splitlines()] == [
        {"en": line, "de": expected[line]} for line in LINES
    ]


def test_forms_and_json_say_the_same(server: Server, expected: dict[str, str]) -> None:
    form = urllib.parse.urlencode(
        [("text", LINES[0]), ("text", LINES[1]), ("source_lang", "EN"), ("target_lang", "DE")]
    )
    status, answer = server.ask("/v2/translate", form.encode(), {"Authorization": "DeepL-Auth-Key main"})
    assert status == 200
    texts = [{"detected_source_language": "EN", "text": expected[line]} for line in LINES[:2]]
    assert answer == {"translations": texts}


def test_line_ends_split_texts_unless_the_client_says_otherwise(client: Any, model: Path) -> None:
    text = f"{LINES[0]}\n{LINES[1]}"
    of_lines, of_whole = (
        [each.text for each in Translator.load(model).translate(texts)]
        for texts in (text.split("\n"), [text.replace("\n", " ")])
    )
    for split, expected in (("1", "\n".join(of_lines)), ("0", of_whole[0]), ("nonewlines", of_whole[0])):
        answer = client.translate_text(text, source_lang="EN", target_lang="DE", split_sentences=split)
        assert answer.text == expected


def test_formality_is_a_tag_where_the_model_has_tags(client: Any, model: Path, expected: dict[str, str]) -> None:
    with_tags = nmtkit.load(model)
    for formality, tag in (
        ("more", "<formal>"),
        ("less", "<informal>"),
        ("prefer_more", "<formal>"),
        ("default", None),
    ):
        (wanted,) = with_tags.translate([LINES[0]], source_tag=tag)
        answer = client.translate_text(LINES[0], source_lang="EN", target_lang="DE", formality=formality)
        assert answer.text == wanted
    (plain,) = nmtkit.load(model.parent / "plain.pt").translate([LINES[0]])
    answer = client.translate_text(LINES[0], source_lang="EN", target_lang="PT-BR", formality="prefer_less")
    assert answer.text == plain
    with pytest.raises(deepl.DeepLException, match="formality") as error:
        client.translate_text(LINES[0], source_lang="EN", target_lang="PT-BR", formality="more")
    assert error.value.http_status_code == 400


def test_html_is_translated_as_by_libretranslates_route(client: Any, server: Server) -> None:
    page = f"<p>{LINES[0]}</p><p>{LINES[1][:30]}<b>{LINES[1][30:]}</b></p><p>all <x>human beings</x> are born</p>"
    answer = client.translate_text(page, source_lang="EN", target_lang="DE", tag_handling="html")
    fields = {"q": page, "source": "en", "target": "de", "format": "html", "api_key": "main"}
    assert answer.text == server.ask("/translate", fields)[1]["translatedText"]
    kept = client.translate_text(page, source_lang="EN", target_lang="DE", tag_handling="html", ignore_tags="x")
    assert "<x>human beings</x>" in kept.text


def test_xml_keeps_its_tags_and_ignored_elements(client: Any, expected: dict[str, str]) -> None:
    text = f"<doc><title>{LINES[0]}</title><p>all human <id>beings 1</id> are</p></doc>"
    for tags in (["id"], "id,other"):
        answer = client.translate_text(text, source_lang="EN", target_lang="DE", tag_handling="xml", ignore_tags=tags)
        assert answer.text.startswith(f"<doc><title>{expected[LINES[0]]}</title><p>")
        assert answer.text.count("<id>beings 1</id>") == 1 and answer.text.endswith("</p></doc>")


# --- languages --------------------------------------------------------------------------------------------------------


def test_languages_have_deepls_codes(client: Any) -> None:
    sources = {language.code: language.name for language in client.get_source_languages()}
    assert sources == {"EN": "English", "ZH": "Chinese (zh_Hans)"}
    targets = {language.code: language.supports_formality for language in client.get_target_languages()}
    assert targets == {"DE": True, "EN-GB": False, "EN-US": False, "PT-BR": False}
    for target in targets:
        source = "ZH" if target.startswith("EN") else "EN"
        answer = client.translate_text(LINES[0], source_lang=source, target_lang=target)
        assert answer.detected_source_lang == source


# --- keys and quotas --------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_refused_on_every_route_before_the_body_is_read(server: Server) -> None:
    for key in ("wrong", "mai", "main "):
        with pytest.raises(deepl.AuthorizationException):
            client_of(server, key or " ").get_usage() if key != "main " else client_of(server, "main x").get_usage()
    for path in ("/v2/translate", "/v2/usage", "/v2/document", "/v2/glossaries", "/v3/glossaries"):
        status, answer = server.ask(path, b"not the fields", {"Authorization": "DeepL-Auth-Key wrong"})
        assert (status, list(answer)) == (403, ["message"])


def test_a_quota_of_characters_is_456_and_counts_only_translated_texts(server: Server) -> None:
    small = client_of(server, "small")
    text = LINES[0][:40]
    assert small.translate_text(text, source_lang="EN", target_lang="DE").billed_characters == 40
    with pytest.raises(deepl.DeepLException):
        small.translate_text(text, source_lang="EN", target_lang="JA")
    usage = small.get_usage().character
    assert (usage.count, usage.limit) == (40, 100)
    with pytest.raises(deepl.QuotaExceededException):
        small.translate_text([text, text], source_lang="EN", target_lang="DE")
    with pytest.raises(deepl.DeepLException) as too_large:
        small.translate_text([text] * 3, source_lang="EN", target_lang="DE")
    assert too_large.value.http_status_code == 413
    small.translate_text(text, source_lang="EN", target_lang="DE")
    fields = {"q": text, "source": "en", "target": "de", "api_key": "small"}
    assert server.ask("/translate", fields)[0] == 429  # LibreTranslate's status, with the same counts
    with pytest.raises(deepl.QuotaExceededException):
        small.translate_document_upload(text, source_lang="EN", target_lang="DE", filename="a.txt")
    assert small.get_usage().character.count == 80 and not small.get_usage().any_limit_reached


def test_too_many_requests_in_a_minute_are_429(server: Server) -> None:
    slow, statuses = client_of(server, "slow"), []
    for _ in range(5):  # a new minute may begin once between two requests
        try:
            slow.translate_text("a", source_lang="EN", target_lang="DE")
            statuses.append(200)
        except deepl.exceptions.TooManyRequestsException as error:
            statuses.append(error.http_status_code)
    assert statuses[:2] == [200, 200] and 429 in statuses
    assert slow.get_usage().character.limit == 10**12


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"text": ["a"]}, 400, "target_lang"),
        ({"text": 5, "target_lang": "DE"}, 400, "text"),
        ({"text": ["a"], "target_lang": "XX"}, 400, "target_lang"),
        ({"text": ["a"], "target_lang": "DE", "source_lang": "FR"}, 400, "source_lang"),
        ({"text": ["a"], "target_lang": "DE", "formality": "rude"}, 400, "formality"),
        ({"text": ["a"], "target_lang": "DE", "tag_handling": "pdf"}, 400, "tag_handling"),
        ({"text": ["a"], "target_lang": "DE", "ignore_tags": ["a"] * 2000}, 400, "ignore_tags"),
        ({"text": ["a"], "target_lang": "DE", "ignore_tags": "a," * 2000}, 400, "ignore_tags"),
        ({"text": ["a"], "target_lang": "DE", "ignore_tags": [5]}, 400, "ignore_tags"),
        ({"text": ["a"], "target_lang": "DE", "split_sentences": {}}, 400, "split_sentences"),
        ({"text": ["a"], "target_lang": "DE", "glossary_id": "x"}, 400, "source_lang"),
        ({"text": ["a"], "target_lang": "DE", "source_lang": "EN", "glossary_id": "../x"}, 404, "glossary"),
        ({"text": ["a"], "target_lang": "DE", "style_id": "x"}, 400, "style_id"),
        ({"text": ["a"] * 51, "target_lang": "DE"}, 413, "51"),
        ({"text": "a" * 3001, "target_lang": "DE"}, 413, "3001"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(server: Server, fields: dict[str, Any], status: int, named: str) -> None:
    got, answer = server.ask("/v2/translate", fields, {"Authorization": "DeepL-Auth-Key main"})
    assert (got, list(answer)) == (status, ["message"]) and named in answer["message"]


def test_other_paths_and_methods_have_deepls_errors(server: Server) -> None:
    assert server.ask("/v2/nothing") == (404, {"message": "Not Found"})
    assert server.ask("/v2/translate")[0] == 405 and list(server.ask("/v2/translate")[1]) == ["message"]
    assert list(server.ask("/nothing")[1]) == ["error"]


# --- glossaries -------------------------------------------------------------------------------------------------------


def test_terms_of_a_glossary_are_required(client: Any, model: Path, tmp_path: Path) -> None:
    entries = {"human": "brotherhood", "born": "freely|free"}
    made = client.create_glossary("terms", "EN", "DE", entries)
    assert (made.source_lang, made.target_lang, made.entry_count, made.ready) == ("EN", "DE", 2, True)
    assert client.get_glossary(made.glossary_id).name == "terms"
    assert client.get_glossary_entries(made) == entries
    (tmp_path / "terms").write_text("human\tbrotherhood\nborn\tfreely|free\n")
    (wanted,) = nmtkit.load(model).translate([LINES[0]], glossary=tmp_path / "terms")
    answer = client.translate_text(LINES[0], source_lang="EN", target_lang="DE", glossary=made)
    assert answer.text == wanted and "brotherhood" in wanted
    assert client.translate_text_with_glossary(LINES[0], made).text == wanted
    client.delete_glossary(made)
    with pytest.raises(deepl.GlossaryNotFoundException):
        client.get_glossary(made.glossary_id)
    with pytest.raises(deepl.DeepLException):
        client.translate_text(LINES[0], source_lang="EN", target_lang="DE", glossary=made.glossary_id)


def test_an_account_sees_its_own_glossaries(client: Any, server: Server) -> None:
    other, again = client_of(server, "other"), client_of(server, "again")
    made = other.create_glossary_from_csv("csv", "EN", "DE", 'human,"Mensch, der"\nborn,geboren,en,de\n')
    assert again.get_glossary_entries(made) == {"human": "Mensch, der", "born": "geboren"}
    assert [each.glossary_id for each in again.list_glossaries()] == [made.glossary_id]
    assert made.glossary_id not in [each.glossary_id for each in client.list_glossaries()]
    for call in (client.get_glossary, client.delete_glossary, client.get_glossary_entries):
        with pytest.raises(deepl.GlossaryNotFoundException):
            call(made.glossary_id)
    again.delete_glossary(made)
    assert other.list_glossaries() == []


@pytest.mark.parametrize("entries", ["", "one\n", "a\tb\tc\n", "a\tb\na\tc\n", "a\t\n", "a\tb|\n", "a\tb\x07\n"])
def test_wrong_terms_are_refused(server: Server, entries: str) -> None:
    fields = {"name": "x", "source_lang": "en", "target_lang": "de", "entries": entries, "entries_format": "tsv"}
    header = {"Authorization": "DeepL-Auth-Key main"}
    status, answer = server.ask("/v2/glossaries", fields, header)
    assert status == 400 and list(answer) == ["message"]
    assert server.ask("/v2/glossaries", {**fields, "entries": "a\tb", "target_lang": "ja"}, header)[0] == 400
    assert server.ask("/v2/glossaries", {**fields, "entries": "a\tb\n" * 1000}, header)[0] == 413


def test_a_glossary_of_several_languages_changes(client: Any) -> None:
    entries = deepl.api_data.MultilingualGlossaryDictionaryEntries
    assert {(pair.source_lang, pair.target_lang) for pair in client.get_glossary_languages()} == {
        ("en", "de"), ("en", "pt"), ("zh", "en"),
    }  # fmt: skip
    made = client.create_multilingual_glossary(
        "several", [entries("EN", "DE", {"human": "Mensch"}), entries("EN", "PT", {"human": "humano"})]
    )
    id = made.glossary_id
    for call in (client.get_glossary, client.delete_glossary, client.get_glossary_entries):
        with pytest.raises(deepl.GlossaryNotFoundException):
            call(id)
    assert {(each.target_lang, each.entry_count) for each in made.dictionaries} == {("DE", 1), ("PT", 1)}
    assert id not in [each.glossary_id for each in client.list_glossaries()]
    assert id in [each.glossary_id for each in client.list_multilingual_glossaries()]
    client.update_multilingual_glossary_dictionary(id, entries("EN", "DE", {"born": "geboren", "human": "menschlich"}))
    (dictionary,) = client.get_multilingual_glossary_entries(id, "EN", "DE").dictionaries
    assert dictionary.entries == "human\tmenschlich\nborn\tgeboren\n"
    client.replace_multilingual_glossary_dictionary(id, entries("EN", "DE", {"free": "frei"}))
    client.update_multilingual_glossary_name(id, "renamed")
    client.delete_multilingual_glossary_dictionary(id, source_lang="EN", target_lang="PT")
    shown = client.get_multilingual_glossary(id)
    assert shown.name == "renamed"
    assert [(each.target_lang, each.entry_count) for each in shown.dictionaries] == [("DE", 1)]
    client.delete_multilingual_glossary(id)
    with pytest.raises(deepl.DeepLException):
        client.get_multilingual_glossary(id)


# --- documents --------------------------------------------------------------------------------------------------------


def test_documents_are_translated_and_fetched_once(
    client: Any, server: Server, expected: dict[str, str], tmp_path: Path
) -> None:
    subtitles = "1\n00:00:01,000 --> 00:00:02,000\n{}\n\n2\n00:00:03,000 --> 00:00:04,000\n{}\n"
    (tmp_path / "a.srt").write_text(subtitles.format(*LINES[:2]))
    status = client.translate_document_from_filepath(
        tmp_path / "a.srt", tmp_path / "b.srt", source_lang="EN", target_lang="DE"
    )
    assert status.done and status.billed_characters == len(subtitles.format(*LINES[:2]))
    fields = {"source": "en", "target": "de", "q": LINES[:2], "api_key": "main"}
    assert (tmp_path / "b.srt").read_text().split("\n")[2] == server.ask("/translate", fields)[1]["translatedText"][0]
    handle = client.translate_document_upload(LINES[0], source_lang="EN", target_lang="DE", filename="a.txt")
    client.translate_document_wait_until_done(handle)
    with pytest.raises(deepl.DeepLException):
        client.translate_document_get_status(deepl.DocumentHandle(handle.document_id, "0" * 64))
    assert client.translate_document_download(handle).content.decode() == expected[LINES[0]]
    with pytest.raises(deepl.DeepLException):
        client.translate_document_get_status(handle)


@pytest.mark.parametrize(
    ("name", "content", "format", "status"),
    [
        ("a.docx", b"PK\x03\x04", None, 400),
        ("a.srt", b"1\n00:00:01,000 -> 00:00:02,000\nx\n", None, 400),
        ("a.txt", b"a", "pdf", 400),
        ("a.txt", b"a" * 3001, None, 413),
        ("a.txt", b"a\n" * 51, None, 413),
    ],
)
def test_documents_are_bounded_as_texts_are(
    client: Any, name: str, content: bytes, format: str | None, status: int
) -> None:
    with pytest.raises(deepl.DeepLException) as error:
        client.translate_document_upload(
            content, source_lang="EN", target_lang="DE", filename=name, output_format=format
        )
    assert error.value.http_status_code == status


# --- state ------------------------------------------------------------------------------------------------------------


def test_counts_and_glossaries_outlive_the_server(model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key characters=100/month\n")
    flags = ["--path", f"en-de={model}", "--workers", "1", "--state", str(tmp_path / "state")]
    flags += ["--api-keys", str(tmp_path / "keys")]
    with serving(tmp_path, *flags) as server:
        client = client_of(server, "key")
        glossary = client.create_glossary("kept", "EN", "DE", {"human": "Mensch"})
        client.translate_text("a" * 60, source_lang="EN", target_lang="DE")
        assert server.stop() == 0
    assert json.loads((tmp_path / "state" / "usage.json").read_text()).values()
    assert b"key" not in (tmp_path / "state" / "usage.json").read_bytes()
    with serving(tmp_path, *flags) as server:
        client = client_of(server, "key")
        assert client.get_usage().character.count == 60
        assert client.get_glossary_entries(client.list_glossaries()[0]) == {"human": "Mensch"}
        with pytest.raises(deepl.QuotaExceededException):
            client.translate_text("a" * 41, source_lang="EN", target_lang="DE", glossary=glossary)
        (tmp_path / "keys").write_text("key characters=200/month\n")  # noticed without a signal
        while client.get_usage().character.limit != 200:
            time.sleep(0.1)
        client.translate_text("a" * 41, source_lang="EN", target_lang="DE", glossary=glossary)
