"""The work that is due after an update is a function of settings, progress, signals, clock and callbacks."""

import signal
from pathlib import Path
from typing import Any

import pytest
from test_run import job

from nmtkit.jobs.distributed import AsyncMax
from nmtkit.training.callbacks import Callback, RunState
from nmtkit.training.due import Due, Requests, RunProgress, StopReason, due_after_update, stop_reason
from nmtkit.training.loader import Position
from nmtkit.training.run import Run
from nmtkit.training.run_config import RunConfig
from nmtkit.training.run_log import Lines

WITHIN, END = Position(2, 5), Position(3, 0)  # within the third epoch, and after its last update
NOTHING = Requests()
UPDATES_ONLY = {"validate_interval": None, "save_interval": None}


def due(position: Position, updates: int, asked: Requests = NOTHING, waited: int = 0, **settings: Any) -> Due:
    progress = RunProgress(position=position, updates=updates, waited=waited)
    return due_after_update(RunConfig(**settings), progress, asked, "a callback" if asked.callback_stops else None)


@pytest.mark.parametrize(
    ("position", "updates", "settings", "expected"),
    [
        (WITHIN, 7, {}, Due()),
        (WITHIN, 200, {}, Due(log=True)),
        (END, 7, {}, Due(validate=True, save=True, scheduled=True)),
        (END, 7, {"validate_interval": 2, "save_interval": 3}, Due(save=True, scheduled=True)),
        (END, 7, UPDATES_ONLY, Due()),
        (WITHIN, 8, UPDATES_ONLY | {"validate_interval_updates": 4}, Due(validate=True)),
        (WITHIN, 8, UPDATES_ONLY | {"save_interval_updates": 4, "log_interval": 8},
            Due(log=True, save=True, scheduled=True)),
        (WITHIN, 9, UPDATES_ONLY | {"save_interval_updates": 4, "validate_interval_updates": 4}, Due()),
    ],
)  # fmt: skip
def test_intervals_of_epochs_and_updates(
    position: Position, updates: int, settings: dict[str, Any], expected: Due
) -> None:
    assert due(position, updates, **settings) == expected


@pytest.mark.parametrize(
    ("asked", "settings", "expected"),
    [
        (Requests(clock_saves=1), {}, Due(save=True)),
        (Requests(callback_saves=1), {}, Due(save=True)),
        (Requests(clock_saves=1), UPDATES_ONLY, Due(save=True, scheduled=True)),
        (Requests(callback_saves=1), UPDATES_ONLY, Due(save=True, scheduled=True)),
        (Requests(callback_saves=1), UPDATES_ONLY | {"save_interval_updates": 4}, Due(save=True)),
        (Requests(callback_validates=1), UPDATES_ONLY, Due(validate=True)),
    ],
)
def test_the_clock_and_callbacks_ask_for_checkpoints_and_validations(
    asked: Requests, settings: dict[str, Any], expected: Due
) -> None:
    assert due(WITHIN, 7, asked, **settings) == expected


@pytest.mark.parametrize(
    ("asked", "waited", "settings", "reason"),
    [
        (NOTHING, 0, {"max_update": 7}, "--max-update 7 is reached"),
        (NOTHING, 0, {"max_update": 8}, None),
        (NOTHING, 0, {"max_epoch": 2}, "--max-epoch 2 is reached"),
        (NOTHING, 0, {"max_epoch": 3}, None),
        (Requests(callback_stops=1), 0, {}, "a callback"),
        (Requests(callback_stops=1), 0, {"max_update": 7}, "--max-update 7 is reached"),
        (Requests(out_of_time=1), 0, {"stop_time_hours": 0.5}, "--stop-time-hours 0.5 is reached"),
        (NOTHING, 2, {"patience": 2}, "no better loss in 2 validations"),
        (NOTHING, 1, {"patience": 2}, None),
    ],
)
def test_a_run_that_ends_logs_validates_and_saves(
    asked: Requests, waited: int, settings: dict[str, Any], reason: str | None
) -> None:
    stop = None if reason is None else StopReason(reason, 7)
    found = due(WITHIN, 7, asked, waited, **settings)
    ends = reason is not None
    assert found == Due(log=ends, validate=ends, save=ends, stop=stop)


def test_a_signal_ends_the_run_before_all_other_reasons_and_without_a_validation() -> None:
    asked = Requests(stop_signal=signal.SIGTERM, callback_stops=1, out_of_time=1)
    stop = StopReason("SIGTERM", 7, signal.SIGTERM)
    assert due(WITHIN, 7, asked, max_update=7) == Due(log=True, save=True, stop=stop)
    # at the end of an epoch, the validation stays due; the resumed run makes it
    assert due(END, 7, asked) == Due(log=True, validate=True, save=True, scheduled=True, stop=stop)


def test_a_run_without_validations_ends_without_one() -> None:
    assert not due(WITHIN, 7, validate_interval=None, max_update=7).validate


def test_before_the_first_update_only_a_finished_run_stops() -> None:
    assert stop_reason(RunConfig(max_update=7), RunProgress(), NOTHING) is None
    finished = RunProgress(updates=7, position=WITHIN)
    assert stop_reason(RunConfig(max_update=7), finished, NOTHING) == StopReason("--max-update 7 is reached", 7)


def test_the_clock_saves_once_though_several_processes_answer_one_update_later(
    mirror_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HourAtUpdate3(Callback):
        def update(self, state: RunState) -> None:
            run.last_save -= 3600 * (state.update == 3)

    requests = [[0] * len(NOTHING)]

    def late(self: AsyncMax, *values: int) -> list[int]:
        requests.append(list(values))
        return requests[-2]

    monkeypatch.setattr(AsyncMax, "maximum", late)
    settings = {"max_update": 8, "save_interval": None, "keep_last": None}
    run = Run(job(tmp_path / "run", **settings), mirror_data, Lines(), [HourAtUpdate3()])
    run.run()
    assert [path.name for path in sorted((tmp_path / "run").glob("update_*.pt"))] == [
        "update_00000004.pt",
        "update_00000008.pt",
    ]
