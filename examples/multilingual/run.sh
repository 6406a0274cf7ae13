#!/usr/bin/env bash
# Trains models of one direction, one model of eight directions, and a model that is pretrained by denoising and tuned
# on Polish. Then compares them on the test sets. Run the script again to resume.
#
#   DEBIAN=/path/to/debian ./run.sh
#   CONFIG=small.toml MANY_UPDATES=11200 WORDS=12 VOCABULARY=8000 SMALL=4000 DENOISING=no DEBIAN=… ./run.sh  # 2 CPUs
#   ROWS=200 WORK=trial DEBIAN=… ./run.sh --max-update 20       # a trial; flags are passed to `nmtkit train`
#
# Variables, with their defaults in brackets: WORK (work), the folder of all results; CONFIG (model.toml), the size and
# the budget; MANY_UPDATES (as in CONFIG), updates of the model of eight directions; WORDS (no limit), the maximum
# number of words on a side; ROWS (all), rows of each file; VOCABULARY (16000), for the model of eight directions and
# for denoising; SMALL (8000), the vocabulary of a model of one pair; LANGUAGES (it da de pl), baselines to train;
# DENOISING (yes); SYNTHETIC (20000), pairs of Italian and Danish; BEAM (5); AVERAGE (4), checkpoints to average.
set -euo pipefail

here=$(realpath "$(dirname "$0")")
debian=$(realpath "${DEBIAN:?is not set: give the folder of the package descriptions}")
work=${WORK:-work}
mkdir -p "$work"
cd "$work"
[[ -e data/it-da.test.da ]] ||
    python "$here/prepare.py" "$debian" data ${ROWS:+--lines "$ROWS"} ${WORDS:+--words "$WORDS"}

train() { # dataset, run, flags
    nmtkit train "$1" --config "$here/${CONFIG:-model.toml}" --save-dir "$2" "${@:3}"
    nmtkit average-checkpoints "$2" --last "${AVERAGE:-4}" --output "$2/averaged.pt"
}
translate() { # model, file of lines, name of the output without .txt, flags
    nmtkit generate --path "$1" --input "$2" --output "$3.txt" --beam "${BEAM:-5}" "${@:4}"
}
made() { [[ -e $1/manifest.json ]]; }

# 1. Baselines: a model for each direction, with the size and the number of updates of the other models.
for language in ${LANGUAGES:-it da de pl}; do
    for pair in "en $language" "$language en"; do
        read -r from to <<< "$pair"
        text=data/en-$language
        made "$from-$to-bin" || nmtkit preprocess -s "$from" -t "$to" --trainpref "$text.train" \
            --validpref "$text.valid" --testpref "$text.test" --vocab-size "${SMALL:-8000}" --destdir "$from-$to-bin"
        train "$from-$to-bin" "$from-$to" "$@"
        translate "$from-$to/averaged.pt" "$text.test.$from" "$from-$to"
    done
done

# 2. One model of eight directions. Polish has 3 % of the pairs; with this temperature, it has 18 % of an epoch.
made many-bin || nmtkit preprocess --corpora "$here/corpora.toml" --vocab-size "${VOCABULARY:-16000}" --destdir many-bin
train many-bin many --sampling-temperature 5 ${MANY_UPDATES:+--max-update "$MANY_UPDATES"} "$@"

# 3. Denoising, then fine-tuning on English-Polish and Polish-English.
if [[ ${DENOISING:-yes} == yes ]]; then
    made mono-bin || nmtkit preprocess --corpora "$here/denoising.toml" --tokenizer-from many-bin --destdir mono-bin
    train mono-bin denoising --transforms span_masking --sampling-temperature 5 --validate-interval-updates none "$@"
    for pair in "en pl" "pl en"; do
        read -r from to <<< "$pair"
        made "tuned-$from-$to-bin" || nmtkit preprocess -s "$from" -t "$to" --trainpref data/en-pl.train \
            --validpref data/en-pl.valid --tokenizer-from many-bin --source-language-token "$from" \
            --target-language-token "$to" --destdir "tuned-$from-$to-bin"
        train "tuned-$from-$to-bin" "tuned-$from-$to" --finetune-from denoising/averaged.pt --lr 0.0005 "$@"
        translate "tuned-$from-$to/averaged.pt" "data/en-pl.test.$from" "$from-$to.tuned" --source-lang "$from" \
            --target-lang "$to"
    done
fi

# 4. Compare: the first system of each table is the baseline; p is the significance of the difference from the baseline.
for language in ${LANGUAGES:-it da de pl}; do
    for pair in "en $language" "$language en"; do
        read -r from to <<< "$pair"
        translate many/averaged.pt "data/en-$language.test.$from" "$from-$to.many" --source-lang "$from" \
            --target-lang "$to"
        nmtkit score --ref "data/en-$language.test.$to" --sys "$from-$to.txt" --sys "$from-$to.many.txt" \
            --metric bleu,chrf | tee "$from-$to.scores.txt"
    done
done

for pair in en-pl pl-en; do
    [[ ! -e $pair.tuned.txt ]] || nmtkit score --ref "data/en-pl.test.${pair#*-}" --sys "$pair.txt" \
        --sys "$pair.tuned.txt" --sys "$pair.many.txt" --metric bleu,chrf | tee "$pair.tuned.scores.txt"
done

# 5. A direction without training pairs: Italian to Danish, directly and through English. Then the model is tuned with
# synthetic pairs of this direction: it has translated the English side of English-Danish pairs into Italian.
translate many/averaged.pt data/it-da.test.it it-da.zero --source-lang it --target-lang da
translate many/averaged.pt data/it-da.test.it it-da.pivot --source-lang it --target-lang da --pivot en
head -n "${SYNTHETIC:-20000}" data/en-da.train.da > data/it-da.synthetic.da
head -n "${SYNTHETIC:-20000}" data/en-da.train.en > synthetic.en
BEAM=1 translate many/averaged.pt synthetic.en synthetic --source-lang en --target-lang it
cp synthetic.txt data/it-da.synthetic.it
cat "$here/corpora.toml" "$here/it-da.toml" > it-da.toml
made it-da-bin || nmtkit preprocess --corpora it-da.toml --tokenizer-from many-bin --destdir it-da-bin
train it-da-bin it-da --finetune-from many/averaged.pt --lr 0.001 "$@"
translate it-da/averaged.pt data/it-da.test.it it-da.tuned --source-lang it --target-lang da
nmtkit score --ref data/it-da.test.da --sys it-da.pivot.txt --sys it-da.zero.txt --sys it-da.tuned.txt \
    --metric bleu,chrf,off-target --target-lang da --languages en,it,da,de,pl | tee it-da.scores.txt
