"""The page of attention heads, as a real browser shows it (skipped where there is no chromium)."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from builders import tiny_transformer
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.data import checkpoint_file
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import building
from nmtkit.pages.attention import page
from nmtkit.translation.attention import Attention, attend
from nmtkit.translation.translator import Translator

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SENTENCE = "a dog </script> runs <b>fast</b> & {{title}}"
LAYERS, HEADS = 2, 3


@pytest.fixture(scope="module")
def model_and_tokenizer():
    lines = ["a dog runs fast", "ein Hund läuft schnell", SENTENCE] * 5
    tokenizer = Tokenizer(train_model(lines, 320, "bpe"))
    changes = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "d_model": 12, "d_ff": 16, "heads": HEADS}
    model = tiny_transformer(building.vocabulary_of(tokenizer), seed=0, **changes)
    return model, tokenizer, model.config


@pytest.fixture(scope="module")
def attention(model_and_tokenizer):
    model, tokenizer, _ = model_and_tokenizer
    return attend(model, tokenizer, SENTENCE, "ein Hund läuft", languages=(None, None))


def test_every_row_of_every_head_sums_to_one_and_the_decoder_does_not_look_ahead(attention):
    source, target = len(attention.source), len(attention.target)
    shapes = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
    assert set(attention.weights) == set(shapes)
    for kind, layers in attention.weights.items():
        assert [layer.shape for layer in layers] == [(HEADS, *shapes[kind])] * LAYERS
        for layer in layers:
            np.testing.assert_allclose(layer.sum(-1), 1, atol=1e-5)
    for layer in attention.weights["decoder"]:
        assert not np.triu(layer, 1).any()


def test_without_a_translation_it_looks_at_the_models_own(model_and_tokenizer):
    model, tokenizer, _ = model_and_tokenizer
    (translation,) = Translator([model], tokenizer).translate(["a dog"], beam=2)
    found = attend(model, tokenizer, "a dog", beam=2, languages=(None, None))
    assert found.target == [*translation.hypotheses[0].pieces, "end"]


def test_an_empty_sentence_is_refused(model_and_tokenizer):
    model, tokenizer, _ = model_and_tokenizer
    for sentence in ("  ", "\u200b"):
        with pytest.raises(ValueError, match="the sentence is empty"):
            attend(model, tokenizer, sentence, languages=(None, None))


def test_the_page_asks_for_nothing_from_elsewhere(attention):
    text = page(attention.source, attention.target, attention.weights, "Attention in <model>.pt")
    assert "<title>Attention in &lt;model&gt;.pt</title>" in text
    assert text.count("</script>") == 2  # the sentence does not end the script
    assert set(re.findall(r"https?://[^\"' ]*", text)) <= {"http://www.w3.org/2000/svg"}  # a name instead of an address
    assert not re.search(r"""(src|href)=["'](?!data:)""", text) and "@import" not in text and "fetch(" not in text


# --- in a browser ---------------------------------------------------------------------------------------------------


def dump(folder, text, address="", *flags):
    """Returns the elements of the page after its script, in a browser without a network."""
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", *flags]
    return subprocess.run([*command, path.as_uri() + address], capture_output=True, text=True, timeout=600).stdout


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_every_head_and_finds_that_rows_sum_to_one(attention, tmp_path):
    shown = dump(tmp_path, page(attention.source, attention.target, attention.weights, "Attention"))
    labels = re.findall(r'<button class="head[^>]*aria-label="([^"]*)"', shown)
    kinds = ("Encoder self-attention", "Decoder self-attention", "Cross-attention")
    assert labels == [
        f"{kind}, layer {layer}, head {head}"
        for kind in kinds
        for layer in range(1, LAYERS + 1)
        for head in range(1, HEADS + 1)
    ]
    error = re.search(r"18 heads\. .* error is ([\de.+-]+)\. ", shown)
    assert float(error[1]) < 1e-5


@pytest.mark.slow
@needs_browser
def test_an_address_opens_a_head_and_follows_a_token_through_all_of_them(attention, tmp_path):
    shown = dump(
        tmp_path, page(attention.source, attention.target, attention.weights, "Attention"), "#cross-2-3-target-0"
    )
    assert "Cross-attention, layer 2, head 3</h2>" in shown
    captions = re.findall(r'<span class="caption">(.*?)</span>', shown)
    # the first target token is a query of the decoder and of cross-attention, but not of the encoder
    assert [bool(caption) for caption in captions] == [False] * 6 + [True] * 12
    weights = attention.weights["cross"][1][2, 0]
    assert f"{100 * weights.max():.0f} %" in captions[-1]
    for classes, tokens in (("rows", attention.target), ("columns-of", attention.source)):
        (labels,) = re.findall(rf'<span class="{classes}">(.*?)</span></span>', shown)
        assert html.unescape(re.sub("<.*?>", " ", labels)).split() == [
            token.replace("▁", "") or "␣" for token in tokens
        ]
    assert shown.count('class="followed">') == 1  # the label of the row
    # the first step of the decoder can only look at the start
    assert captions[6] == "→ <b>start</b> 100 %"


