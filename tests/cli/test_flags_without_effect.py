"""A flag that does nothing is an error that names both flags, in commands without a table."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from nmtkit.cli import main

SWEEP = "arch = 'transformer_tiny'\n[sweep]\nseeds = [1, 2]\nfolder = 'runs'\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("attention --path a.pt A --target B --beam 8", ("--target", "--beam")),
        ("average-checkpoints a.pt b.pt --best-checkpoint-metric bleu --output c.pt", ("--best",)),
        ("average-checkpoints runs --last 2 --best-checkpoint-metric bleu --output c.pt", ("--best",)),
        ("shortlist --lexicon lex.s2t --path a.pt --output c.pt --subset test", ("--subset", "DATA")),
        ("rerank nbest.jsonl -t de", ("--target-lang", "--backward or --lm or --tune")),
        ("rerank nbest.jsonl --plugin plug.py", ("--plugin", "--backward or --lm")),
        ("sweep sweep.toml --costs --shard 1/2", ("--costs", "--shard")),
        ("sweep sweep.toml --costs -- --max-update 10", ("--costs", "TRAIN_FLAGS")),
        ("distill a.en --from-server http://localhost --threads 2", ("--from-server", "--threads")),
        ("distill a.en --from-server http://localhost --plugin plug.py", ("--from-server", "--plugin")),
        (
            "distill a.en -s en -t de --from-server http://localhost --server-api deepl --prompt X",
            ("--prompt", "--server-api openai"),
        ),
        (
            "distill a.en -s en -t de --from-server http://localhost --server-model m --candidate-temperature 1",
            ("--candidate-temperature", "--candidates"),
        ),
        ("score --sys a.en --ref a.en --src a.en --by-length source -s it", ("--source-lang", "--path")),
    ],
)
def test_both_flags_are_named(
    words: str, named: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.pt", "b.pt", "lex.s2t", "nbest.jsonl", "plug.py", "a.en"):
        Path(name).write_text("x\n")
    Path("runs").mkdir()
    Path("sweep.toml").write_text(SWEEP)
    result = CliRunner().invoke(main, words.split())
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2 and all(flag in said for flag in named), result.output
    assert "does nothing without" in said or "cannot be combined" in said
    assert "--score-reference" not in said
