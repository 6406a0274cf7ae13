#!/usr/bin/env bash
# From an empty disk to data-bin/PAIR: fetch, unpack, count, train the joint vocabulary, binarize.
#
#   ./prepare.sh en-de      # 37,000 pieces, as in section 5.1
#   ./prepare.sh en-fr      # 32,000
#
# Run it again after an interruption. More flags go to `nmtkit preprocess`: ./prepare.sh en-de --workers 8
set -euo pipefail
cd "$(dirname "$0")"

pair=${1:?give en-de or en-fr}
shift
case $pair in
    en-de) vocabulary=37000 corpora="europarl-v7 commoncrawl news-commentary-v9" ;;
    en-fr) vocabulary=32000 corpora="europarl-v7 commoncrawl news-commentary-v9 un-2000 giga-fren" ;;
    *) echo "prepare.sh: no recipe for $pair; there are en-de and en-fr" >&2; exit 2 ;;
esac

python3 download.py "$pair" --folder data
if [[ -e data-bin/$pair/manifest.json ]]; then
    echo "data-bin/$pair is there already"
    exit
fi
prefixes=$(for corpus in $corpora; do printf ',%s' "data/$pair/$corpus"; done)
mkdir -p data-bin
nmtkit preprocess --source-lang en --target-lang "${pair#en-}" --trainpref "${prefixes#,}" \
    --validpref "data/$pair/newstest2013" --testpref "data/$pair/newstest2014" \
    --destdir "data-bin/$pair" --vocab-size "$vocabulary" "$@"
