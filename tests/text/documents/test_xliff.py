"""XLIFF 1.2 and 2.x: targets, states and inline codes; and attacks by XML."""

import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standins import upper

from nmtkit.text.documents import ReadOptions, read_document

MACHINE = 'state="needs-review-translation" state-qualifier="mt-suggestion"'
SOURCE = 'Hello <g id="1">big <x id="2"/></g> wörld &amp; <bpt id="3">&lt;b></bpt>all<ept id="3">&lt;/b></ept>'
ONE = f"""<?xml version="1.0" encoding="UTF-8"?>
<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
 <file source-language="en" original='a.html' datatype="html"><!-- c -->
  <body>
   <group id="g" translate='no'><trans-unit id="0"><source>Never</source></trans-unit></group>
   <trans-unit id="1">
     <source>{SOURCE}</source>
     <note>Not me</note>
   </trans-unit>
   <trans-unit id="2"><source>Done</source><target state="translated">Fertig</target></trans-unit>
   <trans-unit id="3" approved="yes"><source>Yes</source><target state="new">Ja</target></trans-unit>
   <trans-unit id="4"><source>Again</source><target state="new" xml:lang='de'>Again</target><alt-trans><source>Again</source><target>Wieder</target></alt-trans></trans-unit>
   <trans-unit id="5"><source>One. Two.</source><seg-source><mrk mtype="seg" mid="0">One.</mrk> <mrk mtype="seg" mid="1">Two.</mrk></seg-source><target/></trans-unit>
   <trans-unit id="6"><source>Call <mrk mtype="protected">Bob</mrk> now</source></trans-unit>
   <trans-unit id="7"><source>12</source></trans-unit>
  </body>
 </file>
</xliff>
"""  # noqa: E501
LOUD = 'HELLO <g id="1">BIG <x id="2"/></g> WÖRLD &amp; <bpt id="3">&lt;b></bpt>ALL<ept id="3">&lt;/b></ept>'
ONE_TRANSLATED = ONE
for old, new in (
    ('datatype="html">', 'datatype="html" target-language="de">'),
    ("</source>\n     <note>", f"</source>\n     <target {MACHINE}>{LOUD}</target>\n     <note>"),
    ("""<target state="new" xml:lang='de'>Again<""",
     """<target state="needs-review-translation" xml:lang='de' state-qualifier="mt-suggestion">AGAIN<"""),
    ("<target/>",
     f'<target {MACHINE}><mrk mtype="seg" mid="0">ONE.</mrk> <mrk mtype="seg" mid="1">TWO.</mrk></target>'),
    ("</mrk> now</source>", f'</mrk> now</source><target {MACHINE}>CALL <mrk mtype="protected">Bob</mrk> NOW</target>'),
):  # fmt: skip
    assert old in ONE_TRANSLATED
    ONE_TRANSLATED = ONE_TRANSLATED.replace(old, new)

TWO = """<?xml version="1.0"?>
<x:xliff xmlns:x="urn:oasis:names:tc:xliff:document:2.0" version="2.0" srcLang="en">
 <x:file id="f1">
  <x:unit id="u1"><x:notes><x:note>n</x:note></x:notes>
   <x:segment id="s1">
    <x:source>Press <x:pc id="1">the <x:ph id="2"/> key</x:pc> <x:sc id="4"/>now<x:ec startRef="4"/></x:source>
   </x:segment>
   <x:ignorable><x:source> </x:source></x:ignorable>
   <x:segment state="final"><x:source>Fin</x:source><x:target>Ende</x:target></x:segment>
   <x:segment state="initial" subState="a:b"><x:source xml:space="preserve">Begin</x:source></x:segment>
   <x:segment state="reviewed"><x:source>Seen</x:source><x:target>Gesehen</x:target></x:segment>
  </x:unit>
  <x:unit id="u2" translate="no"><x:segment><x:source>Never</x:source></x:segment></x:unit>
 </x:file>
</x:xliff>
"""
TWO_TRANSLATED = TWO
for old, new in (
    ('srcLang="en"', 'srcLang="en" trgLang="de"'),
    ('<x:segment id="s1">', '<x:segment id="s1" state="translated" subState="nmtkit:mt">'),
    ('<x:ec startRef="4"/></x:source>',
     '<x:ec startRef="4"/></x:source>\n    <x:target>PRESS <x:pc id="1">THE <x:ph id="2"/> KEY</x:pc> <x:sc id="4"/>NOW'
     '<x:ec startRef="4"/></x:target>'),
    ('state="initial" subState="a:b"', 'state="translated" subState="nmtkit:mt"'),
    ("Begin</x:source>", 'Begin</x:source><x:target xml:space="preserve">BEGIN</x:target>'),
):  # fmt: skip
    assert old in TWO_TRANSLATED
    TWO_TRANSLATED = TWO_TRANSLATED.replace(old, new)


