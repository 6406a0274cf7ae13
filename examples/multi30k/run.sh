#!/usr/bin/env bash
# Trains a recipe, averages its last checkpoints and computes scores: on the valid set, and with --test also on the test
# set. Choose between recipes on the valid set, and use the test set once for the recipe that you report.
#
#   ./run.sh baseline              # baseline.toml; run it again to resume
#   ./run.sh baseline --test       # also test_2016
#   ./run.sh diversified           # first trains the baselines if they are missing
#   DATA=data-bin-de-en RUN=baseline-de-en ./run.sh baseline    # other data, results in runs/$RUN
#
# Variables: BEAM (5), LENPEN (1.4, the best of 0.6, 1, 1.2, 1.4 and 2 for the baseline on the valid set) and AVERAGE
# (the number of averaged checkpoints, by default all that the recipe keeps). Other flags are passed to `nmtkit train`.
set -euo pipefail
cd "$(dirname "$0")"

recipe=${1:?give the name of a TOML file in this folder, such as baseline}
shift
subsets=(valid)
if [[ ${1:-} == --test ]]; then
    subsets+=(test)
    shift
fi
data=${DATA:-data-bin}
if [[ $recipe == diversified ]]; then
    env -u DATA -u RUN -u AVERAGE ./diversify.sh # the variables are for this recipe, not for its baselines
    data=data-bin-diversified
fi
folder=runs/${RUN:-$recipe}
last=${AVERAGE:-$(sed -n 's/^keep_last = \([0-9]*\).*/\1/p' "$recipe.toml")}
nmtkit train "$data" --config "$recipe.toml" --save-dir "$folder" "$@"
nmtkit average-checkpoints "$folder" --last "$last" --output "$folder/averaged.pt"
for subset in "${subsets[@]}"; do
    nmtkit generate "$data" --gen-subset "$subset" --path "$folder/averaged.pt" --beam "${BEAM:-5}" \
        --lenpen "${LENPEN:-1.4}" > "$folder/$subset.txt"
    echo "$recipe on $subset:"
    nmtkit score --data "$data" --gen-subset "$subset" --sys "$folder/$subset.txt" --confidence |
        tee "$folder/$subset.score.txt"
done
