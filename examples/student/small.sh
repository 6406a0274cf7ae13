#!/usr/bin/env bash
# Trains a teacher with the shape of transformer_tiny, and a student of this teacher with run.sh. Run again to resume.
#
#   MULTI30K=/path/to/files ./small.sh captions        # Multi30k, English-German: train.en.gz, val.en.gz, …
#   DEBIAN=/path/to/debian ./small.sh descriptions     # English-Italian pairs of Debian's package descriptions
#
# Variables, with their defaults in brackets: WORK (captions or descriptions), the folder of all results; WORDS (12),
# the maximum number of words of a description; AVERAGE (8), checkpoints to average; for a trial, ROWS (all), the
# maximum number of training pairs, and VOCABULARY (6000). Other flags are passed to both trainings: --threads 1.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
corpus=${1:?give captions or descriptions}
shift
lines=${ROWS:-1000000}
work=${WORK:-$corpus}
mkdir -p "$work"
case $corpus in
captions)
    source=en target=de dropout=0.2 lr=0.005 warmup=400 batch_tokens=4096 teacher_updates=2300 student_updates=1300
    folder=${MULTI30K:?is not set: give the folder of train.en.gz}
    for side in en de; do
        gzip -dc "$folder/train.$side.gz" | awk -v lines="$lines" 'NR <= lines' > "$work/train.$side"
        gzip -dc "$folder/val.$side.gz" > "$work/valid.$side"
        gzip -dc "$folder/test_2016_flickr.$side.gz" > "$work/test.$side"
    done
    ;;
descriptions)
    source=en target=it dropout=0.1 lr=0.004 warmup=150 batch_tokens=1024 teacher_updates=2800 student_updates=2800
    set -- --pre-norm "$@" # with small updates, models with norms before the sub-layers need fewer tokens to learn
    folder=${DEBIAN:?is not set: give the folder of en-it.train.tsv.gz}
    for split in train valid test; do # the third column is 1 for repeated pairs
        [[ $split == train ]] && most=$lines || most=1000000
        gzip -dc "$folder/en-it.$split.tsv.gz" | awk -F '\t' -v prefix="$work/$split" -v lines="$most" -v words="${WORDS:-12}" \
            '$3 == 0 && split($4, en, " ") <= words && split($5, it, " ") <= words && ++used <= lines {
                print $4 > prefix ".en"; print $5 > prefix ".it"}'
    done
    ;;
*)
    echo "small.sh: $corpus is neither captions nor descriptions" >&2
    exit 2
    ;;
esac
cd "$work"
[[ -e data-bin/manifest.json ]] || nmtkit preprocess -s "$source" -t "$target" --trainpref train --validpref valid \
    --testpref test --vocab-size "${VOCABULARY:-6000}" --destdir data-bin
nmtkit train data-bin --arch transformer_tiny --positions sinusoidal_fairseq --lr-scheduler cosine \
    --save-interval-updates 115 --keep-last "${AVERAGE:-8}" --metrics none --save-dir teacher --dropout "$dropout" \
    --lr "$lr" --warmup-updates "$warmup" --batch-tokens "$batch_tokens" --max-update "$teacher_updates" "$@"
nmtkit average-checkpoints teacher --last "${AVERAGE:-8}" --output teacher.pt
TEACHER=teacher.pt TRAIN=train VALID=valid TEST=test SOURCE=$source TARGET=$target WORK=student NBEST=4 \
    ARCH=transformer_tiny ENTRIES=50 AVERAGE=${AVERAGE:-8} "$here/run.sh" --decoder-layers 2 \
    --decoder-self-attention ssru --zero-bos --positions sinusoidal_fairseq --finetune-from teacher.pt \
    --finetune-partial --dropout 0.1 --lr-scheduler cosine --lr 0.003 --warmup-updates 200 \
    --batch-tokens "$batch_tokens" --max-update "$student_updates" --save-interval-updates 60 --metrics none "$@"
