#!/usr/bin/env bash
# Makes data-bin/PAIR: downloads, unpacks and counts the texts, learns the joint vocabulary, and binarizes.
#
#   ./prepare.sh en-de      # 37,000 pieces, see section 5.1
#   ./prepare.sh en-fr      # 32,000
#
# After an interruption, run it again. Other flags are passed to `nmtkit preprocess`: ./prepare.sh en-de --workers 8
set -euo pipefail
cd "$(dirname "$0")"

pair=${1:?give en-de or en-fr}
shift
case $pair in
    en-de) vocabulary=37000 corpora="europarl-v7 commoncrawl news-commentary-v9" ;;
    en-fr) vocabulary=32000 corpora="europarl-v7 commoncrawl news-commentary-v9 un-2000 giga-fren" ;;
    *) echo "prepare.sh: unknown pair $pair; give en-de or en-fr" >&2; exit 2 ;;
esac

python3 download.py "$pair" --folder data
if [[ -e data-bin/$pair/manifest.json ]]; then
    echo "data-bin/$pair exists already"
    exit
fi
prefixes=$(for corpus in $corpora; do printf ',%s' "data/$pair/$corpus"; done)
mkdir -p data-bin
nmtkit preprocess --source-lang en --target-lang "${pair#en-}" --trainpref "${prefixes#,}" \
    --validpref "data/$pair/newstest2013" --testpref "data/$pair/newstest2014" \
    --destdir "data-bin/$pair" --vocab-size "$vocabulary" "$@"