def translated(text: str, language: str | None = "de", overwrite: bool = False) -> str:
    document = read_document(text.encode(), "xliff", "app.xlf", ReadOptions(language, overwrite))
    return document.encoded(document.render([upper(segment) for segment in document.segments])).decode()


@pytest.mark.parametrize(("text", "expected"), [(ONE, ONE_TRANSLATED), (TWO, TWO_TRANSLATED)], ids=["1.2", "2.0"])
def test_targets_and_states_are_written_and_nothing_else_changes(text, expected):
    assert translated(text) == expected
    assert translated(expected) == expected
    assert translated(text.replace("\n", "\r\n")) == expected.replace("\n", "\r\n")
    assert read_document(text.encode(), "xliff", "app.xlf").text == text


def test_translations_that_are_not_final_are_overwritten_if_asked():
    found = translated(ONE, overwrite=True)
    assert f"<target {MACHINE}>DONE</target>" in found and ">Ja</target>" in found
    found = translated(TWO, overwrite=True)
    assert ">SEEN</x:target>" in found and ">Ende</x:target>" in found


def target(source: str, translate=upper) -> str:
    text = f'<xliff version="1.2"><file><body><trans-unit id="1"><source>{source}</source></trans-unit></body>'
    text += "</file></xliff>"
    document = read_document(text.encode(), "xliff", "app.xlf")
    found = document.encoded(document.render([translate(segment) for segment in document.segments])).decode()
    check_xml(found)
    return re.search(r"<target [^<>]*>(.*)</target>", found)[1]


def check_xml(text: str) -> None:
    ElementTree.fromstring(text)
    if shutil.which("xmllint"):
        result = subprocess.run(["xmllint", "--noout", "-"], input=text.encode(), capture_output=True)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Hello &lt;b>big&lt;/b&gt; world", "HELLO &lt;b>BIG&lt;/b&gt; WORLD"),
        ("&lt;p&gt;Hello &lt;i class=&quot;x&quot;&gt;world&lt;/i&gt;&lt;/p&gt;",
         "&lt;p&gt;HELLO &lt;i class=&quot;x&quot;&gt;WORLD&lt;/i&gt;&lt;/p&gt;"),
        ("&#60;b&#62;One&#60;/b&#62; &#x3C;br/&#x3e; two", "&#60;b&#62;ONE&#60;/b&#62; &#x3C;br/&#x3e; TWO"),
        ("&lt;b&gt;Salt &amp;amp; pepper&lt;/b&gt; &amp;eacute;", "&lt;b&gt;SALT &amp;amp; PEPPER&lt;/b&gt; É"),
        ("Salt &amp; pepper, 1 &lt; 2", "SALT &amp; PEPPER, 1 &lt; 2"),
        ("Use &lt;file&gt; (see below)", "USE &lt;file&gt; (SEE BELOW)"),
        ("&#0000000065; dog runs home", "A DOG RUNS HOME"),  # the positions of its characters are not known
        ("<![CDATA[<p>Hello <b>big</b> & small</p>]]>",
         "&lt;p&gt;HELLO &lt;b&gt;BIG&lt;/b&gt; &amp; SMALL&lt;/p&gt;"),
        ('<g id="1">&lt;b&gt;One&lt;/b&gt;</g> two', '<g id="1">&lt;b&gt;ONE&lt;/b&gt;</g> TWO'),
    ],
)  # fmt: skip
def test_escaped_html_is_markup_of_the_text_and_stays_escaped(source, expected):
    assert target(source) == expected


def test_the_translator_gets_escaped_html_as_codes():
    text = '<xliff version="1.2"><file><body><trans-unit id="1"><source>A &lt;b>big&lt;/b> &amp;amp; old dog</source>'
    text += "</trans-unit></body></file></xliff>"
    assert read_document(text.encode(), "xliff", "app.xlf").segments == ["A <g1>big</g1> &amp; old dog"]


