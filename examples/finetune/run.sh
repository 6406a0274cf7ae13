#!/usr/bin/env bash
# Trains a general model, fine-tunes it on a domain in four ways, and prints the scores on domain and general text.
#
#   ./run.sh                            # the texts of ../multi30k/data, which ../multi30k/prepare.sh fetches
#   MULTI30K=/path/to/files ./run.sh    # train.en.gz, train.de.gz, val.en.gz and val.de.gz in another folder
#
# Run this script again to resume. Other flags are passed to every `nmtkit train`.
set -euo pipefail
cd "$(dirname "$0")"

texts=${TEXTS:-data} runs=${RUNS:-runs}
[[ -e $texts/domain.val.en ]] || python3 split.py "${MULTI30K:-../multi30k/data}" "$texts"

preprocess() { # dataset, corpora, more flags; the subset `valid` is text of the domain, `valid1` is general text
    [[ -e $runs/$1/manifest.json ]] && return
    nmtkit preprocess -s en -t de --trainpref "$2" --validpref "$texts/domain.val,$texts/general.val" \
        --destdir "$runs/$1" "${@:3}"
}
mkdir -p "$runs"
preprocess general-bin "$texts/general.train" --vocab-size "${VOCAB:-4000}"
nmtkit train "$runs/general-bin" --config general.toml --save-dir "$runs/general" "$@"

base=$runs/general/last.pt
preprocess domain-bin "$texts/domain.train" --tokenizer-from "$base"
preprocess mixed-bin "$texts/domain.train,$texts/some.train" --tokenizer-from "$base"

tune() { # name dataset, more flags
    nmtkit train "$runs/$2" --config tuned.toml --finetune-from "$base" --save-dir "$runs/$1" "${@:3}"
}
tune full domain-bin "$@"
tune frozen domain-bin --freeze '*_embedding.*' "$@"
tune adapters domain-bin --adapter-rank 8 --lr 0.004 "$@"
tune mixed mixed-bin "$@"
python3 table.py "$runs"
