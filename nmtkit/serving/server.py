"""Starts the server, reloads changed models, and stops the server after the running requests."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmtkit.jobs import machine_code
from nmtkit.jobs.threads import short_switch_interval
from nmtkit.serving.config import ServeJob, read_api_keys
from nmtkit.serving.languages import described

if TYPE_CHECKING:
    from nmtkit.serving.app import Service

WATCH_SECONDS = 2.0  # pause between two checks of the checkpoint files
KEEP_ALIVE_SECONDS = 75  # longer than the keep-alive time of proxies (60 s)
CONNECTIONS = 2000  # maximum number of connections; further connections get status 503
GRACE_SECONDS = 5  # time beyond --timeout that a stopping server gives to running requests

logger = logging.getLogger("nmtkit")


def run(job: ServeJob) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError or ValueError if a model cannot be loaded or the port is taken."""
    config = job.config
    keys = [] if config.api_keys is None else read_api_keys(config.api_keys)
    raise_open_files()
    with listening_socket(config.host, config.port) as listener:
        asyncio.run(serve(job, keys, listener))


async def serve(job: ServeJob, keys: list[bytes], listener: socket.socket) -> None:
    import uvicorn

    from nmtkit.serving.app import Service
    from nmtkit.serving.pool import Pool
    from nmtkit.serving.protocol import HttpProtocol

    config = job.config
    logger.info("loading %s", ", ".join(str(model.path) for model in job.paths))
    async with Pool(job) as pool:
        service = Service(config, pool, keys)
        await asyncio.to_thread(lambda: service.detector)  # load the detector now, not in the first request
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
        watching = loop.create_task(keep_up_to_date([model.path for model in job.paths], reload_requested, service))
        pairs = described(pool.pairs)
        address = listener.getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        workers = f"{len(pool.workers)} worker{'s' * (len(pool.workers) > 1)}"
        where = f"{workers} on {pool.models.facts.device}" if pool.models is not None else workers
        logger.info("translating %s at http://%s:%d (%s)", pairs, host, address[1], where)
        try:
            with short_switch_interval():  # the event loop does not wait for threads that read texts
                await server.serve(sockets=[listener])
        finally:
            watching.cancel()


async def keep_up_to_date(files: Sequence[Path], reload_requested: asyncio.Event, service: "Service") -> None:
    """Reloads models and API keys when `reload_requested` is set, and when checkpoint files have changed.

    Changed files are loaded only if two checks in a row see the same state, because a file may still be incomplete.
    Models are also loaded again when the search of their engine has been compiled, which is started here.
    """
    loaded = before = states(files)
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reload_requested.wait(), WATCH_SECONDS)
        now = states(files)
        models = service.pool.models
        if models is not None and models.facts.waits:
            machine_code.background.start()
            if machine_code.background.is_ready():
                reload_requested.set()
        if reload_requested.is_set() or (now != loaded and now == before and None not in now):
            reload_requested.clear()
            loaded = now
            logger.info("reloading the models")
            await service.pool.reload()
            if service.config.api_keys is not None:
                try:
                    service.keys = read_api_keys(service.config.api_keys)
                except (OSError, ValueError) as error:
                    logger.warning("could not reload the API keys, so the old ones stay: %s", error)
        before = now


def states(files: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    """Returns inode, size and modification time of each file, or None for a missing file."""
    result: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            status = file.stat()
            result.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            result.append(None)
    return result


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