def test_another_encoding_is_kept():
    text = '<?xml version="1.0" encoding="ISO-8859-1"?><xliff version="1.2"><file><body><trans-unit id="ü"><source>Grün'
    text += "</source></trans-unit></body></file></xliff>"
    document = read_document(text.encode("latin-1"), "xliff", "app.xlf")
    assert document.encoded(document.render(["Łódź \x07"])) == text.replace(
        "</source>", f"</source><target {MACHINE}>&#321;ód&#378; </target>"
    ).encode("latin-1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '<!DOCTYPE a [<!ENTITY b "c">]><xliff version="1.2"/>',
            "line 1: a document type",
        ),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><xliff/>', "a document type"),
        ('<!DOCTYPE a [<!ENTITY % b SYSTEM "http://x/y"> %b;]><xliff/>', "a document type"),
        ('<xliff version="1.2">&b;</xliff>', "line 1: .*undefined entity"),
        ("<xliff version='1.2'>\n<file>", r"app\.xlf: line 2: .*no element"),
        ("<xliff version='1.2'>\n<file></xliff>", "line 2: .*mismatched tag"),
        ("<tmx version='1.4'/>", "<tmx>"),
        ("<a>" * 100_000, "line 1: .*200 levels"),
        ("", "no element found"),
        ("<?xml version='1.0' encoding='utf-7'?><a/>", "encoding 'utf-7'"),
    ],
)
def test_a_file_that_is_not_xliff_is_refused_with_its_line(text, message):
    with pytest.raises(ValueError, match=message):
        read_document(text.encode(), "xliff", "app.xlf")


INLINE = st.recursive(
    st.sampled_from(["one", "Two. ", " ", "&amp;", "&#xE9;", "🙂",
                     '<x id="1"/>', '<ph id="2">&lt;br></ph>', '<bx id="4"/>',
                     '<ex id="4"/>', "<!-- c -->", "<![CDATA[a<b]]>", '<it id="5" pos="open">x</it>', "<g id='9'/>"]),
    lambda inner: st.lists(inner, max_size=4).map(lambda parts: f'<g id="3">{"".join(parts)}</g>'), max_leaves=12,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(INLINE, max_size=4).map("".join), max_size=4))
def test_any_source_comes_out_in_its_target_with_every_code_once(sources):
    etree = pytest.importorskip("lxml.etree")
    text = '<xliff version="1.2"><file><body>'
    text += "".join(f'<trans-unit id="{n}"><source>{source}</source></trans-unit>' for n, source in enumerate(sources))
    text += "</body></file></xliff>"
    document = read_document(text.encode(), "xliff", "app.xlf")
    for render in (lambda segment: segment, upper):
        found = document.encoded(document.render([render(segment) for segment in document.segments]))
        for unit in etree.fromstring(found).iter("trans-unit"):
            source, target = unit.find("source"), unit.find("target")
            says = [part for code in ("ph", "it", "bpt") for part in source.xpath(f".//{code}/text()")]
            letters = [char for part in source.xpath(".//text()") for char in part if char.isalpha()]
            hidden = [char for part in says for char in part if char.isalpha()]
            if target is None:
                assert len(letters) == len(hidden)
                continue
            codes = [[(node.tag, node.get("id")) for node in side.iter(etree.Element)][1:] for side in (source, target)]
            assert codes[0] == codes[1]
            words = ["".join(t for t in side.xpath(".//text()")).split() for side in (source, target)]
            assert "".join(words[0]).upper() == "".join(words[1]).upper()
    assert re.sub("<target.*?</target>", "", found.decode()) == text


@pytest.mark.parametrize(
    ("target", "translated", "pair"),
    [
        ("<target>\n</target>", True, False),
        ('<target state="new">b</target>', True, False),
        ('<target state="needs-translation">b</target>', True, False),
        ('<target state="needs-l10n">b</target>', True, False),
        ('<target state="needs-adaptation">b</target>', False, True),
        ('<target state="new"><g id="1"/></target>', True, False),
        ('<target state="needs-review-translation" state-qualifier="mt-suggestion">b</target>', False, False),
        ('<target state="needs-review-translation">b</target>', False, True),
        ('<target state="final" state-qualifier="mt-suggestion">b</target>', False, True),
        ("<target>b</target>", False, True),
    ],
)
def test_reader_and_writer_agree_on_the_translated_units(target, translated, pair):
    unit = f'<trans-unit id="1"><source>a</source>{target}</trans-unit>'
    text = f'<xliff version="1.2"><file><body>{unit}</body></file></xliff>'
    document = read_document(text.encode(), "xliff", "x.xlf")
    assert (bool(document.segments), bool(list(document.pairs()))) == (translated, pair)


@pytest.mark.parametrize(
    ("attributes", "translated", "pair"),
    [(' state="initial"', True, False), (' state="translated" subState="nmtkit:mt"', False, False),
     (' state="translated"', False, True), ("", False, True)],
)  # fmt: skip
def test_reader_and_writer_agree_on_the_translated_segments(attributes, translated, pair):
    text = (
        f'<xliff version="2.0"><file><unit><segment{attributes}><source>a</source><target>b</target></segment></unit>'
        "</file></xliff>"
    )
    document = read_document(text.encode(), "xliff", "x.xlf")
    assert (bool(document.segments), bool(list(document.pairs()))) == (translated, pair)


