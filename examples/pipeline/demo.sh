#!/usr/bin/env bash
# Writes the corpus of `nmtkit demo` to data/ and runs the pipeline of demo.toml. Flags are passed on: --list, --serve.
set -euo pipefail
cd "$(dirname "$0")"
if [[ ! -e data/test.de ]]; then
    mkdir -p data
    python -c "from pathlib import Path; from nmtkit.demo.run import read_corpus, write_corpus; write_corpus(read_corpus(), Path('data'))"
fi
python pipeline.py demo.toml "$@"
