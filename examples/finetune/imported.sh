#!/usr/bin/env bash
# Fine-tunes a transformers model on a domain, once all weights and once adapters. Scores it on domain and general text.
#
#   ./imported.sh                       # transformers_model.py trains the model (needs transformers)
#   MODEL=/path/to/folder ./imported.sh # another model from English to German, in any form that `nmtkit import` reads
#
# The texts are the same as in run.sh. Run this script again to resume. Other flags are passed to every `nmtkit train`.
set -euo pipefail
cd "$(dirname "$0")"

texts=${TEXTS:-data} runs=${RUNS:-runs}
model=${MODEL:-$runs/transformers} base=$runs/imported.pt data=$runs/imported-bin
mkdir -p "$runs"
[[ -e $texts/domain.val.en ]] || python3 split.py "${MULTI30K:-../multi30k/data}" "$texts"
[[ -e $model ]] || python3 transformers_model.py "$texts" "$model"
[[ -e $base ]] || nmtkit import "$model" "$base" --try "A man rides a horse."
[[ -e $data/manifest.json ]] || nmtkit preprocess -s en -t de --trainpref "$texts/domain.train" \
    --validpref "$texts/domain.val,$texts/general.val" --tokenizer-from "$base" --destdir "$data"

tune() { # name, more flags
    nmtkit train "$data" --config tuned.toml --finetune-from "$base" --save-dir "$runs/imported-$1" \
        --save-interval-updates 20 --keep-last 3 "${@:2}"
    nmtkit average-checkpoints "$runs/imported-$1" --last 3 --output "$runs/imported-$1.pt"
}
[[ -e $runs/imported-full.pt ]] || tune full "$@"
[[ -e $runs/imported-adapters.pt ]] || tune adapters --adapter-rank 8 --lr 0.004 "$@"

for subset in valid valid1; do # text of the domain, and general text
    for name in imported imported-full imported-adapters; do
        nmtkit generate "$data" --gen-subset $subset --path "$runs/$name.pt" --beam 4 > "$runs/$name.$subset.de"
    done
    nmtkit score --data "$data" --gen-subset $subset --sys "$runs/imported.$subset.de" \
        --sys "$runs/imported-full.$subset.de" --sys "$runs/imported-adapters.$subset.de"
done
