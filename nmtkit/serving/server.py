"""Starts the server, and stops the server after the running requests."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmtkit.jobs.folder_lock import FolderLock
from nmtkit.jobs.threads import short_switch_interval
from nmtkit.serving.config import ServeJob
from nmtkit.serving.glossaries import GlossaryStore
from nmtkit.serving.keys import Keys, Usage, read_api_keys
from nmtkit.serving.languages import described

SAVE_SECONDS = 1.0  # pause between two writes of the counts of API keys
KEEP_ALIVE_SECONDS = 75  # longer than the keep-alive time of proxies (60 s)
CONNECTIONS = 2000  # maximum number of connections; further connections get status 503
GRACE_SECONDS = 5  # time beyond --timeout that a stopping server gives to running requests

logger = logging.getLogger("nmtkit")


def run(job: ServeJob) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError or ValueError if a model cannot be loaded or the port is taken."""
    config = job.config
    keys = {} if config.api_keys is None else read_api_keys(config.api_keys)
    if config.state is None and any(key.quotas for key in keys.values()):
        logger.warning("the counts of the quotas are lost when the server ends; give --state FOLDER to keep them")
    raise_open_files()
    with listening_socket(config.host, config.port) as listener, state_folder(config.state) as (usage, glossaries):
        asyncio.run(serve(job, keys, usage, glossaries, listener))


@contextlib.contextmanager
def state_folder(folder: Path | None) -> Iterator[tuple[Usage, GlossaryStore]]:
    """Locks the folder of --state, and yields its counts of API keys and its glossaries. Writes the counts at the end.

    If `folder` is None, keeps the counts and the glossaries only until the end. Raises ValueError if another server
    uses the folder, or if a file in the folder is damaged.
    """
    if folder is None:
        with contextlib.closing(GlossaryStore(None)) as glossaries:
            yield Usage(), glossaries
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder, "--state")
    lock.acquire()
    try:
        usage = Usage(folder / "usage.json")
        (folder / "glossaries").mkdir(exist_ok=True)
        try:
            yield usage, GlossaryStore(folder / "glossaries")
        finally:
            if (contents := usage.unsaved()) is not None:
                usage.save(contents)
    finally:
        lock.release()


async def save(usage: Usage) -> None:
    """Saves new counts of API keys every SAVE_SECONDS. Logs the first of several errors in a row."""
    is_logged = False
    while True:
        await asyncio.sleep(SAVE_SECONDS)
        if (contents := usage.unsaved()) is not None:
            try:
                await asyncio.to_thread(usage.save, contents)
                is_logged = False
            except OSError as error:
                if not is_logged:
                    logger.warning("the counts of API keys are not saved: %s", error)
                is_logged = True


async def serve(job: ServeJob, keys: Keys, usage: Usage, glossaries: GlossaryStore, listener: socket.socket) -> None:
    import uvicorn

    from nmtkit.serving.app import Service
    from nmtkit.serving.file_watcher import FileWatcher
    from nmtkit.serving.pool import Pool
    from nmtkit.serving.protocol import HttpProtocol

    config = job.config
    logger.info("loading %s", ", ".join(str(model.path) for model in job.all_paths))
    async with Pool(job) as pool:
        service = Service(config, pool, keys, usage, glossaries)
        await asyncio.to_thread(lambda: service.translator.detector)  # load the detector now, not in the first request
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # suppresses a warning for each invalid request
        protocol: Any = functools.partial(HttpProtocol, refused=lambda status: service.metrics.observe("", status, 0))
        server: Any = uvicorn.Server(
            uvicorn.Config(
                service.application(),
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(config.timeout) + GRACE_SECONDS,
            )
        )
        server.capture_signals = contextlib.nullcontext  # the handlers below replace the handlers of uvicorn
        loop = asyncio.get_running_loop()
        reload_requested = asyncio.Event()

        def stop() -> None:
            logger.info("stopping after the running requests")
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, reload_requested.set)
        tasks = [loop.create_task(FileWatcher(job, service, reload_requested).run()), loop.create_task(save(usage))]
        pairs = described(pool.pairs)
        address = listener.getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        workers = f"{len(pool.workers)} worker{'s' * (len(pool.workers) > 1)}"
        device = pool.models.facts.device
        logger.info("translating %s at http://%s:%d (%s on %s)", pairs, host, address[1], workers, device)
        try:
            with short_switch_interval():  # the event loop does not wait for threads that read texts
                await server.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()


def listening_socket(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises OSError with the address and a remedy."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # asyncio sets TCP_NODELAY only for sockets with a protocol number. Without TCP_NODELAY, answers may be delayed.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; give another --port or --host") from error


def raise_open_files() -> None:
    """Raises the limit of open files to the maximum, because each connection is an open file."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