LINES = "One man runs.\n  Two men &amp; a dog.\n\n3\nThe dog\nruns to <x id='1'/>.\n"


@pytest.mark.parametrize("version", ["1.2", "2.0"])
@pytest.mark.parametrize("holder", ["unit", "source"])
def test_preserved_lines_are_translated_line_by_line(version, holder):
    """A sentence that continues on the next line is one segment, whose translation has as many lines."""
    preserve, unit = ' xml:space="preserve"', "trans-unit" if version == "1.2" else "unit"
    inner = f"<source{preserve if holder == 'source' else ''}>{LINES}</source>"
    inner = inner if version == "1.2" else f"<segment>{inner}</segment>"
    inner = f"<{unit}{preserve if holder == 'unit' else ''}>{inner}</{unit}>"
    text = f'<xliff version="{version}"><file>{inner}</file></xliff>'
    document = read_document(text.encode(), "xliff", "x.xlf")
    assert document.segments == ["One man runs.", "Two men &amp; a dog.", "The dog runs to <g3/>."]
    written = document.render([upper(segment) for segment in document.segments])
    assert written.partition("<target")[2].partition(">")[2].partition("</target")[0] == (
        "ONE MAN RUNS.\n  TWO MEN &amp; A DOG.\n\n3\nTHE DOG\nRUNS TO <x id='1'/>.\n"
    )
    other = read_document(text.replace(preserve, "").encode(), "xliff", "x.xlf")
    assert len(other.segments) == 1


def test_a_code_over_several_preserved_lines_keeps_the_lines_in_one_segment():
    source = '<source xml:space="preserve"><g id="1">One.\nTwo.</g> Three.</source>'
    text = f'<xliff version="1.2"><file><trans-unit>{source}</trans-unit></file></xliff>'
    assert read_document(text.encode(), "xliff", "x.xlf").segments == ["<g0>One. Two.</g0> Three."]


def test_a_placeholder_between_two_words_is_a_space_in_a_pair():
    unit = "<source>one<x id='1'/>two <ph id='2'/>three<g id='3'>s</g></source><target>eins<x id='1'/>zwei</target>"
    text = f'<xliff version="1.2"><file><trans-unit>{unit}</trans-unit></file></xliff>'
    assert list(read_document(text.encode(), "xliff", "x.xlf").pairs()) == [("one two threes", "eins zwei")]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (ONE.replace('source-language="en"', 'source-language="en" target-language="fr-FR"'), "fr-FR"),
        (TWO.replace('srcLang="en"', 'srcLang="en" trgLang="fr"'), "fr"),
    ],
)
def test_a_file_for_another_target_language_gets_a_warning(data, named, caplog):
    """The translations of another model stood in a file whose language did not change."""
    for language, count in (("de", 1), ("fra_Latn", 0), ("fr", 0), (None, 0)):
        caplog.clear()
        read_document(data.encode(), "xliff", "a.xlf", ReadOptions(language))
        assert len([each for each in caplog.records if repr(named) in each.getMessage()]) == count


@pytest.mark.parametrize(("data", "name"), [(ONE, "source-language"), (TWO, "srcLang")])
def test_a_file_in_another_source_language_gets_a_warning(data, name, caplog):
    """A model of another source language translated the file without a message."""
    assert f'{name}="en"' in data
    for language, count in (("it", 1), ("eng_Latn", 0), ("en-GB", 0), (None, 0)):
        caplog.clear()
        read_document(data.encode(), "xliff", "a.xlf", ReadOptions("de", source_language=language))
        assert ["source language 'en'" in each.getMessage() for each in caplog.records] == [True] * count


@pytest.mark.parametrize("note", ["' state=\"new\"'", "\" state='new'\""])
def test_the_state_is_an_attribute_and_not_a_part_of_the_value_of_another(note):
    target = f'<x:target equiv={note} state="new" state-qualifier="tm"/>'
    unit = f'<x:trans-unit id="1"><x:source>Hello</x:source>{target}</x:trans-unit>'
    namespace = "urn:oasis:names:tc:xliff:document:1.2"
    text = f'<x:xliff version="1.2" xmlns:x="{namespace}"><x:file><x:body>{unit}</x:body></x:file></x:xliff>'
    found = read_document(text.encode(), "xliff", "a.xlf").render(["HELLO"])
    assert f"<x:target equiv={note} {MACHINE}>HELLO</x:target>" in found
