#!/usr/bin/env bash
# Trains a student of a teacher, and scores both on the test set with int8 weights. Run it again to resume.
#
#   TEACHER=averaged.pt TRAIN=train VALID=val TEST=test SOURCE=en TARGET=de ./run.sh
#   ARCH=student_base KEEP=0.95 … ./run.sh --lr 0.0003 --max-update 50000    # other flags are passed to `nmtkit train`
#
# TRAIN, VALID and TEST are prefixes: train.en and train.de. Variables: WORK (folder of all results, student), ARCH
# (student_tiny), NBEST (8), KEEP (1: the share of the pairs with the highest scores of the teacher), AVERAGE (8
# checkpoints).
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
teacher=${TEACHER:?is not set: give the checkpoint of the teacher}
train=${TRAIN:?is not set: give the prefix of the training text}
valid=${VALID:?is not set: give the prefix of the valid set}
test=${TEST:?is not set: give the prefix of the test set}
source=${SOURCE:?is not set: give the source language}
target=${TARGET:?is not set: give the target language}
work=${WORK:-student}
nbest=${NBEST:-8}
mkdir -p "$work"
if [[ ! -e $work/candidates.jsonl ]]; then # --output creates the file when it is complete
    nmtkit generate --path "$teacher" --input "$train.$source" --beam "$nbest" --nbest "$nbest" --format jsonl \
        --output "$work/candidates.jsonl"
fi
if [[ ! -e $work/data-bin/manifest.json ]]; then
    python "$here/choose.py" "$work/candidates.jsonl" "$train.$target" "$work/distilled.$source" "$work/distilled.$target" \
        --keep "${KEEP:-1}"
    nmtkit preprocess --source-lang "$source" --target-lang "$target" --trainpref "$work/distilled" --validpref "$valid" \
        --testpref "$test" --tokenizer-from "$teacher" --destdir "$work/data-bin"
fi
nmtkit train "$work/data-bin" --arch "${ARCH:-student_tiny}" --criterion kd_cross_entropy --teacher "$teacher" \
    --save-dir "$work/run" "$@"
nmtkit average-checkpoints "$work/run" --last "${AVERAGE:-8}" --output "$work/student.pt"
for model in "$teacher" "$work/student.pt"; do
    nmtkit generate "$work/data-bin" --path "$model" --precision int8 --device cpu > "$work/test.txt"
    echo "$model on the test set:"
    nmtkit score --data "$work/data-bin" --sys "$work/test.txt"
done
