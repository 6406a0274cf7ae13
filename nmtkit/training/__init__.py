"""The plan and the loop of a run: loader, trainer, schedules, validation, checkpoints, logs, callbacks."""
