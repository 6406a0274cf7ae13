"""Searches for a learning rate and a dropout with Optuna, and stops runs that are worse than others at the same update.

python examples/plugin/optuna_pruning.py data-bin
"""

import sys
from typing import Any

import optuna

import nmtkit
from nmtkit.extend import Callback, RunState


class OptunaPruning(Callback):
    """Reports the loss of each validation to a trial, and stops the run if the pruner of the study decides so."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial
        self.pruned = False

    def validation(self, run: RunState, scores: Any) -> None:
        self.trial.report(scores["loss"], run.update)
        if self.trial.should_prune():
            self.pruned = True
            run.stop("pruned by Optuna")


def search(data: str, trials: int, **settings: Any) -> optuna.Study:
    """Trains `trials` runs with common `settings`, each in its own folder, and returns the study."""

    def objective(trial: optuna.Trial) -> float:
        tried = {
            "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
            "dropout": trial.suggest_float("dropout", 0, 0.4),
        }
        pruning = OptunaPruning(trial)
        result = nmtkit.train(settings | tried | {"save_dir": f"optuna/{trial.number}"}, data, [pruning])
        if pruning.pruned:
            raise optuna.TrialPruned
        return result.scores["loss"]

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1), pruner=optuna.pruners.MedianPruner())
    study.optimize(objective, n_trials=trials)
    return study


if __name__ == "__main__":
    found = search(sys.argv[1], 20, arch="transformer_tiny", max_update=3000, validate_interval_updates=500)
    print(found.best_params)
