"""In subtitles in the style of real producers, every cue is found, and only the words change."""

import pytest
from standins import upper

from nmtkit.text.documents import read_document

YOUTUBE_AUTOMATIC = """WEBVTT
Kind: captions
Language: en

00:00:00.160 --> 00:00:02.389 align:start position:0%
 
hello<00:00:00.480><c> everybody</c><00:00:00.960><c> and</c>

00:00:02.389 --> 00:00:02.399 align:start position:0%
hello everybody and
 
00:00:02.399 --> 00:00:04.550 align:start position:0%
hello everybody and
welcome<00:00:02.720><c> back</c>
"""  # noqa: W293

FFMPEG = """WEBVTT

00:01.000 --> 00:02.500
The first one.

00:03.000 --> 00:04.000
The second one.

"""

NO_BLANK_LINES = """WEBVTT
00:01.000 --> 00:02.000
The first one.
00:03.000 --> 00:04.000
The second one.
"""

NUMBERS_AFTER_A_LINE_OF_SPACES = """WEBVTT

1
00:01.000 --> 00:02.000
The first one.
 \t
2
00:03.000 --> 00:04.000
The year was
1999
00:05.000 --> 00:06.000
The third one.
"""

POSITIONED = """WEBVTT

NOTE Created by a studio
with two lines

STYLE
::cue(.loud) {
  color: red
}

REGION
id:top
width:40%

1
00:00:01.000 --> 00:00:02.000 position:50.00%,middle align:middle size:80.00% line:84.66%
<c.loud>Stop &amp; listen!</c>

2 - intro
00:00:03.000 --> 00:00:04.000 region:top line:0
&lrm;<i>The second one.</i>
"""

SUBTITLE_EDIT = """\ufeff1\r
00:00:01,000 --> 00:00:02,000\r
{\\an8}<font color="#ffff00">The first one.</font>\r
\r
2\r
00:00:03,000 --> 00:00:04,000\r
- Who?\r
- Me.\r
\r
"""

AEGISUB = """1
00:00:01,00 --> 00:00:02,00
{\\i1}The first one.{\\i0}

2
00:00:03,00 --> 00:00:04,00
The second one.


"""

SRT_WITHOUT_BLANK_LINES = """1
00:00:01,000 --> 00:00:02,000
The first one.
2
00:00:03,000 --> 00:00:04,000
The second one.
"""


def read(text: str, format: str):
    return read_document(text.encode(), format, f"film.{format}")


@pytest.mark.parametrize(
    ("text", "format", "times", "segments"),
    [
        (YOUTUBE_AUTOMATIC, "vtt", [(160, 2389), (2389, 2399), (2399, 4550)],
         ["hello<g1/><g2> everybody</g2><g5/><g6> and</g6>", "hello everybody and",
          "hello everybody and welcome<g3/><g4> back</g4>"]),
        (FFMPEG, "vtt", [(1000, 2500), (3000, 4000)], ["The first one.", "The second one."]),
        (NO_BLANK_LINES, "vtt", [(1000, 2000), (3000, 4000)], ["The first one.", "The second one."]),
        (NUMBERS_AFTER_A_LINE_OF_SPACES, "vtt", [(1000, 2000), (3000, 4000), (5000, 6000)],
         ["The first one.", "The year was 1999", "The third one."]),
        (POSITIONED, "vtt", [(1000, 2000), (3000, 4000)], ["Stop &amp; listen!", "\u200e<g1>The second one.</g1>"]),
        (SUBTITLE_EDIT, "srt", [(1000, 2000), (3000, 4000)], ["The first one.", "Who?", "Me."]),
        (AEGISUB, "srt", [(1000, 2000), (3000, 4000)], ["The first one.", "The second one."]),
        (SRT_WITHOUT_BLANK_LINES, "srt", [(1000, 2000), (3000, 4000)], ["The first one.", "The second one."]),
    ],
    ids=["youtube", "ffmpeg", "no blank lines", "line of spaces", "positioned", "subtitle edit", "aegisub", "srt"],
)  # fmt: skip
def test_every_cue_is_found_and_all_but_the_words_stays(text, format, times, segments):
    document = read(text, format)
    assert [(cue.start, cue.end) for cue in document.cues] == times
    assert document.segments == segments
    assert document.encoded(document.render(document.segments)) == text.encode()
    found = document.render([upper(segment) for segment in document.segments])
    kept = [
        line for line in text.splitlines() if "-->" in line or line.startswith(("NOTE", "with", "STYLE", "::", "id:"))
    ]
    assert [line for line in found.splitlines() if line in kept] == kept


def test_a_cue_without_a_blank_line_before_it_is_translated_alone():
    document = read(NO_BLANK_LINES, "vtt")
    assert document.render(["Die erste.", "Die zweite."]) == (
        "WEBVTT\n00:01.000 --> 00:02.000\nDie erste.\n00:03.000 --> 00:04.000\nDie zweite.\n"
    )


def test_automatic_captions_keep_their_word_times():
    document = read(YOUTUBE_AUTOMATIC, "vtt")
    found = document.render(["hallo<g1/><g2> alle</g2><g5/><g6> und</g6>", "hallo alle und", "hallo<g3/><g4> x</g4>"])
    assert "\n \nhallo<00:00:00.480><c> alle</c><00:00:00.960><c> und</c>\n\n" in found
    assert "\nhallo alle und\n \n00:00:02.399" in found
