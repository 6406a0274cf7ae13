"""Several real processes on gloo make the updates of one process, resume in other numbers, and fail together."""

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nmtkit.jobs import distributed
from nmtkit.jobs.distributed import launch, reserved_port
from nmtkit.models import checkpoint

FLAGS = shlex.split("""
    --arch transformer_tiny --d-model 16 --d-ff 32 --heads 2 --encoder-layers 1 --decoder-layers 1 --dropout 0.1
    --batch-tokens 400 --max-tokens 80 --precision fp32 --device cpu --metrics none --lr 0.01 --warmup-updates 10
    --clip-norm 1 --log-interval 1 --threads 1
""")


def train_flags(data: Path, save_dir: Path, *more: object) -> list[str]:
    return ["train", str(data), *FLAGS, "--save-dir", str(save_dir), *map(str, more)]


def run(data: Path, save_dir: Path, *more: object, code: str = "from nmtkit.cli import main; main()") -> int:
    """Runs one process. Returns its exit code, which is negative for a signal."""
    return subprocess.run([sys.executable, "-c", code, *train_flags(data, save_dir, *more)], check=False).returncode


def updates_logged(save_dir: Path) -> list[int]:
    path = save_dir / "log.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]  # the last line may be incomplete
    return [line["update"] for line in lines if line["kind"] == "train"]


def terminate_after(save_dir: Path, updates: int) -> None:
    """Sends SIGTERM to this process, which forwards the signal, after so many updates are logged."""

    def wait() -> None:
        while not updates_logged(save_dir)[updates - 1 :]:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.slow
def test_two_ranks_then_one_then_two_equal_one_throughout(mirror_data: Path, tmp_path: Path) -> None:
    terminate_after(tmp_path / "parts", 3)
    assert launch(train_flags(mirror_data, tmp_path / "parts"), 2) == 128 + signal.SIGTERM
    saved = checkpoint.load(tmp_path / "parts" / "last.pt")["update"]
    assert saved >= 3
    assert run(mirror_data, tmp_path / "parts", "--max-update", saved + 3) == 0
    assert launch(train_flags(mirror_data, tmp_path / "parts", "--max-update", saved + 6), 2) == 0
    assert run(mirror_data, tmp_path / "whole", "--max-update", saved + 6) == 0
    assert updates_logged(tmp_path / "parts") == list(range(1, saved + 7))
    whole, parts = (checkpoint.load(tmp_path / name / "last.pt") for name in ("whole", "parts"))
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(parts["model"][name], tensor, atol=2e-4, rtol=1e-3)


FAILING = """
from nmtkit.jobs import distributed
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig

@CRITERIONS.register("failing", CrossEntropyConfig())
class Failing(CrossEntropy):
    calls = 0
    def forward(self, model, batch):
        self.calls += 1
        if distributed.rank() == 1 and self.calls == 25:
            raise RuntimeError("the seventh seal")
        return super().forward(model, batch)
"""


