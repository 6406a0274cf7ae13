"""The process that loads the models. On CPUs it forks the workers; on a GPU it is the worker itself.

The process has one thread, unlike the server. So it can fork at any time to replace a worker. Workers share the weights
in memory. A worker ends when the server closes the connection of the worker, or when the server itself ends.
"""

import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

import torch

from nmtkit.jobs import openmp
from nmtkit.models.layers.shape_padding import limit_product_caches
from nmtkit.serving.loading import GUESS, Job, load_models
from nmtkit.serving.messages import receive, send
from nmtkit.serving.workers import work, work_on_gpu


def main(control: socket.socket) -> None:
    """Loads the models that the server names, reports them, and starts a worker for each connection from the server."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server handles these signals
        signal.signal(number, signal.SIG_IGN)
    message = receive(control)
    if message is None:
        return
    logging.basicConfig(level=message["log_level"], format="%(levelname)s: %(message)s")
    torch.set_num_threads(1)
    limit_product_caches()  # saves half a gigabyte of memory in each worker
    try:
        job = Job.from_message(message)
        models, prepare = load_models(job)
    except (ValueError, OSError, ImportError) as error:
        send(control, {"error": str(error)})
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # prevents zombie processes
    device = next(iter(models.values())).translator.device
    forks, threads = device.type == "cpu", job.devices.threads
    send(
        control,
        {
            "pairs": list(models),
            "device": str(device),
            "workers": job.worker_count if forks else 1,
            "streams": not forks,
            "max_tokens": max(model.translator.max_tokens for model in models.values()) // (GUESS if forks else 1),
        },
    )
    if forks and job.worker_count == 1 and threads is None:
        threads = 1
    while (received := _receive_connection(control)) is not None:
        if not forks:
            send(control, {"pid": os.getpid()})
            work_on_gpu(received, models)
            return
        pid = os.fork()
        if pid == 0:
            _run_worker(control, received, threads, lambda connection: work(connection, models, prepare))
        received.close()
        send(control, {"pid": pid})


def _run_worker(
    control: socket.socket, connection: socket.socket, threads: int | None, run: Callable[[socket.socket], None]
) -> None:
    """Runs a forked worker; never returns."""
    status = 1
    try:
        control.close()
        if threads is not None and threads > 1:
            torch.set_num_threads(threads)
            openmp.start()
        run(connection)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _receive_connection(control: socket.socket) -> socket.socket | None:
    """Returns the connection of the next worker, or None if the server has ended."""
    try:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    except ConnectionError:
        return None
    return socket.socket(fileno=descriptors[0]) if data and descriptors else None


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
