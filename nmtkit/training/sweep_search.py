"""Random settings of a sweep chosen by Optuna: what earlier runs scored guides the next, and what falls behind ends.

The study is a file in the sweep's folder, so that a search goes on where it was stopped, and machines can share one.
"""

import functools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from nmtkit.processes.folder_lock import holder_of
from nmtkit.training import comparison
from nmtkit.training.metrics import objective
from nmtkit.training.report import latest_records
from nmtkit.training.sweep import Range, Sweep, SweepRun

log = logging.getLogger("nmtkit")

NAME = "optuna.log"
Attempt = Callable[[SweepRun, Callable[[], bool]], str | None]  # trains a run; returns why it failed


class Watched:
    """A trial and the scores of its run so far."""

    def __init__(self, trial: Any, scores: Callable[[], list[tuple[int, float]]]) -> None:
        self.trial = trial
        self.read = scores
        self.scores: list[float] = []
        self.pruned = False

    def go_on(self) -> bool:
        """Reports new scores to the study, and returns whether the run is to go on."""
        for update, score in self.read()[len(self.scores) :]:
            self.trial.report(score, update)
            self.scores.append(score)
            self.pruned = self.pruned or self.trial.should_prune()
        return not self.pruned


class Search:
    """An Optuna study of a sweep's `[sweep.random]`. Raises ImportError without Optuna, ValueError for other sweeps."""

    def __init__(self, sweep: Sweep) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ImportError("--optuna needs Optuna, which is not installed: pip install 'nmtkit[optuna]'") from error
        if not sweep.space:
            raise ValueError(f"{sweep.file}: --optuna searches what [sweep.random] gives, and there is none")
        if sweep.grid or len(sweep.zipped) > 1 or len(sweep.named) > 1 or len(sweep.seeds) > 1:
            raise ValueError(f"{sweep.file}: --optuna goes with [sweep.random] and one seed alone")
        self.optuna = optuna
        self.sweep = sweep
        self.title = next(iter(sweep.named))
        first = {name: v.low if isinstance(v, Range) else v[0] for name, v in sweep.space.items()}
        job = sweep.job(self._run_of(first))  # says what is wrong with the file
        if not job.run.validates:
            raise ValueError(f"{sweep.file}: --optuna goes by validations, and these runs make none")
        self.objective = objective(job.run.best_checkpoint_metric, job.metrics())

    def described(self) -> list[str]:
        """Returns lines about the search for a dry run."""
        values = {
            name: f"{v.low:g} to {v.high:g}{', logarithmic' if v.log else ''}" if isinstance(v, Range) else str(list(v))
            for name, v in self.sweep.space.items()
        }
        return [
            f"{self.sweep.draws} runs by {self.objective.name}, of",
            *(f"  {name}: {text}" for name, text in values.items()),
        ]

    def run(self, attempt: Attempt, check: Callable[[], None]) -> dict[str, str]:
        """Makes runs until there are as many as draws; returns the reasons of what failed by name.

        `check` is called after each run, and may raise.
        """
        study, failed = self._study(), {}
        self._enqueue_interrupted(study)
        while self._begun(study) < self.sweep.draws:
            trial = study.ask(self._distributions())
            run = self._run_of(self._settings(trial.params))
            log.info("run %d of %d, %s", self._begun(study), self.sweep.draws, run.name)
            watched = Watched(trial, functools.partial(self._scores, run))
            reason = attempt(run, watched.go_on)
            check()
            watched.go_on()
            if reason or not watched.scores:
                failed[run.name] = reason or "no validation was made"
                study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
            elif watched.pruned:
                log.info("%s falls behind, and was ended", run.name)
                study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
            else:
                study.tell(trial, min(watched.scores))
        return failed

    def runs(self) -> list[SweepRun]:
        """Returns the runs of the study so far, best first, then those that were ended or failed."""
        trials = self._study().trials
        order = sorted(trials, key=lambda trial: (trial.state.name != "COMPLETE", trial.value or 0.0, trial.number))
        found = [self._run_of(self._settings(trial.params)) for trial in order if trial.params]
        return list({run.name: run for run in found}.values())

    # --- the study --------------------------------------------------------------------------------------------------

    def _study(self) -> Any:
        optuna = self.optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep.folder.mkdir(parents=True, exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(self.sweep.folder / NAME))
        study = optuna.create_study(
            study_name=self.sweep.file.name,
            storage=optuna.storages.JournalStorage(backend),
            pruner=optuna.pruners.MedianPruner(),
            load_if_exists=True,
        )
        # a sampler begins anew each time: one seed would draw again what the study has
        study.sampler = optuna.samplers.TPESampler(seed=self.sweep.seed + len(study.trials))
        return study

    def _distributions(self) -> dict[str, Any]:
        kinds = self.optuna.distributions
        made = {}
        for name, values in self.sweep.space.items():
            if not isinstance(values, Range):  # of plain types only; lists go as text
                made[name] = kinds.CategoricalDistribution([json.dumps(value) for value in values])
            elif values.whole:
                made[name] = kinds.IntDistribution(int(values.low), int(values.high), log=values.log)
            else:
                made[name] = kinds.FloatDistribution(values.low, values.high, log=values.log)
        return made

    def _settings(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a trial's values, numbers with three digits as in the run's name."""
        space = self.sweep.space
        return {
            name: (float(f"{value:.3g}") if isinstance(value, float) else value)
            if isinstance(space[name], Range)
            else json.loads(value)
            for name, value in params.items()
        }

    def _run_of(self, settings: dict[str, Any]) -> SweepRun:
        return self.sweep.run(settings | ({"seed": self.sweep.seeds[0]} if self.sweep.seeds else {}), self.title)

    def _begun(self, study: Any) -> int:
        """Returns how many runs there are, also those of other machines and failed ones; one made anew counts once."""
        trials = [trial for trial in study.trials if trial.state.name != "WAITING"]
        anew = [
            trial
            for index, trial in enumerate(trials)
            if trial.state.name == "FAIL" and any(other.params == trial.params for other in trials[index + 1 :])
        ]
        return len(trials) - len(anew)

    def _enqueue_interrupted(self, study: Any) -> None:
        """Lets runs that were interrupted come first: the study counts them as running, and nobody has their folder."""
        for trial in study.trials:
            if trial.state.name == "RUNNING" and trial.params:
                folder = self.sweep.folder / self._run_of(self._settings(trial.params)).name
                if holder_of(folder) is None:
                    study.enqueue_trial(trial.params)
                    study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)

    def _scores(self, run: SweepRun) -> list[tuple[int, float]]:
        """Returns update and score, lower is better, of each validation of a run."""
        folder = self.sweep.folder / run.name
        if not (folder / "log.jsonl").is_file():
            return []
        records = comparison.summarize(folder).records
        valid = latest_records([record for record in records if record["kind"] == "valid"])
        scored = [record for record in valid if record.get(self.objective.name) is not None]
        return [(record["update"], self.objective.value(record)) for record in scored]
