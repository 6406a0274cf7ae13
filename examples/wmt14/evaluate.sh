#!/usr/bin/env bash
# Runs after training: averages the last 5 (base) or 20 (big) checkpoints (section 6.1), translates newstest2014 with
# beam 4 and length penalty 0.6, and computes scores. ./evaluate.sh en-de base
set -euo pipefail
cd "$(dirname "$0")"

pair=${1:?give en-de or en-fr} size=${2:?give base or big}
target=${pair#en-} folder=runs/$pair-$size
case $size in
    base) last=5 ;;
    big) last=20 ;;
    *) echo "evaluate.sh: unknown size $size; give base or big" >&2; exit 2 ;;
esac

nmtkit average-checkpoints "$folder" --last "$last" --output "$folder/averaged.pt"
nmtkit generate "data-bin/$pair" --gen-subset test --path "$folder/averaged.pt" --beam 4 --lenpen 0.6 \
    --max-len-a 1 --max-len-b 50 > "$folder/newstest2014.$target"
nmtkit score --data "data-bin/$pair" --sys "$folder/newstest2014.$target" --confidence | tee "$folder/score.txt"
if python3 -c 'import sacremoses' 2> /dev/null; then # BLEU as in the table of the paper
    nmtkit score --data "data-bin/$pair" --sys "$folder/newstest2014.$target" --metric tokenized-bleu |
        tee "$folder/score-tokenized.txt"
fi
