"""Models are added, dropped and replaced while requests run: no request is lost, and each has a single model."""

import asyncio
import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from builders import REAL_LINES, save_transformer
from serving_process import serving

from nmtkit.jobs import machine_code
from nmtkit.serving import file_watcher
from nmtkit.serving.config import ServeConfig, ServeJob
from nmtkit.serving.fair_queue import BatchKey, FairQueue, QueuedRequest
from nmtkit.serving.file_watcher import FileChanges
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import Translator

TEXTS = REAL_LINES * 4


def wait_for(condition: Callable[[], Any], seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def children(process: int) -> list[int]:
    """Returns the ids of the processes that load models."""
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts processes in /proc")
def test_models_come_and_go_under_load_and_no_answer_mixes_them(tmp_path: Path) -> None:
    models = [save_transformer(tmp_path / f"{number}.pt", d_ff=size) for number, size in enumerate((32, 64))]
    expected = [[each.text for each in Translator.load(path).translate(TEXTS, max_len_b=5)] for path in models]
    assert expected[0] != expected[1]
    listed = tmp_path / "models.txt"
    listed.write_text("# the models of this test\nen-de=0.pt\n")
    answers: list[tuple[int, Any]] = []
    stopped = threading.Event()
    with serving(tmp_path, "--models", str(listed), "--workers", "2", "--max-len-b", "5") as server:

        def client() -> None:
            while not stopped.is_set():
                answers.append(server.ask("/translate", {"q": TEXTS, "source": "en", "target": "de"}))

        clients = [threading.Thread(target=client) for _ in range(4)]
        for thread in clients:
            thread.start()
        try:
            for number in (1, 0, 1):
                reloads = server.metric("nmtkit_reloads_total")
                new = tmp_path / "new.txt"
                new.write_text(f"en-de={number}.pt\nen-it={1 - number}.pt\n")
                new.replace(listed)
                server.process.send_signal(signal.SIGHUP)
                wait_for(lambda before=reloads: server.metric("nmtkit_reloads_total") > before)
                assert server.translate(TEXTS) == expected[number]
                assert server.translate(TEXTS, target="it") == expected[1 - number]
            # a list with a model that does not exist, and a list without models, change nothing
            for failures, text in enumerate(("en-de=0.pt\nen-fr=missing.pt\n", "# nothing\n"), 1):
                listed.write_text(text)
                server.process.send_signal(signal.SIGHUP)
                wait_for(lambda count=failures: server.metric("nmtkit_failed_reloads_total") == count)
            assert "missing.pt" in server.log.read_text() and "lists no checkpoint" in server.log.read_text()
            assert server.translate(TEXTS) == expected[1]
            # a changed list is noticed without a signal, and dropped pairs are refused
            listed.write_text("en-de=1.pt\n")
            wait_for(lambda: server.ask("/languages")[1][-1]["targets"] == ["de"])
            assert server.ask("/translate", {"q": "a", "source": "en", "target": "it"})[0] == 400
        finally:
            stopped.set()
            for thread in clients:
                thread.join()
        assert {status for status, _ in answers} == {200}
        texts = [answer["translatedText"] for _, answer in answers]
        assert all(text in expected for text in texts) and all(each in texts for each in expected)
        wait_for(lambda: len(children(server.process.pid)) == 1)  # the memory of the old models is free


@pytest.mark.slow
def test_a_changed_glossary_replaces_the_old_one_only_if_it_is_valid(tmp_path: Path) -> None:
    """A glossary that was damaged or removed made every request fail."""
    line, terms, new = REAL_LINES[0], tmp_path / "terms.tsv", tmp_path / "new.tsv"
    terms.write_text(f"{line.split()[0]}\tHund\n")
    new.write_text(f"{line.split()[0]}\tKatze\n")
    flags = ("--path", f"en-de={save_transformer(tmp_path / 'model.pt')}", "--workers", "1", "--max-len-b", "5")
    with serving(tmp_path, *flags, "--glossary", str(terms)) as server:
        first = server.translate(line)
        assert "Hund" in first
        terms.write_text("no term\n")
        wait_for(lambda: server.metric("nmtkit_failed_reloads_total") > 0)
        assert server.translate(line) == first
        new.replace(terms)
        wait_for(lambda: "Katze" in server.translate(line))


def test_paths_of_the_list_begin_at_its_folder(tmp_path: Path) -> None:
    (tmp_path / "models.txt").write_text("\n# comment\nen-de=a.pt\n  runs/b.pt \n/c.pt\n")
    listed = ServeConfig(models=tmp_path / "models.txt").listed_models()
    assert [(model.path, model.pair) for model in listed] == [
        (tmp_path / "a.pt", ("en", "de")), (tmp_path / "runs/b.pt", None), (Path("/c.pt"), None),
    ]  # fmt: skip


def test_a_change_counts_when_two_checks_see_the_same_complete_files(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_text("1")
    files[1].write_text("1")
    changes = FileChanges(files)
    assert not changes.check()
    files[0].write_text("12")
    assert [changes.check() for _ in range(3)] == [False, True, False]
    files[1].unlink()
    assert not any(changes.check() for _ in range(3))
    for text in ("1", "12", "123"):  # a file that is being written
        files[1].write_text(text)
        assert not changes.check()
    assert changes.check()


@pytest.mark.parametrize("fault", ["models", "list"])
def test_a_reload_after_the_compilation_that_fails_is_not_repeated(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models were loaded every two seconds, each time with a warning, until a file changed."""
    calls: list[str] = []

    async def reload(job: ServeJob) -> bool:
        calls.append("models")
        return False

    listed = tmp_path / "models.txt"
    listed.write_text("a.pt\n" if fault == "models" else "\n")
    facts = SimpleNamespace(waits=True)
    pool = SimpleNamespace(
        models=SimpleNamespace(facts=facts), reload=reload, failed_reload=lambda error: calls.append("list")
    )
    monkeypatch.setattr(file_watcher, "WATCH_SECONDS", 0.001)
    background = SimpleNamespace(start=lambda: None, is_ready=lambda: True)
    monkeypatch.setattr(machine_code, "background", background)
    checks: list[str] = []

    class Keys(FileChanges):
        """Ends the watcher after ten checks."""

        def check(self, requested: bool = False) -> bool:
            checks.append("keys")
            if len(checks) > 10:
                raise asyncio.CancelledError
            return False

    async def run() -> None:
        job = ServeJob(
            config=ServeConfig(models=listed), paths=[], plugins=[], search=SearchOptions(), devices=DeviceOptions(),
            translator=TranslatorOptions(), text=TextOptions(), processors={},
        )  # fmt: skip
        service = SimpleNamespace(pool=pool)
        watcher = file_watcher.FileWatcher(job, service, asyncio.Event())  # type: ignore[arg-type]
        watcher.key_changes = Keys([])
        with contextlib.suppress(asyncio.CancelledError):
            await watcher.run()

    asyncio.run(run())
    assert calls == [fault]


def test_a_new_model_of_the_hub_is_opened_in_a_thread_and_may_fail_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests waited for the download. Without the extra of the Hub, the server no longer watched its files."""
    threads: list[threading.Thread] = []
    failures: list[Exception] = []

    def checkpoint_of(path: Path) -> Path:
        threads.append(threading.current_thread())
        raise ImportError(f"{path}: install nmtkit[hub]")

    monkeypatch.setattr("nmtkit.serving.config.checkpoint_of", checkpoint_of)
    (listed := tmp_path / "models.txt").write_text("en-de=hf:org/ours\n")
    models = SimpleNamespace(facts=SimpleNamespace(waits=False))
    service = SimpleNamespace(pool=SimpleNamespace(models=models, failed_reload=failures.append))
    job = ServeJob(
        config=ServeConfig(models=listed), paths=[], plugins=[], search=SearchOptions(), devices=DeviceOptions(),
        translator=TranslatorOptions(), text=TextOptions(), processors={},
    )  # fmt: skip

    async def run() -> None:
        requested = asyncio.Event()
        watching = asyncio.create_task(file_watcher.FileWatcher(job, service, requested).run())  # type: ignore[arg-type]
        for count in (1, 2):
            requested.set()
            while len(failures) < count and not watching.done():
                await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(run())
    assert ["hub" in str(error) for error in failures] == [True, True]
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_lines_wait_for_a_worker_with_the_models_of_their_request() -> None:
    loop = asyncio.new_event_loop()
    queue = FairQueue(100)
    old, new = SimpleNamespace(), SimpleNamespace()
    for text, models in (("a", old), ("b", new), ("c", old)):
        queue.add(QueuedRequest(BatchKey(("en", "de")), [text, text], loop.create_future(), models))
    assert len(queue.requests_of(old)) == 2 and len(queue.requests_of(new)) == 1
    batch = queue.next_batch(1000, 100, models=old)
    assert sorted(line.text for line in batch) == ["a", "a", "c", "c"]
    assert not queue.requests_of(old) and not queue.next_batch(1000, 100, models=old)
    queue.give_back(batch)
    assert len(queue.requests_of(old)) == 2
    assert [line.text for line in queue.next_batch(1000, 100, models=new)] == ["b", "b"]
    returned = itertools.chain.from_iterable(iter(lambda: queue.next_batch(1000, 100, models=old), []))
    assert sorted(line.text for line in returned) == ["a", "a", "c", "c"]
    loop.close()