@pytest.mark.slow
def test_a_rank_that_raises_ends_all_with_its_message(
    mirror_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugin.py").write_text(FAILING)
    flags = ["--plugin", tmp_path / "plugin.py", "--criterion", "failing", "--max-update", 100000]
    assert launch(train_flags(mirror_data, tmp_path / "run", *flags), 2) != 0
    assert time.time() - (tmp_path / "run" / "log.jsonl").stat().st_mtime < 300  # less than --timeout-minutes
    said = capfd.readouterr().err
    assert "rank 1: in a plug-in: RuntimeError: the seventh seal" in said and "Traceback" not in said
    assert 'plugin.py", line 12, in forward\n    raise RuntimeError("the seventh seal")\n' in said


@pytest.mark.slow
def test_a_save_folder_that_the_processes_do_not_share_is_refused(mirror_data: Path, tmp_path: Path) -> None:
    ranks = []
    with reserved_port() as reservation:
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reservation.getsockname()[1]), "WORLD_SIZE": "2"}
        for rank in range(2):
            (tmp_path / str(rank)).mkdir()
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "nmtkit", *train_flags(mirror_data, Path("checkpoints"))]
            options = {"cwd": tmp_path / str(rank), "env": os.environ | place | master, "stderr": subprocess.PIPE}
            ranks.append(subprocess.Popen(command, **options))
        said = [rank.communicate()[1].decode() for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert re.search(r"--save-dir \S*/1/checkpoints .*/0/checkpoints", said[0])
    assert not any((tmp_path / str(rank) / "checkpoints" / "config.toml").exists() for rank in range(2))


def test_a_reserved_port_is_free_for_the_store_of_a_group_alone() -> None:
    with reserved_port() as reservation:
        port = reservation.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        client.set("name", "value")
        assert store.get("name") == b"value"


HANGING = """
import time
from nmtkit.jobs import distributed
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig

@CRITERIONS.register("hanging", CrossEntropyConfig())
class Hanging(CrossEntropy):
    calls = 0
    def forward(self, model, batch):
        self.calls += 1
        if distributed.rank() == 1 and self.calls == 7:
            time.sleep(1000)
        return super().forward(model, batch)
"""


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_all_end(
    mirror_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugin.py").write_text(HANGING)
    flags = ["--plugin", tmp_path / "plugin.py", "--criterion", "hanging", "--timeout-minutes", 0.5]
    started = time.monotonic()
    assert launch(train_flags(mirror_data, tmp_path / "run", *flags), 2) != 0
    assert time.monotonic() - started < 600  # the rank sleeps for 1,000 seconds
    assert re.search(r"process 1 hangs after update \d+: ", capfd.readouterr().err)


SLOW = """
import os, time
from nmtkit.training.criterions import CRITERIONS
from nmtkit.training.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig

@CRITERIONS.register("slow", CrossEntropyConfig())
class Slow(CrossEntropy):
    trained = False  # before the first update, a run checks the criterion of a plug-in

    def forward(self, model, batch):
        self.trained = self.trained or self.training
        if self.trained and not self.training and "SLOW" in os.environ:
            os.write(1, b"validating\\n")  # whole, where print of two ranks may mix
            time.sleep(1000)
        return super().forward(model, batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_ends_a_validation_which_is_made_up_for(mirror_data: Path, tmp_path: Path, processes: int) -> None:
    (tmp_path / "plugin.py").write_text(SLOW)
    flags = ("--plugin", tmp_path / "plugin.py", "--criterion", "slow", "--validate-interval-updates", 3)
    flags += ("--lr-scheduler", "plateau", "--nproc-per-node", processes)
    command = [sys.executable, "-m", "nmtkit", *train_flags(mirror_data, tmp_path / "run", *flags)]
    process = subprocess.Popen(command, env=os.environ | {"SLOW": "1"}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "validating\n"
    process.terminate()
    signalled = time.monotonic()
    assert process.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - signalled < 600  # the criterion sleeps for 1,000 seconds
    assert checkpoint.load(tmp_path / "run" / "last.pt")["update"] == 3
    for name in ("run", "whole"):
        assert run(mirror_data, tmp_path / name, *flags, "--max-update", 6) == 0
    whole, stopped = ((tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "run"))
    scores = [[line for line in map(json.loads, lines) if line["kind"] == "valid"] for lines in (whole, stopped)]
    assert [line["update"] for line in scores[1]] == [3, 6]
    for one, other in zip(*scores, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)


TRANSLATING = """
from nmtkit.cli import main
from nmtkit.translation.translator import Translator
plain = Translator.translate
def translate(self, lines, **settings):
    print("translating", flush=True)
    while True:
        result = plain(self, lines, **settings)
Translator.translate = translate
main()
"""


@pytest.mark.slow
def test_a_signal_ends_a_validation_that_translates(mirror_data: Path, tmp_path: Path) -> None:
    flags = ("--validate-interval-updates", 3, "--metrics", "bleu", "--max-update", 6)
    command = [sys.executable, "-c", TRANSLATING, *train_flags(mirror_data, tmp_path / "run", *flags)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "translating\n"
    process.terminate()
    assert process.wait(600) == 128 + signal.SIGTERM
    assert run(mirror_data, tmp_path / "run", *flags) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [(line["update"], "bleu" in line) for line in lines if line["kind"] == "valid"] == [(3, True), (6, True)]


# The n-th call of a function of os ends the process at once, like kill -9.
KILLED = """
import os, signal
from nmtkit.cli import main
plain, left = os.{function}, [{calls}]
def last_call(*arguments, **settings):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*arguments, **settings)
os.{function} = last_call
main()
"""


@pytest.mark.slow
def test_killed_while_saving_and_restarted_equals_uninterrupted_bit_for_bit(mirror_data: Path, tmp_path: Path) -> None:
    flags = ("--max-update", 9, "--save-interval-updates", 2)
    # before a file is whole on disk, before it gets its name, after it has it but no link points at it
    points = (("fsync", 4), ("replace", 3), ("replace", 4))
    for function, calls in points:
        code = run(mirror_data, tmp_path / "run", *flags, code=KILLED.format(function=function, calls=calls))
        assert code == -signal.SIGKILL, f"not killed at {function}"
    assert run(mirror_data, tmp_path / "run", *flags) == 0
    assert run(mirror_data, tmp_path / "whole", *flags) == 0
    whole, killed = (checkpoint.load(tmp_path / name / "last.pt") for name in ("whole", "run"))
    assert all(torch.equal(tensor, killed["model"][name]) for name, tensor in whole["model"].items())
    assert not list((tmp_path / "run").glob(".*.tmp"))


@pytest.mark.slow
def test_killed_at_five_random_moments_equals_uninterrupted_bit_for_bit(mirror_data: Path, tmp_path: Path) -> None:
    flags = train_flags(mirror_data, tmp_path / "run", "--max-update", 120, "--save-interval-updates", 3)
    draw = random.Random(1)
    kills = 0
    while kills < 5:
        seen = len(updates_logged(tmp_path / "run")) + draw.randint(0, 8)
        process = subprocess.Popen([sys.executable, "-m", "nmtkit", *flags])
        while len(updates_logged(tmp_path / "run")) <= seen and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the run ended before it was killed often enough"
        kills += 1
    assert run(mirror_data, tmp_path / "run", "--max-update", 120, "--save-interval-updates", 3) == 0
    assert run(mirror_data, tmp_path / "whole", "--max-update", 120, "--save-interval-updates", 3) == 0
    whole, killed = (checkpoint.load(tmp_path / name / "last.pt") for name in ("whole", "run"))
    assert all(torch.equal(tensor, killed["model"][name]) for name, tensor in whole["model"].items())


@pytest.fixture
def two_machines() -> Iterator[dict[str, str]]:
    """Connects two network namespaces by a virtual cable. Yields the address of each namespace by its name."""
    machines = {"nmtkit-a": "10.77.0.1", "nmtkit-b": "10.77.0.2"}

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    try:
        for name in machines:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "cable-a",
            "netns",
            "nmtkit-a",
            "type",
            "veth",
            "peer",
            "name",
            "cable-b",
            "netns",
            "nmtkit-b",
        )
        for name, address in machines.items():
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"cable-{name[-1]}")
            for link in (f"cable-{name[-1]}", "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield machines
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for name in machines:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.slow
def test_two_machines_under_torchrun_equal_one_process(
    mirror_data: Path, tmp_path: Path, two_machines: dict[str, str]
) -> None:
    flags = ("--max-update", 4)
    nodes = []
    for rank, name in enumerate(two_machines):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--node-rank", str(rank), "--master-addr", "10.77.0.1", "--master-port", "29533", "-m", "nmtkit"]
        command = ["ip", "netns", "exec", name, *torchrun, *train_flags(mirror_data, tmp_path / "two", *flags)]
        nodes.append(subprocess.Popen(command, env=os.environ | {"GLOO_SOCKET_IFNAME": f"cable-{name[-1]}"}))
    assert [node.wait() for node in nodes] == [0, 0]
    assert run(mirror_data, tmp_path / "one", *flags) == 0
    one, two = (checkpoint.load(tmp_path / name / "last.pt") for name in ("one", "two"))
    for name, tensor in one["model"].items():
        torch.testing.assert_close(two["model"][name], tensor, atol=2e-4, rtol=1e-3)


def test_a_long_operation_beats_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    store, published = FakeStore(), []

    def publish(name: str, message: str) -> None:
        store[name] = message.encode()
        published.append(message)

    def wait_for_messages(count: int) -> None:
        while len(published) < count:
            time.sleep(0.01)

    monkeypatch.setattr(store, "set", publish, raising=False)
    monkeypatch.setattr(distributed.Watchdog, "INTERVAL", 0.01)
    monkeypatch.setattr(distributed, "_signs", distributed.SignsOfLife())
    watchdog = distributed.Watchdog(store, 600.0)
    try:
        wait_for_messages(1)
        assert published[0] == "0 0 0 0"
        with distributed.long_operation():
            while int(published[-1].split()[3]) < 2:
                time.sleep(0.01)
        ended = len(published)
        wait_for_messages(ended + 5)  # the first of these messages may count a beat of the operation
        assert len(set(published[ended + 1 :])) == 1
    finally:
        watchdog.close()


class FakeStore(dict[str, bytes]):
    def check(self, names: list[str]) -> bool:
        return all(name in self for name in names)


def watchdog_of(messages: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> distributed.Watchdog:
    """Returns a watchdog of rank 0 whose ranks publish updates, steps, whether they wait, and heartbeats."""
    monkeypatch.setattr(distributed, "world_size", lambda: len(messages))
    watch = object.__new__(distributed.Watchdog)
    watch.store, watch.timeout, watch.states = FakeStore(messages), 60.0, {}
    return watch


@pytest.mark.parametrize(
    ("messages", "blamed"),
    [
        # rank 1 hangs in its forward pass, rank 0 waits in the backward pass of the same update
        ({"beat 0": b"7 2 0 9", "beat 1": b"7 1 0 9"}, "process 1 hangs after update 7"),
        # rank 1 hangs in its share of a validation, rank 0 waits for its scores
        ({"beat 0": b"7 0 1 9", "beat 1": b"7 0 0 9"}, "process 1 hangs after update 7"),
        # ranks wait for each other in different collectives
        ({"beat 0": b"7 0 1 9", "beat 1": b"7 0 1 9"}, "processes 0, 1 hang after update 7"),
    ],
)
def test_the_process_with_the_least_progress_hangs(
    messages: dict[str, bytes], blamed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watchdog_of(messages, monkeypatch)
    monkeypatch.setattr("time.monotonic", iter([0.0, 61.0]).__next__)
    assert watch._hanging() is None
    message = watch._hanging()
    assert message is not None and message.startswith(f"{blamed}: no heartbeat")


def test_a_process_that_waits_for_slow_work_of_another_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    # rank 0 scores a validation with a slow metric, or writes a checkpoint; rank 1 waits
    watch = watchdog_of({"beat 0": b"7 0 0 1", "beat 1": b"7 0 1 1"}, monkeypatch)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for beat in range(200):
        now[0] += 1
        watch.store["beat 0"] = b"7 0 0 %d" % beat
        assert watch._hanging() is None
    # rank 0 is in the next collective; rank 1 is there too, but has not yet published a new message
    watch.store["beat 0"] = b"7 0 1 300"
    assert watch._hanging() is None
    now[0] += 61
    assert str(watch._hanging()).startswith("processes 0, 1 hang")


SLOW_METRIC = """
import time
from dataclasses import dataclass
from nmtkit.config import Config
from nmtkit.training.metrics import METRICS, Metric

@dataclass(frozen=True, kw_only=True)
class SlowConfig(Config):
    pass

@METRICS.register("slow", SlowConfig())
class Slow(Metric):
    def __init__(self, config):
        pass
    def score(self, outputs):
        time.sleep(25)
        return 1.0
"""


@pytest.mark.slow
def test_a_slow_metric_does_not_end_a_run_of_several_processes(mirror_data: Path, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(SLOW_METRIC)
    flags = ["--plugin", tmp_path / "plugin.py", "--metrics", "slow", "--timeout-minutes", 0.25, "--max-update", 2]
    assert launch(train_flags(mirror_data, tmp_path / "run", *flags), 2) == 0
    lines = (tmp_path / "run" / "log.jsonl").read_text().split("\n")
    (valid,) = [record for record in map(json.loads, filter(None, lines)) if record["kind"] == "valid"]
    assert valid["slow"] == 1.0 and valid["seconds"] > 25


FAILING_METRIC = """
from dataclasses import dataclass
from nmtkit.config import Config
from nmtkit.jobs import distributed
from nmtkit.training.metrics import METRICS, Metric

@dataclass(frozen=True, kw_only=True)
class FailingConfig(Config):
    pass

@METRICS.register("failing_metric", FailingConfig())
class Failing(Metric):
    def __init__(self, config):
        pass
    def count(self, model, batch):
        if distributed.rank() == 1:
            raise RuntimeError("the fifth element")
        return {}
    def score(self, outputs):
        return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_validation_that_fails_on_one_rank_leaves_a_checkpoint(
    mirror_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], parallel: str
) -> None:
    (tmp_path / "plugin.py").write_text(FAILING_METRIC)
    flags = ["--plugin", tmp_path / "plugin.py", "--metrics", "failing_metric", "--validate-interval-updates", 3]
    command = train_flags(mirror_data, tmp_path / "run", *flags, "--parallel", parallel, "--save-interval", "none")
    assert launch(command, 2) != 0
    said = capfd.readouterr().err
    assert "rank 1: in a plug-in: RuntimeError: the fifth element" in said
    assert checkpoint.load(tmp_path / "run" / "last.pt")["update"] == 3


