#!/usr/bin/env bash
# Data diversification (Nguyen et al. 2020): makes data-bin-diversified, which contains the training set three times:
# the original, the English text with translations by the baseline, and the German text with translations by a baseline
# of the other direction. Of equal pairs, only one is kept. If a baseline is missing, the script trains it.
#
#   ./diversify.sh               # run it again to resume; ./run.sh diversified calls it
#
# MULTI30K=/path/to/files as in prepare.sh. Other flags are passed to `nmtkit generate`: --workers 2, --precision bf16.
set -euo pipefail
cd "$(dirname "$0")"

folder=${MULTI30K:-data}
./prepare.sh
[[ -e runs/baseline/averaged.pt ]] || ./run.sh baseline
if [[ -e data-bin-diversified/manifest.json ]]; then
    echo "data-bin-diversified exists already"
    exit
fi
if [[ ! -e data-bin-de-en/manifest.json ]]; then
    nmtkit preprocess --source-lang de --target-lang en --trainpref "$folder/train" --validpref "$folder/val" \
        --testpref "$folder/test_2016_flickr" --tokenizer-from data-bin --destdir data-bin-de-en
fi
[[ -e runs/baseline-de-en/averaged.pt ]] || DATA=data-bin-de-en RUN=baseline-de-en ./run.sh baseline --max-epoch 35
mkdir -p data
translate() { # direction, source language, target language, flags
    local output=data/$1.$3
    if [[ ! -e $output ]]; then
        nmtkit generate --path "runs/$1/averaged.pt" --input "$folder/train.$2.gz" --beam 5 --lenpen 1.4 "${@:4}" > "$output.part"
        mv "$output.part" "$output"
    fi
    gzip -dc "$folder/train.$2.gz" > "data/$1.$2"
}
translate baseline en de "$@"
translate baseline-de-en de en "$@"
nmtkit preprocess --source-lang en --target-lang de --trainpref "$folder/train,data/baseline,data/baseline-de-en" \
    --validpref "$folder/val" --testpref "$folder/test_2016_flickr" --tokenizer-from data-bin --drop-duplicates \
    --destdir data-bin-diversified
