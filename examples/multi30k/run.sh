#!/usr/bin/env bash
# Trains a recipe, averages its last checkpoints and scores: on the valid set, where choices are made, and on the test
# set only when asked, once for a recipe that is reported.
#
#   ./run.sh baseline              # baseline.toml; run it again to resume
#   ./run.sh baseline --test       # also test_2016
#   ./run.sh diversified           # what it starts from is made first, if it is not there
#   DATA=data-bin-de-en RUN=baseline-de-en ./run.sh baseline    # on other data, to runs/$RUN
#
# BEAM=5 and LENPEN=1.4 (the baseline's best of 0.6, 1, 1.2, 1.4 and 2 on the valid set) and AVERAGE checkpoints, else
# all that the recipe keeps, may be set; more flags go to `nmtkit train`.
set -euo pipefail
cd "$(dirname "$0")"

recipe=${1:?give the name of a TOML file here, baseline say}
shift
subsets=(valid)
if [[ ${1:-} == --test ]]; then
    subsets+=(test)
    shift
fi
data=${DATA:-data-bin}
if [[ $recipe == diversified ]]; then
    ./diversify.sh
    data=data-bin-diversified
fi
folder=runs/${RUN:-$recipe}
last=${AVERAGE:-$(sed -n 's/^keep_last = //p' "$recipe.toml")}
nmtkit train "$data" --config "$recipe.toml" --save-dir "$folder" "$@"
nmtkit average-checkpoints "$folder" --last "$last" --output "$folder/averaged.pt"
for subset in "${subsets[@]}"; do
    nmtkit generate "$data" --gen-subset "$subset" --path "$folder/averaged.pt" --beam "${BEAM:-5}" \
        --lenpen "${LENPEN:-1.4}" > "$folder/$subset.txt"
    echo "$recipe on $subset:"
    nmtkit score --data "$data" --gen-subset "$subset" --sys "$folder/$subset.txt" --confidence |
        tee "$folder/$subset.score.txt"
done
