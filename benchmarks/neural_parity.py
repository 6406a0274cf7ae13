"""Compares our COMET and MetricX with the original code, on small models with random weights in the published layout.

    python benchmarks/neural_parity.py --python ENV/bin/python [--metricx FOLDER] [--goldens]

ENV is an environment with unbabel-comet 2.2.7, transformers 4, datasets and setuptools before 80. FOLDER is a checkout
of github.com/google-research/metricx at the commit that `nmtkit/scoring/neural/metricx.py` names. `--goldens` uses the
models and the lines of our tests, and also prints the scores of the original code.
"""

import argparse
import bz2
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
KINDS = {"comet": "comet", "unite": "comet", "kiwi": "cometkiwi", "referenceless": "cometkiwi", "xl": "cometkiwi"}
VARIANTS = {kind: (kind, name) for kind, name in KINDS.items()} | {
    "unite without a reference": ("unite", "cometkiwi"),
    "metricx": ("metricx", "metricx"),
    "metricx without a reference": ("metricx", "metricx-qe"),
}
PACKAGES = ("unbabel-comet", "transformers", "torch", "numpy", "tokenizers")
STRANGE = [
    "", " ", "  two  spaces  ", "\u3000ideographic\u3000space", "no\u00a0break\u202fspace", "tab\tand\u2028separator",
    "ﬁ ligature ½ ²", "ＦＵＬＬ ｗｉｄｔｈ", "e\u0301 combining", "😀 \U0001f469\u200d\U0001f467",
    "中文句子。", "ไทย", "עברית", "\u200bzero\u200dwidth\ufeff",
    "</s> <pad> <mask> <s> <unk>", "<extra_id_10>", "▁meta▁space", "control \x07 \x7f", "a" * 700, "word " * 900,
    "source: candidate: reference:", "trailing space ", "\U00020000 rare",
]  # fmt: skip


def original_comet(folder: Path, rows: list[dict[str, str]], batch: int) -> dict[str, Any]:
    from comet import load_from_checkpoint

    model = load_from_checkpoint(str(folder / "checkpoints" / "model.ckpt"), local_files_only=True)
    prediction = model.predict(rows, batch_size=batch, gpus=0, progress_bar=False)
    return {"scores": [100 * score for score in prediction.scores], "system": 100 * prediction.system_score}


def original_metricx(folder: Path, rows: list[dict[str, str]], reads_reference: bool, source: str) -> dict[str, Any]:
    sys.path.insert(0, source)
    import torch
    import transformers
    from metricx24 import models, predict

    path = folder / "input.jsonl"
    names = {"mt": "hypothesis", "src": "source", "ref": "reference"}
    records = [{names[key]: value for key, value in row.items()} for row in rows]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    model = models.MT5ForRegression.from_pretrained(str(folder), torch_dtype="auto").eval()
    data = predict.get_dataset(str(path), tokenizer, 1536, "cpu", not reads_reference)["test"]
    scores = []
    with torch.no_grad():
        for row in data:
            inputs = {"input_ids": row["input_ids"][None], "attention_mask": row["attention_mask"][None]}
            # the cache of transformers 4.57 mixes self-attention and cross-attention of this decoder
            output = model(**inputs, use_cache=False)
            scores.append(output.predictions.item())
    return {"scores": scores, "system": sum(scores) / len(scores)}


def original(task: Path) -> None:
    """Runs in the other environment: writes the scores of every variant in the folder `task`."""
    settings = json.loads((task / "task.json").read_text())
    results: dict[str, Any] = {"versions": {name: metadata.version(name) for name in PACKAGES}}
    for variant, (kind, name) in settings["variants"].items():
        keys = ("mt", "src", "ref") if name in ("comet", "metricx") else ("mt", "src")
        rows = [{key: row[key] for key in keys} for row in settings["rows"]]
        if kind == "metricx":
            results[variant] = original_metricx(task / kind, rows, "ref" in keys, settings["metricx"])
        else:
            results[variant] = original_comet(task / kind, rows, settings["batch"])
    (task / "original.json").write_text(json.dumps(results))


def lines(pairs: int, seed: int = 1) -> list[dict[str, str]]:
    """Returns `pairs` pairs of the demo, and rows with a strange text as source, as hypothesis, as reference or as all.

    Some strange texts are longer than the limits of the models.
    """
    text = bz2.decompress((REPOSITORY / "nmtkit" / "demo" / "corpus.tsv.bz2").read_bytes()).decode()
    generator = random.Random(seed)
    chosen = [line.split("\t")[-2:] for line in generator.sample(text.splitlines(), pairs)]
    rows = [{"src": source, "ref": target, "mt": " ".join(target.split()[1:])} for source, target in chosen]
    plain = rows[0]
    rows += [plain | {key: text} for text in STRANGE for key in ("src", "mt", "ref")]
    rows += [dict.fromkeys(("src", "mt", "ref"), text) for text in STRANGE]
    generator.shuffle(rows)
    return rows


