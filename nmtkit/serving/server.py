"""The server's life: it loads models, listens, loads them anew, and finishes what is running before it ends."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nmtkit.config import to_dict
from nmtkit.search.options import SearchOptions
from nmtkit.serving.config import ModelPath, ServeConfig, read_api_keys
from nmtkit.translation.options import DeviceOptions, TextOptions, TranslatorOptions

WATCH_SECONDS = 2.0  # between two looks at the files
KEEP_ALIVE_SECONDS = 75  # above the 60 that proxies keep a connection for
CONNECTIONS = 2000  # at a time; more are answered 503
GRACE_SECONDS = 5  # beyond the time limit of a request, until a server that ends gives up

logger = logging.getLogger("nmtkit")


def run(
    config: ServeConfig,
    paths: Sequence[ModelPath],
    plugins: Sequence[str],
    search: SearchOptions,
    devices: DeviceOptions,
    translator: TranslatorOptions,
    text: TextOptions,
) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError or ValueError for what cannot be loaded or listened on."""
    keys = [] if config.api_keys is None else read_api_keys(config.api_keys)
    raise_open_files()
    settings = {
        "paths": [(path.pair, str(Path(path.path).absolute())) for path in paths],
        "plugins": list(plugins),
        "search": to_dict(search),
        "devices": to_dict(devices),
        "translator": to_dict(translator),
        "text": to_dict(text),
        "split_sentences": config.split_sentences,
        "workers": config.workers,
        "log_level": logger.getEffectiveLevel(),
    }
    files = [Path(path.path) for path in paths]
    with listening_socket(config.host, config.port) as listener:
        asyncio.run(serve(config, settings, files, keys, listener))


async def serve(
    config: ServeConfig, settings: dict[str, Any], files: list[Path], keys: list[bytes], listener: socket.socket
) -> None:
    import uvicorn

    from nmtkit.serving.app import Service
    from nmtkit.serving.pool import Pool
    from nmtkit.serving.protocol import HttpProtocol

    async with Pool(settings, config.max_queue) as pool:
        service = Service(config, pool, keys)
        await asyncio.to_thread(lambda: service.detector)  # it is loaded now, not by the first request
        server = uvicorn.Server(
            uvicorn.Config(
                service.application(),
                http=HttpProtocol,
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
        server.capture_signals = contextlib.nullcontext  # the handlers are these
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()

        def stop() -> None:
            logger.info("finishing what is running")
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        loop.add_signal_handler(signal.SIGHUP, asked.set)
        watching = loop.create_task(keep_up_to_date(files, asked, config, service))
        pairs = ", ".join(f"{source} to {target}" for source, target in pool.pairs)
        address = listener.getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        workers = f"{len(pool.workers)} worker{'s' * (len(pool.workers) > 1)}"
        where = f"{workers} on {pool.models.device}" if pool.models is not None else workers
        logger.info("translating %s at http://%s:%d (%s)", pairs, host, address[1], where)
        try:
            await server.serve(sockets=[listener])
        finally:
            watching.cancel()


async def keep_up_to_date(files: Sequence[Path], asked: asyncio.Event, config: ServeConfig, service: Any) -> None:
    """Loads models and keys anew when asked to, and when a file has changed and stays so for a while."""
    loaded = before = states(files)
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), WATCH_SECONDS)
        now = states(files)
        if asked.is_set() or (now != loaded and now == before and None not in now):
            asked.clear()
            loaded = now
            logger.info("loading the models anew")
            await service.pool.reload()
            if config.api_keys is not None:
                try:
                    service.keys = read_api_keys(config.api_keys)
                except (OSError, ValueError) as error:
                    logger.warning("the API keys were not read anew: %s", error)
        before = now


def states(files: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    """Returns what tells a file from one that takes its place; None for one that is not there."""
    result: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            facts = file.stat()
            result.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
        except OSError:
            result.append(None)
    return result


def listening_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises OSError naming the address, and what to do."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # asyncio does so only for sockets that name their protocol; else a body may wait until its head is acknowledged
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; give another --port or --host") from error


def raise_open_files() -> None:
    """Raises the limit of open files, one for each connection, as far as it may be."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
