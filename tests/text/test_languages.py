import pytest

from nmtkit.data.corpora.corpus import locate
from nmtkit.text.languages import best_match, includes, is_right_to_left, same_language


@pytest.mark.parametrize(
    ("wanted", "code", "expected"),
    [
        ("en", "en-GB", True), ("en", "EN", True), ("en", "eng", True), ("en", "eng_Latn", True), ("deu", "de", True),
        ("zh-CN", "zh_CN", True), ("zh", "zh_CN", True), ("zh-TW", "zh-Hant-TW", True), ("en-GB", "en", False),
        ("en-GB", "en-US", False), ("en", "e", False), ("en", "enm", False), ("sr-Latn", "sr-Cyrl", False),
    ],
    ids=str,
)  # fmt: skip
def test_codes_match_as_in_bcp_47(wanted: str, code: str, expected: bool) -> None:
    assert includes(wanted, code) is expected


def test_a_language_of_a_macrolanguage_is_the_same_language() -> None:
    for first, second in (("nb", "no"), ("nob_Latn", "no"), ("cmn", "zh-TW"), ("arb_Arab", "ar"), ("en", "eng-GB")):
        assert same_language(first, second) and same_language(second, first)
    for first, second in (("nb", "nn"), ("cmn", "yue"), ("id", "ms"), ("en", "enm")):
        assert not same_language(first, second) and not same_language(second, first)


def test_the_script_of_a_code_decides_the_direction() -> None:
    """A web page that was translated into snd_Arab or pbt_Arab got no dir."""
    assert all(map(is_right_to_left, ("ar", "arb", "heb-IL", "fa_IR", "snd_Arab", "pbt_Arab", "azb_Arab", "uig_Arab")))
    assert not any(map(is_right_to_left, ("de", "deu_Latn", "kas_Deva", "ks-Deva", "zho_Hant", "sd_Deva_IN")))


def test_the_best_code_is_the_equal_one_then_the_more_special_then_the_more_general() -> None:
    assert best_match("en", ["en-GB", "EN", "de"]) == 1
    assert best_match("en", ["de", "en-GB", "en-US"]) == 1
    assert best_match("en-US", ["en-GB", "en"]) == 1
    assert best_match("en-US", ["en-GB", "de"]) is None


def test_a_prefix_finds_the_files_of_related_codes(tmp_path) -> None:
    for name in ("c.en-GB", "c.zh_CN.gz", "c.en-GB.bak", "c.tmx"):
        (tmp_path / name).write_bytes(b"\x1f\x8b\x08" if name.endswith("gz") else b"x\n")
    (tmp_path / "c.zh_CN.gz").unlink()
    (tmp_path / "c.zh_CN").write_text("y\n")
    corpus = locate(str(tmp_path / "c"), "en", "zh")
    assert (corpus.source.name, corpus.target.name) == ("c.en-GB", "c.zh_CN")
