#!/usr/bin/env bash
# Makes data-bin from Multi30k, task 1, English-German: 29,000 training, 1,014 valid, 1,000 test pairs (2016, Flickr).
#
#   ./prepare.sh                          # downloads the six files, 1.3 MB
#   MULTI30K=/path/to/files ./prepare.sh  # uses a folder with train.en.gz, val.en.gz, …
#   DATA=data-bin-5000 ./prepare.sh --vocab-size 5000    # the folder of another dataset
#
# Other flags are passed to `nmtkit preprocess`.
set -euo pipefail
cd "$(dirname "$0")"

site=https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw
folder=${MULTI30K:-data}
check() { # file lines
    local lines
    lines=$(gzip -dc "$1" | wc -l)
    [[ $lines == "$2" ]] || { echo "prepare.sh: $1 has $lines lines, not $2; remove it and try again" >&2; exit 1; }
}
for side in en de; do
    for text in train:29000 val:1014 test_2016_flickr:1000; do
        file=$folder/${text%:*}.$side.gz
        if [[ ! -e $file ]]; then
            mkdir -p "$folder"
            curl --fail --location --continue-at - --output "$file.part" "$site/${text%:*}.$side.gz"
            mv "$file.part" "$file"
        fi
        check "$file" "${text#*:}"
    done
done
data=${DATA:-data-bin}
if [[ -e $data/manifest.json ]]; then
    echo "$data exists already"
    exit
fi
nmtkit preprocess --source-lang en --target-lang de --trainpref "$folder/train" --validpref "$folder/val" \
    --testpref "$folder/test_2016_flickr" --destdir "$data" --vocab-size 10000 "$@"
