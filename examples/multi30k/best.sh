#!/usr/bin/env bash
# The best recipe for one text-only model from the 29,000 pairs alone, in 3 core-hours. Teachers of both directions with
# several seeds translate the training set (Nguyen et al. 2020). Then the first teacher trains on the original and the
# new pairs, and its last checkpoints are averaged. All models have rotary positions and train with Muon. Run the script
# again to resume.
#
#   ./best.sh                                      # scores the valid set
#   ./best.sh --test                               # also test_2016: once, for the recipe that you report
#   SEEDS="1 2 3" ./best.sh                        # three models, with the same teachers
#   RUN=plain TEACHERS=0 UPDATES=4600 DROPOUT=0.3 ./best.sh    # without teachers
#
# Other flags are passed to every `nmtkit train`. Variables, with their defaults in brackets:
#   RUN (best)                name of the results: runs/$RUN, data/$RUN, data-bin-$RUN
#   VOCAB (5000)              pieces of the joint vocabulary
#   TEACHERS (2)              teachers of each direction, with the seeds 1, 2, …; 0: only the 29,000 pairs
#   TEACHER_UPDATES (2300)
#   MBR (no)                  bleu: teachers choose among 20 translations by minimum Bayes risk
#   BOTH_UPDATES (0)          updates of bidirectional pretraining (Ding et al. 2021) before the other updates
#   UPDATES (4400), DROPOUT (0.2)
#   START (teacher)           the model starts from the first teacher; random: from random weights
#   LATE_UPDATES (0), LATE_DROPOUT (0.1)    number of final updates with BPE-dropout, and its rate
#   AVERAGE (8)               checkpoints to average, 100 updates apart
#   PRECISION (auto)          bf16 on processors with such instructions, else fp32
#   SEEDS (1), BEAM (5), LENPEN (1.4)
#   CRITERION (label_smoothed_cross_entropy)      for the model; teachers always have label_smoothed_cross_entropy
set -euo pipefail
cd "$(dirname "$0")"

subsets=(valid)
if [[ ${1:-} == --test ]]; then
    subsets+=(test)
    shift
fi
run=${RUN:-best}
vocab=${VOCAB:-5000}
teachers=${TEACHERS:-2}
late=${LATE_UPDATES:-0}
folder=${MULTI30K:-data}
text=data/$run
mkdir -p "runs/$run" "$text"

core_hours() { # adds the CPU time of this call to a list, and prints the sum over all calls
    times > "runs/$run/times.part"
    tail -n 1 "runs/$run/times.part" >> "runs/$run/times.txt"
    rm "runs/$run/times.part"
    awk '{ for (i = 1; i <= 2; i++) { split($i, part, "m"); sum += 60 * part[1] + part[2] } }
        END { printf "core-hours so far: %.2f\n", sum / 3600 }' "runs/$run/times.txt" >&2
}
trap core_hours EXIT

train() { # folder, dataset, flags: trains and averages
    if [[ ! -e $1/averaged.pt ]]; then
        nmtkit train "$2" --config best.toml --save-dir "$1" --precision "${PRECISION:-auto}" "${@:3}"
        nmtkit average-checkpoints "$1" --last "${AVERAGE:-8}" --output "$1/averaged.pt"
    fi
}
translate() { # teacher, text, output, flags of the search
    [[ -e $3 ]] || nmtkit generate --path "$1/averaged.pt" --input "$2" --output "$3" --lenpen "${LENPEN:-1.4}" "${@:4}"
}
preprocess() { # source language, target language, training texts, folder, flags
    if [[ ! -e $4/manifest.json ]]; then
        nmtkit preprocess --source-lang "$1" --target-lang "$2" --trainpref "$3" --validpref "$folder/val" \
            --testpref "$folder/test_2016_flickr" --destdir "$4" "${@:5}"
    fi
}

data=data-bin-$vocab
DATA=$data ./prepare.sh --vocab-size "$vocab"
if [[ $teachers -gt 0 ]]; then
    preprocess de en "$folder/train" "$data-de-en" --tokenizer-from "$data"
    search=(--beam "${BEAM:-5}")
    [[ ${MBR:-no} == no ]] || search=(--beam 20 --nbest 20 --mbr "$MBR")
    texts=$folder/train
    for seed in $(seq "$teachers"); do
        for pair in en-de de-en; do
            source=${pair%-*} target=${pair#*-} of_pair=$data
            [[ $pair == en-de ]] || of_pair=$data-de-en
            teacher=runs/$run/$pair-$seed
            train "$teacher" "$of_pair" --seed "$seed" --max-update "${TEACHER_UPDATES:-2300}" "$@"
            translate "$teacher" "$folder/train.$source.gz" "$text/$pair-$seed.$target" "${search[@]}"
            gzip -dc "$folder/train.$source.gz" > "$text/$pair-$seed.$source"
            texts+=,$text/$pair-$seed
        done
    done
    preprocess en de "$texts" "data-bin-$run" --tokenizer-from "$data" --drop-duplicates
    data=data-bin-$run
fi
if [[ ${BOTH_UPDATES:-0} -gt 0 ]]; then # both directions in one dataset: each pair occurs as it is and reversed
    gzip -dc "$folder/train.en.gz" "$folder/train.de.gz" > "$text/both.en"
    gzip -dc "$folder/train.de.gz" "$folder/train.en.gz" > "$text/both.de"
    preprocess en de "$text/both" "data-bin-$run-both" --tokenizer-from "data-bin-$vocab"
fi
of_model=(--criterion "${CRITERION:-label_smoothed_cross_entropy}" --dropout "${DROPOUT:-0.2}")
for seed in ${SEEDS:-1}; do
    model=runs/$run/main-$seed start=()
    [[ ${START:-teacher} == random || $teachers == 0 ]] || start=(--finetune-from "runs/$run/en-de-1/averaged.pt")
    if [[ ${BOTH_UPDATES:-0} -gt 0 ]]; then
        train "runs/$run/both-$seed" "data-bin-$run-both" --seed "$seed" --max-update "$BOTH_UPDATES" \
            "${of_model[@]}" "$@"
        start=(--finetune-from "runs/$run/both-$seed/averaged.pt")
    fi
    train "$model" "$data" --seed "$seed" --max-update "${UPDATES:-4400}" "${of_model[@]}" \
        ${start[@]+"${start[@]}"} "$@"
    if [[ $late -gt 0 ]]; then
        train "runs/$run/late-$seed" "$data" --seed "$seed" --max-update "$late" "${of_model[@]}" \
            --finetune-from "$model/averaged.pt" --transforms bpe_dropout --bpe-dropout "${LATE_DROPOUT:-0.1}" \
            --lr 0.001 "$@"
        model=runs/$run/late-$seed
    fi
    for subset in "${subsets[@]}"; do
        nmtkit generate "$data" --gen-subset "$subset" --path "$model/averaged.pt" --beam "${BEAM:-5}" \
            --lenpen "${LENPEN:-1.4}" --output "$model/$subset.txt"
        echo "seed $seed on $subset, cased and lower-cased:"
        nmtkit score --data "$data" --gen-subset "$subset" --sys "$model/$subset.txt" --confidence |
            tee "$model/$subset.score.txt"
        nmtkit score --data "$data" --gen-subset "$subset" --sys "$model/$subset.txt" --metric bleu --lowercase |
            tee -a "$model/$subset.score.txt"
    done
done