def trained_spm(rows: Sequence[dict[str, str]], **ids: int) -> bytes:
    """Trains a SentencePiece model with the normaliser of XLM-R and mT5."""
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([row[key] for row in rows for key in ("src", "ref") if len(row[key]) < 300]),
        model_writer=model, vocab_size=1000, hard_vocab_limit=False, model_type="unigram",
        normalization_rule_name="nmt_nfkc", character_coverage=0.9995, num_threads=1, minloglevel=2, **ids,
    )  # fmt: skip
    return model.getvalue()


def write_models(task: Path, rows: Sequence[dict[str, str]] | None) -> None:
    """Writes a model of each kind: the models of our tests if `rows` is None, else larger models.

    The vocabulary of the larger models is trained on `rows`.
    """
    import neural_models as small

    from nmtkit.data.tokenizers.spm_model import pieces_of

    if rows is None:
        for kind in KINDS:
            small.write_comet(task / kind, kind)
        small.write_metricx(task / "metricx")
        return
    spm = trained_spm(rows)
    vocabulary = len(pieces_of(spm)) + 2  # with <pad> and <mask>
    small.TINY.update(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128)
    for kind in KINDS:
        small.write_comet(task / kind, kind, spm=spm, vocabulary=vocabulary, positions=514)
    write_published_tokenizer(task / "kiwi" / "encoder")
    small.write_metricx(task / "metricx", spm=trained_spm(rows, pad_id=0, eos_id=1, unk_id=2, bos_id=-1))


def write_published_tokenizer(encoder: Path) -> None:
    """Writes a tokenizer.json with the steps of the published file of xlm-roberta-large."""
    from tokenizers import normalizers, pre_tokenizers, processors

    from nmtkit.data.tokenizers.spm_model import charsmap_of
    from nmtkit.scoring.neural.tokenization import load_tokenizer

    tokenizer = load_tokenizer(encoder, "xlm-roberta", 10_000)
    model = (encoder / "sentencepiece.bpe.model").read_bytes()
    tokenizer.normalizer = normalizers.Precompiled(charsmap_of(model))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save(str(encoder / "tokenizer.json"))


def ours(task: Path, variants: dict[str, tuple[str, str]], rows: Sequence[dict[str, str]]) -> dict[str, list[float]]:
    from nmtkit.scoring.sentence_metrics import segment_metric

    columns = {name: [row[key] for row in rows] for name, key in (("sources", "src"), ("references", "ref"))}
    texts = [row["mt"] for row in rows]
    return {
        variant: segment_metric(f"{name}={task / kind}").scores(texts, **columns)
        for variant, (kind, name) in variants.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--metricx", type=Path)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--goldens", action="store_true")
    arguments = parser.parse_args()
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]
    from neural_models import ROWS

    variants = {key: value for key, value in VARIANTS.items() if arguments.metricx or value[0] != "metricx"}
    rows = ROWS if arguments.goldens else lines(arguments.pairs)
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        write_models(task, None if arguments.goldens else rows)
        mine = ours(task, variants, rows)
        worst: dict[str, tuple[float, float]] = dict.fromkeys(variants, (0.0, 0.0))
        for batch, order in ((16, 1), (5, -1)):
            settings = {"variants": variants, "rows": rows[::order], "batch": batch, "metricx": str(arguments.metricx)}
            (task / "task.json").write_text(json.dumps(settings))
            subprocess.run([arguments.python, __file__, "--original", task], check=True)
            theirs = json.loads((task / "original.json").read_text())
            for variant in variants:
                scores = theirs[variant]["scores"][::order]
                differences = [abs(a - b) for a, b in zip(mine[variant], scores, strict=True)]
                of_system = abs(sum(mine[variant]) / len(rows) - theirs[variant]["system"])
                worst[variant] = max(worst[variant][0], *differences), max(worst[variant][1], of_system)
                if arguments.goldens and order == 1:
                    print(f"{variant!r}: {[round(score, 4) for score in scores]},")
    print(json.dumps(theirs["versions"]), {name: metadata.version(name) for name in PACKAGES[1:]})
    print(f"{len(rows)} lines; largest differences of the scores of a sentence and of the system:")
    for variant, (sentence, system) in worst.items():
        low, high = min(mine[variant]), max(mine[variant])
        print(f"| {variant} | {low:.2f} to {high:.2f} | {sentence:.1e} | {system:.1e} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--original"]:
        original(Path(sys.argv[2]))
    else:
        main()