READING_GRADIENTS = """
from dataclasses import dataclass
from nmtkit.config import Config
from nmtkit.training.callbacks import CALLBACKS, Callback

@dataclass(frozen=True, kw_only=True)
class NormsConfig(Config):
    pass

@CALLBACKS.register("norms", NormsConfig())
class Norms(Callback):
    def __init__(self, config):
        pass
    def update(self, run):
        float(next(run.model.parameters()).grad.norm())
"""


@pytest.mark.slow
def test_a_callback_that_reads_sharded_gradients_on_one_rank_is_told(
    mirror_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plugin.py").write_text(READING_GRADIENTS)
    flags = ["--plugin", tmp_path / "plugin.py", "--callbacks", "norms", "--max-update", 2]
    assert launch(train_flags(mirror_data, tmp_path / "ddp", *flags), 2) == 0
    assert launch(train_flags(mirror_data, tmp_path / "fsdp", *flags, "--parallel", "fsdp"), 2) != 0
    said = " ".join(capfd.readouterr().err.split())
    assert "the callback norms" in said and "every_rank = True" in said


def test_the_process_that_hangs_is_the_one_furthest_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watch = object.__new__(distributed.Watchdog)
    watch.store = store = FakeStore({"beat 0": b"8 0 0 1", "beat 1": b"7 2 0 1", "beat 2": b"8 0 0 1"})
    watch.timeout, watch.states = 60.0, {}
    assert watch._hanging() is None
    now[0] = 59.0
    assert watch._hanging() is None
    now[0] = 61.0
    assert str(watch._hanging()).startswith("process 1 hangs after update 7: ")
    store["beat 1"] = b"8 0 0 2"
    store["beat 0"] = store["beat 2"] = b"9 0 0 2"
    assert watch._hanging() is None
