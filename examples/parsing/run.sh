#!/usr/bin/env bash
# From Penn Treebank files to F1 in one command:
#
#     bash examples/parsing/run.sh TREEBANK [OUTPUT] [CONFIG]
#
# TREEBANK is a folder of .mrg files. OUTPUT is the folder for data and model (default: runs/parsing). CONFIG is a file
# of configs/: small.toml (default) is for a sample of the treebank on a CPU; wsj.toml is the setting of "Attention Is
# All You Need". The paper's choices for prepare.py are TAGS= PIECES=16000: XX instead of parts of speech, and 16,000
# pieces. With parts of speech, the search uses the tag dictionary of the training trees.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
treebank=${1:?give a folder of .mrg files} output=${2:-runs/parsing} config=${3:-$here/configs/small.toml}
tags=${TAGS---tags}
nmtkit=${NMTKIT:-nmtkit}
python=${PYTHON:-python3}

[ -e "$output/trees.model" ] || "$python" "$here/prepare.py" "$treebank" "$output" --pieces "${PIECES:-4000}" $tags
[ -e "$output/data-bin/manifest.json" ] || $nmtkit preprocess -s words -t trees --trainpref "$output/train" --validpref "$output/valid" \
    --testpref "$output/test" --tokenizer-from "$output/words.model,$output/trees.model" --destdir "$output/data-bin" \
    --alignments "$output/train.align" --max-len 1000 --max-line-bytes 100000
$nmtkit train "$output/data-bin" --config "$config" --save-dir "$output/checkpoints"
$nmtkit average-checkpoints "$output/checkpoints" --last 5 --output "$output/averaged.pt"

# Section 6.3: beam 21, length penalty 0.3, outputs of at most input + 300 tokens
$nmtkit generate "$output/data-bin" --gen-subset test --path "$output/averaged.pt" --beam 21 --lenpen 0.3 --max-len-a 1 \
    --max-len-b 300 --plugin "$here/well_formed.py" --logits-processors well_formed_trees \
    ${tags:+--tag-dictionary "$output/train.mrg"} > "$output/test.out"
"$python" "$here/restore.py" "$output/test.mrg" "$output/test.out" > "$output/parsed.mrg"
"$python" "$here/draw.py" "$output/parsed.mrg" "$output/trees.html" --gold "$output/test.mrg"
"$python" "$here/brackets.py" "$output/test.mrg" "$output/parsed.mrg"
