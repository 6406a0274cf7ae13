"""Chooses the random settings of a sweep with Optuna. Scores of earlier runs guide later runs, and bad runs end early.

The study is a file in the sweep's folder. The same command continues the study, and several machines can share it.
"""

import functools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from nmtkit.config import flag_words
from nmtkit.config.extras import imported
from nmtkit.experiments import comparison
from nmtkit.experiments.sweep import Range, Sweep, SweepRun
from nmtkit.jobs.folder_lock import holder_of
from nmtkit.training.metrics import objective

log = logging.getLogger("nmtkit")

NAME = "optuna.log"
# a function that trains a run until its second argument returns False, and returns the reason of a failure, or None
TrainRun = Callable[[SweepRun, Callable[[], bool]], str | None]


class TrialMonitor:
    """Reports the scores of a run to its Optuna trial while the run trains."""

    def __init__(self, trial: Any, read_scores: Callable[[], list[tuple[int, float]]]) -> None:
        self.trial, self.read_scores = trial, read_scores
        self.scores: list[float] = []
        self.pruned = False

    def report(self) -> bool:
        """Reports new scores to the study. Returns whether there are new scores."""
        new = self.read_scores()[len(self.scores) :]
        for update, score in new:
            self.trial.report(score, update)
            self.scores.append(score)
        return bool(new)

    def should_continue(self) -> bool:
        """Reports new scores to the study. Returns False if the study has pruned the trial."""
        if self.report():
            self.pruned = self.pruned or self.trial.should_prune()
        return not self.pruned


class OptunaStudy:
    """An Optuna study of the settings in the table [sweep.random] of a sweep file.

    Raises ImportError without Optuna. Raises ValueError if the sweep has mistakes or varies settings outside
    this table.
    """

    def __init__(self, sweep: Sweep) -> None:
        need = "--optuna needs Optuna, which is not installed: pip install 'nmtkit[optuna]'"
        self.optuna = imported("optuna", need=need)
        if not sweep.space:
            raise ValueError(f"{sweep.file}: --optuna chooses the settings of [sweep.random], but the file has none")
        if sweep.factors or len(sweep.named) > 1 or len(sweep.seeds) > 1:
            raise ValueError(f"{sweep.file}: --optuna supports only [sweep.random], with at most one seed")
        self.sweep = sweep
        self.title = next(iter(sweep.named))
        lowest = {name: v.low if isinstance(v, Range) else v[0] for name, v in sweep.space.items()}
        job = sweep.job(self._run_of(lowest))  # raises ValueError for mistakes in the file
        if not job.run.validates:
            raise ValueError(f"{sweep.file}: --optuna compares validations, but these runs do not validate")
        config = job.run
        self.objective = objective(config.best_checkpoint_metric, job.metrics(), config.valid_subset[1:], job.tables())
        conditions = {flag.partition(" ")[0] for flag in self.objective.conditions}
        if varied := conditions & {flag_words(name, value)[0] for name, value in lowest.items()}:
            raise ValueError(
                f"{sweep.file}: --optuna compares {self.objective.name}, which depends on {', '.join(varied)}, so "
                "[sweep.random] cannot vary this setting; give another best_checkpoint_metric in [run], such as nll"
            )

    def described(self) -> list[str]:
        """Returns lines that describe the search, for a dry run."""
        lines = [f"{self.sweep.draws} runs, compared by {self.objective.name}, with"]
        for name, values in self.sweep.space.items():
            if isinstance(values, Range):
                lines.append(f"  {name}: {values.low:g} to {values.high:g}{', logarithmic' if values.log else ''}")
            else:
                lines.append(f"  {name}: {list(values)}")
        return lines

    def run(self, train: TrainRun) -> dict[str, str]:
        """Trains runs until the study has `draws` runs. Returns the names of failed runs with their reasons."""
        study, failed = self._study(), {}
        self._enqueue_interrupted(study)
        while self._begun(study) < self.sweep.draws:
            trial = study.ask(self._distributions())
            run = self._run_of(self._settings(trial.params))
            log.info("run %d of %d, %s", self._begun(study), self.sweep.draws, run.name)
            monitor = TrialMonitor(trial, functools.partial(self._scores, run))
            reason = train(run, monitor.should_continue)
            monitor.report()  # the last scores; a run that has trained to its end is not pruned
            if reason or not monitor.scores:
                failed[run.name] = reason or "no validation was made"
                study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
            elif monitor.pruned:
                log.info("%s has worse scores than earlier runs and is ended", run.name)
                study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
            else:
                study.tell(trial, min(monitor.scores))
        return failed

    def runs(self) -> list[SweepRun]:
        """Returns the runs of the study so far: finished runs first, best first, then pruned and failed runs."""
        trials = self._study().trials
        order = sorted(trials, key=lambda trial: (trial.state.name != "COMPLETE", trial.value or 0.0, trial.number))
        runs = [self._run_of(self._settings(trial.params)) for trial in order if trial.params]
        return list({run.name: run for run in runs}.values())

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
        # a sampler does not continue after a restart, so the same seed would draw the first trials again
        study.sampler = optuna.samplers.TPESampler(seed=self.sweep.seed + len(study.trials))
        return study

    def _distributions(self) -> dict[str, Any]:
        kinds = self.optuna.distributions
        distributions = {}
        for name, values in self.sweep.space.items():
            if not isinstance(values, Range):  # Optuna supports only choices of plain types, so lists become JSON texts
                distributions[name] = kinds.CategoricalDistribution([json.dumps(value) for value in values])
            elif values.whole:
                distributions[name] = kinds.IntDistribution(int(values.low), int(values.high), log=values.log)
            else:
                distributions[name] = kinds.FloatDistribution(values.low, values.high, log=values.log)
        return distributions

    def _settings(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of a trial. Fractions from ranges have three digits, as in `Range.draw`."""
        rounded = {name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in params.items()}
        return {name: json.loads(value) if isinstance(value, str) else value for name, value in rounded.items()}

    def _run_of(self, settings: dict[str, Any]) -> SweepRun:
        return self.sweep.run(settings | ({"seed": self.sweep.seeds[0]} if self.sweep.seeds else {}), self.title)

    def _begun(self, study: Any) -> int:
        """Returns the number of runs that all machines have begun.

        A failed run counts too, unless a later trial has the same settings.
        """
        trials = [trial for trial in study.trials if trial.state.name != "WAITING"]
        params = [trial.params for trial in trials]
        repeated = (trial.state.name == "FAIL" and trial.params in params[n:] for n, trial in enumerate(trials, 1))
        return len(trials) - sum(repeated)

    def _enqueue_interrupted(self, study: Any) -> None:
        """Queues interrupted runs again: the study lists them as running, but no process locks their folders."""
        for trial in study.trials:
            if trial.state.name == "RUNNING" and trial.params:
                run = self._run_of(self._settings(trial.params))
                if holder_of(self.sweep.folder / run.name) is None:
                    study.enqueue_trial(trial.params)
                    study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)

    def _scores(self, run: SweepRun) -> list[tuple[int, float]]:
        """Returns the update and the score of each validation of a run. Lower scores are better."""
        folder = self.sweep.folder / run.name
        if not (folder / "log.jsonl").is_file():
            return []
        valid = [record for record in comparison.summarize(folder).records if record["kind"] == "valid"]
        scored = [record for record in valid if record.get(self.objective.name) is not None]
        return [(record["update"], self.objective.value(record)) for record in scored]
