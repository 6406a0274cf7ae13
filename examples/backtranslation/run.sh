#!/usr/bin/env bash
# Back-translation: makes training pairs from text in the target language, and measures the gain. Run again to resume.
#
#   BITEXT=train MONO=news.de VALID=val TEST=test SOURCE=en TARGET=de ./run.sh
#   WEIGHTS=2,1 WORKERS=8 … ./run.sh --arch transformer_base --max-update 50000   # flags are passed to `nmtkit train`
#
# BITEXT, VALID and TEST are prefixes: train.en and train.de. MONO is a file of lines in TARGET. Other variables, with
# their defaults in brackets: WORK (backtranslation), the folder of all results; BACK (trained on BITEXT), a model from
# TARGET to SOURCE; WORKERS (1), CPU processes of generate; SEARCH (--sampling), flags of generate; WEIGHTS (1,1), how
# often an epoch has each pair of BITEXT and each synthetic pair; AVERAGE (8), checkpoints to average; VOCABULARY
# (16000).
set -euo pipefail

bitext=${BITEXT:?is not set: give the prefix of the training text}
mono=${MONO:?is not set: give the file with text in the target language}
valid=${VALID:?is not set: give the prefix of the valid set}
test=${TEST:?is not set: give the prefix of the test set}
source=${SOURCE:?is not set: give the source language}
target=${TARGET:?is not set: give the target language}
work=${WORK:-backtranslation}
mkdir -p "$work"

preprocess() { # folder, source language, target language, flags
    [[ -e $1/manifest.json ]] || nmtkit preprocess --source-lang "$2" --target-lang "$3" --validpref "$valid" \
        --testpref "$test" --destdir "$1" "${@:4}"
}
train() { # dataset, run, flags
    nmtkit train "$1" --save-dir "$2" --keep-last "${AVERAGE:-8}" "${@:3}"
    nmtkit average-checkpoints "$2" --last "${AVERAGE:-8}" --output "$2/averaged.pt"
}

# 1. Train a model of the other direction.
back=${BACK:-$work/back/averaged.pt}
if [[ ! -e $back ]]; then
    preprocess "$work/back-bin" "$target" "$source" --trainpref "$bitext" --vocab-size "${VOCABULARY:-16000}"
    train "$work/back-bin" "$work/back" "$@"
fi

# 2. Clean the text: each line is a pair with itself, and only filters for any language are used.
if [[ ! -e $work/mono.$target ]]; then
    cp "$mono" "$work/raw.$target"
    cp "$mono" "$work/raw.$source"
    nmtkit clean -s "$source" -t "$target" "$work/raw" --output "$work/mono" --duplicates target \
        --filters empty,length,boilerplate,repetition
fi

# 3. Translate the clean text into the source language, with samples instead of best translations (Edunov et al. 2018).
if [[ ! -e $work/sampled.$source ]]; then # --output creates the file when it is complete
    # shellcheck disable=SC2086
    nmtkit generate --path "$back" --input "$work/mono.$target" --output-dir "$work/shards" --workers "${WORKERS:-1}" \
        ${SEARCH:---sampling}
    nmtkit merge "$work/shards" --output "$work/sampled.$source"
fi

# 4. Clean the synthetic pairs.
if [[ ! -e $work/synthetic.$source ]]; then
    cp "$work/mono.$target" "$work/sampled.$target"
    nmtkit clean -s "$source" -t "$target" "$work/sampled" --output "$work/synthetic" --exclude "$valid,$test" \
        --report "$work/synthetic.html"
fi

# 5. Mix: synthetic source lines begin with a tag (Caswell et al. 2019). Both datasets have the same vocabulary.
preprocess "$work/mixed-bin" "$source" "$target" --trainpref "$bitext,$work/synthetic" --tag ",<BT>" \
    --weights "${WEIGHTS:-1,1}" --vocab-size "${VOCABULARY:-16000}"
preprocess "$work/bitext-bin" "$source" "$target" --trainpref "$bitext" --tokenizer-from "$work/mixed-bin"

# 6. Train with and without synthetic pairs, and compare the scores, with the significance of the difference.
for name in bitext mixed; do
    train "$work/$name-bin" "$work/$name" "$@"
    nmtkit generate "$work/$name-bin" --path "$work/$name/averaged.pt" --output "$work/$name.txt"
done
nmtkit score --data "$work/mixed-bin" --sys "$work/bitext.txt" --sys "$work/mixed.txt" | tee "$work/scores.txt"
