"""Subtitles: sentences continue over lines and cues, and numbers, times, tags and notes stay."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standins import plain, upper

from nmtkit.text.documents import read_document

SRT = """\ufeff1
00:00:01,000 --> 00:00:02,500 X1:10
<i>I was going to say that we</i>

2
00:00:02,600 --> 00:00:04,000
<i>should have gone home, but
nobody ever listens to me.</i>

3
00:00:05,000 --> 00:00:06,000
{\\an8}- Who are you?
- I am <b>Bob</b>, the
builder & friend <3.

4
00:00:07,000 --> 00:00:08,000
♪ Hello, hello, ♪

5
00:00:18,100 --> 00:00:19,000
2020

with a blank
"""

VTT = """WEBVTT - a title
Kind: captions

NOTE
this is a note

STYLE
::cue { color: red }

REGION
id:fred

intro
00:01.000 --> 00:04.000 line:90% align:start
<v Mary>We saw &amp; heard<00:00:02.000> it all

01:00:05.000 --> 01:00:06.000
<v.loud Bob>No <c.red>way</c>!</v>
"""


def read(text: str, format: str = "srt"):
    return read_document(text.encode(), format, f"film.{format}")


def cues(*texts: str, gap: int = 0) -> str:
    """Returns cues of one second, `gap` seconds apart."""
    step = gap + 1
    return "\n".join(
        f"{number}\n00:00:{number * step:02},000 --> 00:00:{number * step + 1:02},000\n{text}\n"
        for number, text in enumerate(texts, 1)
    )


def test_a_sentence_may_span_lines_and_cues_of_one_speaker():
    assert read(SRT).segments == [
        "I was going to say that we should have gone home, but nobody ever listens to me.",
        "Who are you?",
        "I am <g1>Bob</g1>, the builder &amp; friend &lt;3.",
        "Hello, hello,",
        "with a blank",
    ]
    assert read(VTT, "vtt").segments == ["We saw &amp; heard<g1/> it all", "No <g1>way</g1>!"]


@pytest.mark.parametrize(("text", "format"), [(SRT, "srt"), (VTT, "vtt")])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_everything_except_the_words_stays(text, format, newline):
    text = text.replace("\n", newline)
    document = read(text, format)
    assert document.encoded(document.render(document.segments)) == text.encode()
    found = document.render([upper(segment) for segment in document.segments])
    assert found.replace("&AMP;", "&amp;").lower().split() == text.lower().lstrip("\ufeff").split()
    for line in text.split(newline):
        if "-->" in line or line.startswith(("::", "NOTE", "this is", "WEBVTT", "intro", "id:")) or line.isdecimal():
            assert line in found.split(newline)


def test_a_translation_is_divided_in_proportion_to_the_cues_and_after_punctuation():
    document = read(cues("The man who came yesterday,", "because he was asked to,", "left."))
    assert len(document.segments) == 1
    german = "Der Mann, der gestern gekommen ist, weil man ihn darum gebeten hat, ist gegangen."
    found = [line for line in document.render([german]).split("\n") if re.match("[A-Za-z]", line)]
    assert found == ["Der Mann, der gestern gekommen ist,", "weil man ihn darum gebeten hat,", "ist gegangen."]


def test_a_cue_keeps_its_number_of_lines_unless_they_are_too_wide():
    document = read(cues("One line.", "Two lines\nthat are one."))
    long = "Das ist eine Zeile, die nicht in zweiundvierzig Spalten passt."
    found = document.render([long, "Zwei Zeilen, die eine sind."])
    assert "\nDas ist eine Zeile, die nicht in\nzweiundvierzig Spalten passt.\n" in found
    assert "\nZwei Zeilen,\ndie eine sind.\n" in found


@pytest.mark.parametrize(
    ("before", "after", "gap", "together"),
    [
        ("I saw", "a dog.", 0, True),
        ("I saw, with", "John, a dog.", 0, False),
        ("I saw, with John,", "Mary.", 0, True),
        ("I saw.", "a dog.", 0, False),
        ("I saw?”", "a dog.", 0, False),
        ("I saw", "a dog.", 5, False),
        ("I saw", "- a dog.", 0, False),
        ("I <b>saw</b> it", "a dog.", 0, False),
        ("<i>I saw</i>", "<i>a dog.</i>", 0, True),
        ("他来了，", "我走了。", 0, True),
    ],
)
def test_cues_of_one_sentence_are_translated_together(before, after, gap, together):
    assert len(read(cues(before, after, gap=gap)).segments) == (1 if together else 2)


def test_chinese_is_joined_without_spaces_and_broken_without_them():
    document = read(cues("他昨天来到了\n这个城市。", "A man came to the city yesterday\nand left."))
    assert document.segments[0] == "他昨天来到了这个城市。"
    found = document.render(["He came.", "昨天有一个人来到了这个城市，然后又离开了。"])
    lines = [line for line in found.split("\n") if re.match(r"[\u4e00-\u9fff]", line)]
    assert "".join(lines) == "昨天有一个人来到了这个城市，然后又离开了。"
    assert len(lines) == 2 and not lines[1].startswith("，")


def test_no_word_is_lost_if_there_are_fewer_words_than_cues():
    assert read(cues("I saw", "a big", "dog.")).render(["Ja"]).count("Ja") == 1


def test_a_translation_cannot_make_a_cue():
    document = read("WEBVTT\n\n00:01.000 --> 00:02.000\nOne\n", "vtt")
    assert "00:03.000 --&gt; 00:04.000 &lt;b" in document.render(["00:03.000 --&gt; 00:04.000 &lt;b"])
    document = read(cues("One"))
    assert document.render(["00:00:03,000 --&gt; 00:00:04,000"]).count("-->") == 1


@pytest.mark.parametrize(
    ("text", "format", "message"),
    [
        ("Hello\n", "srt", r"film\.srt: .*no subtitle"),
        ("1\n00:00:01 -> 2\nHello\n", "srt", "line 2"),
        ("1\n00:00:01,000 --> soon\nHello\n", "srt", r"film\.srt: line 2: '00:00:01,000 --> soon'"),
        ("00:01.000 --> 00:02.000\nHello\n", "vtt", r"film\.vtt: line 1: .*WEBVTT"),
        ("WEBVTTX\n", "vtt", "line 1"),
    ],
)
def test_a_file_without_subtitles_is_refused_with_its_line(text, format, message):
    with pytest.raises(ValueError, match=message):
        read(text, format)


def test_bytes_of_an_unknown_encoding_are_refused_with_their_line():
    with pytest.raises(ValueError, match=r"film\.srt: line 3: byte 0xfc"):
        read_document(cues("Gr\xfcn").encode("latin-1"), "srt", "film.srt")
    utf16 = cues("Grün").encode("utf-16")
    document = read_document(utf16, "srt", "film.srt")
    assert document.encoded(document.render(["Łódź"])) == cues("Łódź").encode("utf-16")


LINES = st.sampled_from(
    ["one two", "Three.", "<i>four</i>", "<i>five", "six</i>", "- seven", "{\\an8}eight,", "♪ nine ♪", "10",
     "<b>a</b> b", "中文", "  ", "<v Bob>x", "a & b", "{y:i}z", "<font color='#f'>w</font>", "A --> B", "…and?"]
)  # fmt: skip
FILMS = st.lists(st.lists(LINES, min_size=1, max_size=4).map("\n".join), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(FILMS, st.sampled_from(["\n", "\r\n"]))
def test_any_film_keeps_its_times_and_codes_and_every_word_comes_once(texts, newline):
    text = cues(*texts).replace("\n", newline)
    document = read(text)
    assert document.render(document.segments) == text
    codes = r"<[^<>]*>|\{[^{}]*\}|♪|\d\d:\d\d:\d\d,\d+ --> \S+"
    found = document.render([upper(segment) for segment in document.segments])
    assert re.findall(codes, found) == re.findall(codes, text)
    said = [sorted("".join(re.sub(codes, " ", each).upper().split())) for each in (found, text)]
    assert said[0] == said[1]
    numbered = [re.sub(r"[^\W\d_]+", f"w{number}w", plain(segment)) for number, segment in enumerate(document.segments)]
    if not any("<" in segment for segment in document.segments):
        found = document.render(numbered_markup := [part.replace("&", "&amp;") for part in numbered])
        assert sorted(re.findall(r"w\d+w", found)) == sorted(re.findall(r"w\d+w", " ".join(numbered_markup)))


@pytest.mark.parametrize(
    "attack", [" " * 50_000, "-->" * 20_000, "00:00:01,000 -> " * 5_000, "<i>" * 20_000 + "x", "a\n" * 20_000,
               "{\\" * 20_000]
)  # fmt: skip
def test_hostile_subtitles_come_back_unchanged_in_linear_time(attack):
    text = cues(f"x{attack}")
    document = read(text)
    assert document.render(document.segments) == text
    document.render([upper(segment) for segment in document.segments])


def test_another_reader_of_subtitles_finds_the_same_cues():
    srt = pytest.importorskip("srt")
    document = read(SRT)
    found = document.render([upper(segment) for segment in document.segments])
    before, after = (list(srt.parse(text.lstrip("\ufeff"))) for text in (SRT, found))
    assert [(cue.index, cue.start, cue.end, cue.proprietary) for cue in after] == [
        (cue.index, cue.start, cue.end, cue.proprietary) for cue in before
    ]


@pytest.mark.parametrize(
    "times",
    [
        "00.00.03.000 --> 00.00.04.000", "-00:00:03,000 --> 00:00:04,000", "00:00:03,000 -> 00:00:04,000",
        "00:00:03,000 --> -00:00:04,000", "00:00:03,000 → 00:00:04,000", "00:00:03 --> 00:00:04",
        "x --> 00:00:04,000", "0:0:3,000 ==> 0:0:4,000",
    ],
)  # fmt: skip
def test_times_that_no_player_reads_are_refused_with_their_line(times):
    """Such a cue was once read as text of the cue before it."""
    with pytest.raises(ValueError, match="line 6"):
        read_document(f"1\n00:00:01,000 --> 00:00:02,000\nHi\n\n2\n{times}\nHo\n".encode(), "srt", "x.srt")


CLOCKS = ["00:00:03,000", "0:03.5", "00:00:03", "00.00.03.000", "-00:00:03,000", "00:00:03;12", "3.5",
          "00：00：03，000", "00: 00: 03, 000", "0h00m03s",
          "00:00:03'000", "03", "0:60:03,0000", "٠٠:٠٠:٠٣,٠٠٠"]  # fmt: skip
ARROWS = [" --> ", "-->", " -> ", " - > ", " -- > ", " → ", " ==> ", " --&gt; ", " – > ", " > ", " - ", " --->", " —> "]


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("format", ["srt", "vtt"])
def test_no_notation_of_times_becomes_text_of_the_cue_before(clock, format):
    head = "WEBVTT\n\n" if format == "vtt" else ""
    for arrow in ARROWS:
        for first, second in ((clock, clock), (clock, "00:00:05,000"), ("00:00:01,000", clock)):
            text = f"{head}1\n00:00:01.000 --> 00:00:02.000\nOne.\n\n2\n{first}{arrow}{second}\nTwo.\n"
            try:
                document = read_document(text.encode(), format, "x")
            except ValueError as error:
                assert f"line {text.count(chr(10)) - 1}" in str(error)
            else:
                assert document.segments == ["One.", "Two."], (first, arrow, second)


@pytest.mark.parametrize(
    "times",
    ["00:0<b>0:03,000 --> 00:00:05,000", "é 00:00:03,000 --> 00:00:05,000", "<i>00:00:03,000 --> 00:00:05", "{ --> 5",
     "00:00:03,000%d --> 00:00:05,000", "x 00:00:03.000 --&gt; 1", "one --> 00:05.000", "0:03.000 -<b>-> 0:05.000"],
)  # fmt: skip
def test_damaged_times_do_not_become_text_of_the_cue_before(times):
    with pytest.raises(ValueError, match="line 6"):
        read_document(f"1\n00:00:01,000 --> 00:00:02,000\nHi\n\n2\n{times}\nHo\n".encode(), "srt", "x.srt")


@pytest.mark.parametrize(
    "text",
    [
        "2 -> 3",
        "a --> b",
        "Press 1.2.3 -> menu",
        "1.2.3 - 1.2.4",
        "-5, 6 and 7",
        "1 - 2 - 3",
        "at 00:00:03 - 00:00:05",
        "20:15 - 21:00",
        "3 > 2",
        "1.2.3 → 1.2.4",
    ],
)
def test_text_with_arrows_and_numbers_stays_text(text):
    document = read_document(f"1\n00:00:01,000 --> 00:00:02,000\nHi\n{text}\n".encode(), "srt", "x.srt")
    assert len(document.cues) == 1
