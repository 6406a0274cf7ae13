#!/usr/bin/env bash
# Trains a student of a teacher, and compares both on the test set with int8 weights. Run it again to resume.
#
#   TEACHER=averaged.pt TRAIN=train VALID=val TEST=test SOURCE=en TARGET=de ./run.sh
#   ARCH=student_base KEEP=0.95 … ./run.sh --lr 0.0003 --max-update 50000   # other flags are passed to `nmtkit train`
#
# TRAIN, VALID and TEST are prefixes: train.en and train.de. Other variables, with their defaults in brackets: WORK
# (student), the folder of all results; ARCH (student_tiny); NBEST (8); CANDIDATES (the teacher translates), a file of
# translations, see choose.py; BACKWARD (none), a model from TARGET to SOURCE whose scores filter the pairs instead of
# the scores of the teacher; KEEP (1), the share of the pairs to keep, those with the highest scores; TOP_K (8), pieces
# of the teacher for each token; AVERAGE (8), checkpoints to average; ENTRIES (100), pieces of the shortlist for each
# source piece.
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
candidates=${CANDIDATES:-$work/candidates.jsonl}
mkdir -p "$work"
if [[ ! -e $candidates ]]; then # finished shards are kept, so this step continues after a stop
    nmtkit generate --path "$teacher" --input "$train.$source" --beam "$nbest" --nbest "$nbest" --format jsonl \
        --output-dir "$work/shards"
    nmtkit merge "$work/shards" --output "$candidates"
fi
if [[ ! -e $work/data-bin/manifest.json ]]; then
    choose=(python "$here/choose.py" --source "$train.$source")
    if [[ -n ${BACKWARD:-} ]]; then
        "${choose[@]}" "$candidates" --references "$train.$target" "$work/all.$source" "$work/all.$target"
        nmtkit generate --path "$BACKWARD" --input "$work/all.$target" --reference "$work/all.$source" \
            --score-reference --output-dir "$work/scores"
        nmtkit merge "$work/scores" --output "$work/scores.txt"
        python "$here/choose.py" --source "$work/all.$source" "$work/all.$target" --scores "$work/scores.txt" \
            --keep "${KEEP:-1}" "$work/distilled.$source" "$work/distilled.$target"
    else
        "${choose[@]}" "$candidates" --references "$train.$target" --keep "${KEEP:-1}" \
            "$work/distilled.$source" "$work/distilled.$target"
    fi
    nmtkit preprocess --source-lang "$source" --target-lang "$target" --trainpref "$work/distilled" --validpref "$valid" \
        --testpref "$test" --tokenizer-from "$teacher" --destdir "$work/data-bin"
fi
nmtkit distill "$work/data-bin" --path "$teacher" --top-k "${TOP_K:-8}"
nmtkit train "$work/data-bin" --arch "${ARCH:-student_tiny}" --criterion kd_cross_entropy \
    --teacher-probabilities "$work/data-bin/teacher" --save-dir "$work/run" --keep-last "${AVERAGE:-8}" "$@"
nmtkit average-checkpoints "$work/run" --last "${AVERAGE:-8}" --output "$work/student.pt"
nmtkit shortlist "$work/data-bin" --path "$work/student.pt" --entries "${ENTRIES:-100}"
rm -f "$work/student-int8.pt" # the result of an earlier run
nmtkit export --format checkpoint --quantization int8 "$work/student.pt" "$work/student-int8.pt"
compare() { # MODEL FLAGS…
    echo "$* on the test set:"
    local model=$1
    nmtkit generate "$work/data-bin" --path "$model" --precision int8 --device cpu --workers 1 "${@:2}" > "$work/test.txt"
    nmtkit score --data "$work/data-bin" --sys "$work/test.txt"
}
compare "$teacher"
for student in "$work/student.pt" "$work/student-int8.pt"; do
    compare "$student"
    compare "$student" --shortlist
    compare "$student" --shortlist --beam 1
done
ls -lL "$teacher" "$work/student.pt" "$work/student-int8.pt"