@pytest.mark.slow
@needs_browser
def test_pointing_at_a_token_follows_it_and_leaving_lets_go(attention, tmp_path):
    script = """
      const token = document.querySelector('[data-token="source-1"]');
      const report = {};
      token.dispatchEvent(new PointerEvent("pointerenter"));
      report.during = [...document.querySelectorAll(".caption")].slice(0, 6).map(caption => caption.textContent);
      report.followed = document.querySelectorAll(".followed").length;
      report.lines = document.querySelectorAll("#figure path").length;
      token.dispatchEvent(new PointerEvent("pointerleave"));
      report.after = [...document.querySelectorAll(".caption")].map(caption => caption.textContent).join("");
      document.querySelectorAll(".head")[4].click();
      document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
      report.title = document.getElementById("detail-title").textContent;
      const shown = { id: "report", textContent: JSON.stringify(report) };
      document.body.append(Object.assign(document.createElement("pre"), shown));
    """
    text = page(attention.source, attention.target, attention.weights, "Attention").replace(
        "</body>", f"<script>{script}</script></body>"
    )
    found = re.search(r'<pre id="report">(.*?)</pre>', dump(tmp_path, text))
    assert found, "the page's script failed"
    report = json.loads(found[1])
    assert all(caption.startswith("→ ") for caption in report["during"])
    assert report["followed"] >= 2 and report["lines"] > 0
    assert report["after"] == ""
    assert report["title"] == "Encoder self-attention, layer 2, head 1"


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize(
    ("hover", "verbs", "other"),
    [(1, ["Tap", "tap"], ["Point", "Click"]), (2, ["Point", "Click"], ["Tap"])],
    ids=["touch", "mouse"],
)
def test_the_introduction_names_what_the_reader_can_do(hover, verbs, other, attention, tmp_path):
    """`hover` is Chromium's number of a device that cannot (1) or can (2) point at elements."""
    script = 'document.body.dataset.shown = document.querySelector("p").innerText;'
    text = page(attention.source, attention.target, attention.weights, "Attention").replace(
        "</body>", f"<script>{script}</script></body>"
    )
    flag = f"--blink-settings=primaryHoverType={hover},availableHoverTypes={hover}"
    (shown,) = re.findall(r'data-shown="([^"]*)"', dump(tmp_path, text, "", flag))
    assert all(verb in shown for verb in verbs) and not any(verb in shown for verb in other)


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_of_a_checkpoint(model_and_tokenizer, tmp_path):
    model, tokenizer, config = model_and_tokenizer
    path = tmp_path / "model.pt"
    checkpoint_file.save(path, building.to_checkpoint(model, "transformer_tiny", config, tokenizer, [], 0))
    output = tmp_path / "dog.html"
    result = CliRunner().invoke(main, ["attention", "--path", str(path), "a dog", "--output", str(output)])
    assert result.exit_code == 0 and result.stdout == "" and "18 heads" in result.stderr
    assert f"<title>Attention in {path.name}</title>" in output.read_text(encoding="utf-8")
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [one.name for one in tmp_path.iterdir() if one.suffix == ".tmp"] == []


def test_a_model_without_attention_is_an_error(model_and_tokenizer, tmp_path, monkeypatch):
    model, tokenizer, config = model_and_tokenizer
    path = tmp_path / "model.pt"
    checkpoint_file.save(path, building.to_checkpoint(model, "transformer_tiny", config, tokenizer, [], 0))

    def none(*arguments):
        raise ValueError("Bag has no attention to show")

    monkeypatch.setattr(type(model), "attention_weights", none)
    result = CliRunner().invoke(main, ["attention", "--path", str(path), "a dog", "--output", str(tmp_path / "x.html")])
    assert result.exit_code == 2 and "no attention to show" in result.stderr
    assert not (tmp_path / "x.html").exists()


def test_kinds_that_a_model_lacks_are_left_out(attention):
    partial = Attention(attention.source, attention.target, {"cross": attention.weights["cross"]})
    text = page(partial.source, partial.target, partial.weights, "Attention")
    assert '"name":"cross"' in text and '"name":"encoder"' not in text


def test_the_page_does_not_replace_the_checkpoint(model_and_tokenizer, tmp_path, monkeypatch):
    model, tokenizer, config = model_and_tokenizer
    path = tmp_path / "model.pt"
    checkpoint_file.save(path, building.to_checkpoint(model, "transformer_tiny", config, tokenizer, [], 0))
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["attention", "--path", "model.pt", "a dog", "--output", str(path)])
    assert result.exit_code == 2 and path.read_bytes() == before
    assert f"--output {path} would overwrite" in result.stderr


def decoded(argument):
    """Returns an argument as sys.argv has it."""
    return argument.decode("utf-8", "surrogateescape")


@pytest.mark.parametrize("arguments", [[b"caf\xe9"], [b"a dog", b"--target", b"caf\xe9"]])
def test_bytes_that_are_not_utf_8_are_named(model_and_tokenizer, tmp_path, arguments):
    model, tokenizer, config = model_and_tokenizer
    path = tmp_path / "model.pt"
    checkpoint_file.save(path, building.to_checkpoint(model, "transformer_tiny", config, tokenizer, [], 0))
    result = CliRunner().invoke(main, ["attention", "--path", str(path), *map(decoded, arguments)])
    name = "SENTENCE" if len(arguments) == 1 else "--target"
    assert result.exit_code == 2
    assert result.stderr.startswith(f"nmtkit: error: {name} is not") and r"b'caf\xe9'" in result.stderr
