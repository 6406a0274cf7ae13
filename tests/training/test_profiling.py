"""The callback `profile` of `nmtkit train`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from nmtkit.cli import main
from nmtkit.training.callbacks import RunState
from nmtkit.training.profiling import ProfileConfig, Profiler, write_page


def train(data: Path, folder: Path, *flags: str) -> Any:
    sizes = "--arch transformer_tiny --encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 24 --heads 2 --lr 0.01"
    run = "--max-update 6 --batch-tokens 200 --metrics none --threads 1 --device cpu --callbacks profile"
    words = ["train", str(data), *sizes.split(), *run.split(), "--save-dir", str(folder), *flags]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "last"), [("2", 5), ("50", 6)], ids=["whole", "cut by the end"])
def test_a_run_writes_a_page_and_a_trace_of_its_updates(
    mirror_data: Path, tmp_path: Path, updates: str, last: int
) -> None:
    result = train(mirror_data, tmp_path / "run", "--profile-warmup", "3", "--profile-updates", updates)
    page = (tmp_path / "run/profile.html").read_text()
    assert f"Profile of updates 4 to {last}" in page and f"profile of updates 4 to {last}" in result.stderr
    assert "aten::" in page
    events = json.loads((tmp_path / "run/profile.json").read_text())["traceEvents"]
    assert any("Backward" in str(event.get("name")) for event in events)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (3, "made 3 updates"),
        (4, "made 4 updates"),
        (6, "2 of 3 updates"),
        (7, None),
    ],
    ids=["in the warm-up", "at its end", "in the window", "after the window"],
)
def test_a_run_that_is_too_short_is_told(
    made: int, message: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, run = Profiler(ProfileConfig(profile_warmup=4, profile_updates=3)), SimpleNamespace(save_dir=tmp_path)
    for number in range(1, made + 1):
        run.update = number
        callback.update(cast(RunState, run))
    callback.end(cast(RunState, run), "max_update")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (message is not None)
    if message is not None:
        assert message in warnings[0] and "--profile-warmup 4 --profile-updates 3" in warnings[0]
    assert (tmp_path / "profile.html").exists() == (made > 4)


def test_operations_are_sorted_by_self_time_with_shares(tmp_path: Path) -> None:
    events = [
        SimpleNamespace(key=key, self_cpu_time_total=time, self_device_time_total=0, count=count)
        for key, time, count in (("add", 1_000.0, 4), ("matmul", 6_000.0, 2), ("sum", 3_000.0, 1))
    ]
    write_page(tmp_path / "page.html", events, 11, 12)
    page = (tmp_path / "page.html").read_text()
    assert "5.0 ms per update on the CPU" in page
    assert page.index("matmul") < page.index(">sum<") < page.index(">add<")
    assert "6.00" in page and "60.0%" in page and "10.0%" in page
