"""Code of templates stays as it is, wherever it stands in a page. Every expected page is written out."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nmtkit.text.documents import ReadOptions, read_document
from nmtkit.text.markup import tags
from nmtkit.text.template_code import codes

VALUES = [
    "<?= $x->y ?>", "<?php echo $a['b>'] ?>", '<?php the_title( "<h1>" ); ?>', "<%= link_to \"a\", b if c > d %>",
    "{{ user.name }}", "{{ 'a <b>c</b>' | translate:{n: 1} }}", '{{ "<i>x</i>"|safe }}', "{{{ raw }}}", "{{ a\n | b }}",
    "{!! $html !!}", "${user.name}", "#{user['name']}", "{{ a < b ? 'x' : 'y' }}",
]  # fmt: skip
COMMENTS = ["<%-- <b>no %> --%>", "<%# no %>", "{# <p>no</p> #}", "{{!-- <p>no</p> --}}", "{{-- no --}}"]
STATEMENTS = [
    "<?php if ($a > 1) { ?>", "<?php } ?>", "<?php\nforeach ($a as $b): ?>", "<? endif ?>", "<% if a > b %>",
    "<% end %>", "<%- each do |x| -%>", "<%= form_for @a do |f| %>", '{% trans "<b>it\'s</b>" %}', "{% if a<b %}",
    "{%- endif -%}", "{{#if x}}", "{{else}}", "{{/if}}", "{{> part}}", "{{ end }}", "{{ if .X }}", "@if($a > 1)",
    "@foreach ($a as $b)", "@endforeach", "@csrf", "@php echo '<p>'; @endphp", "@let a = b + 1;",
]  # fmt: skip
TEXT = ["a {b} c", "100 % of {", "me@example.org", "@home", "<% open", "{{ open", "{%", "{{ a <b>c</b> }}", "a #b",
        "<code>{%</code> and <code>%}</code>", "@media (x) {}", "$5 {"]  # fmt: skip


@pytest.mark.parametrize(("role", "examples"), [("value", VALUES), ("comment", COMMENTS), ("statement", STATEMENTS)])
def test_each_kind_of_code_is_found_alone_and_in_text(role, examples):
    for code in examples:
        for before, after in (("", ""), ("Say ", " now"), ("<p>(", ").</p>")):
            found = codes(f"{before}{code}{after}")
            assert found == [(len(before), len(before + code), role)], code


@pytest.mark.parametrize("text", TEXT)
def test_text_is_not_code(text):
    assert codes(text) == []


def test_blocks_of_angular_are_code_with_their_closing_brace():
    page = "@if (a > b()) {<p>{{ x }} {a}</p>} @else if (c) {\n b } @for (i of x; track i) { c } }"
    found = [page[start:end] for start, end, _ in codes(page)]
    assert found == ["@if (a > b()) {", "{{ x }}", "}", "@else if (c) {", "}", "@for (i of x; track i) {", "}"]


def test_each_name_is_a_directive_in_a_template_of_blade():
    page = "@vite(['a'])\n@routes one @inertia two me@example.org"
    assert [page[start:end] for start, end, _ in codes(page)] == ["@vite(['a'])", "@routes", "@inertia"]
    assert codes("Ask @joe or @me") == []
    assert codes("Ask @joe (at home) or write to me@section.org") == []


def loud(segment: str) -> str:
    return "".join(part if part.startswith("<") else part.upper() for part in re.split("(<[^<>]*>|&[a-z]+;)", segment))


def translated(page: str) -> str:
    document = read_document(page.encode(), "html", "page.html", ReadOptions("de"))
    return document.encoded(document.render([loud(segment) for segment in document.segments])).decode()


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ('<a href="<?php echo $x["a>"] ?>" <?php if ($a>1) { ?>b<?php } ?> title=\'Go "<?= "to>" ?>" now\'>hi</a>',
         '<a href="<?php echo $x["a>"] ?>" <?php if ($a>1) { ?>b<?php } ?> title=\'GO "<?= "to>" ?>" NOW\'>HI</a>'),
        ("<p>you have {{ n }} new message{% if n > 1 %}s{% endif %}.</p>",
         "<p>YOU HAVE {{ n }} NEW MESSAGE{% if n > 1 %}S{% endif %}.</p>"),
        ('<p title="{% if a %}one{% else %}two{% endif %}">a <b {{ x }}>b</b></p>',
         '<p title="{% if a %}ONE{% else %}TWO{% endif %}">A <b {{ x }}>B</b></p>'),
        ("<h{{ n }} class={{ c }}>head</h{{ n }}><{{ tag }}>text</{{ tag }}>",
         "<h{{ n }} class={{ c }}>HEAD</h{{ n }}><{{ tag }}>TEXT</{{ tag }}>"),
        ("<p>a {n, plural, =0 {<p>none</p>} other {<b>'{'#</b> many}} b</p><p>c</p>",
         "<p>a {n, plural, =0 {<p>none</p>} other {<b>'{'#</b> many}} b</p><p>C</p>"),
        ("<html lang=\"<?= $l ?>\"><script>a = '<?= $x > \"</script>\" ?>'</script><p>a <?php b('<p>');",
         "<html lang=\"<?= $l ?>\"><script>a = '<?= $x > \"</script>\" ?>'</script><p>A <?php b('<p>');"),
        ("<title>{{ t }} of us</title><!-- {{ a --> }} b -->c", "<title>{{ t }} OF US</title><!-- {{ a --> }} b -->C"),
        ("<option title=a{{b}}>x", '<option title="A{{b}}">X'),
        ("<p>#{{ a.b }} c ${{d}}e <{{f}}>", "<p>#{{ a.b }} C ${{d}}E <{{f}}>"),
    ],
)  # fmt: skip
def test_code_stays_and_the_text_around_it_is_translated(page, expected):
    assert translated(page) == expected


CODE = st.sampled_from(VALUES + COMMENTS + STATEMENTS)
PARTS = st.one_of(
    CODE,
    st.builds("<a {0}>".format, CODE),
    st.builds('<a title="one {0} two">'.format, CODE),
    st.builds("<p class='{0}' alt=x>".format, CODE),
    st.sampled_from(["one ", "Two. ", "</a>", "</p>", "<br>", "<b>", "</b>", " < ", "<script>", "</script>", "{", "}"]),
    st.sampled_from(TEXT),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(PARTS, max_size=12).map("".join))
def test_all_code_of_any_page_stays(page):
    document = read_document(page.encode(), "html", "page.html")
    assert document.render(document.segments) == page
    found = document.render([loud(segment) for segment in document.segments])
    codes_of = [[text[start:end] for start, end, _ in codes(text)] for text in (page, found)]
    assert codes_of[0] == codes_of[1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('<a href="<?php echo "x>" ?>">b</a>', ['<a href="<?php echo "x>" ?>">', "</a>"]),
        ("<a {{ b > c }}>b</a> <%= d > e %>", ["<a {{ b > c }}>", "</a>", "<%= d > e %>"]),
        ("<?php if ($a->b) ?><b>x</b>", ["<?php if ($a->b) ?>", "<b>", "</b>"]),
        ("%<count>d of %-5<total>s, %<PRIu64> bytes", []),
        ("50%<br>off and 50%<b>off</b>", ["<br>", "<b>", "</b>"]),
        ("{# <g1/> #}", ["<g1/>"]),  # a document writes its codes as tags
    ],
)
def test_tags_of_a_line_hold_code_and_placeholders_are_not_tags(line, expected):
    assert [line[tag.start : tag.end] for tag in tags(line)] == expected
