"""`--executor ray`: two nodes in one machine; killed actors, drivers and nodes."""

import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from builders import WORDS, save_tiny_transformer, tiny_tokenizer

from nmtkit.jobs.shard_plan import Plan, divide, merge, open_plan, read_plan
from nmtkit.jobs.shard_processes import check_capacity

LINES = 200
WHOLE = "".join(f"LINE {number}\n" for number in range(LINES)).encode()


@pytest.mark.parametrize(
    ("nodes", "actors", "cpus", "gpus", "room"),
    [
        ([{"CPU": 4.0}, {"CPU": 4.0}], 8, 1, 0, None),
        ([{"CPU": 4.0}, {"CPU": 4.0}], 3, 3, 0, 2),  # an actor cannot use CPUs of two nodes
        ([{"CPU": 16.0, "GPU": 2.0}, {"CPU": 16.0}], 3, 1, 1, 2),
        ([{"CPU": 2.0}], 4, 0.5, 0, None),
        ([{}], 1, 1, 0, 0),
    ],
    ids=["fits", "too few CPUs", "too few GPUs", "parts of a CPU", "a head without CPUs"],
)
def test_actors_must_fit_into_nodes(nodes, actors, cpus, gpus, room) -> None:
    if room is None:
        check_capacity(nodes, actors, cpus, gpus)
    else:
        with pytest.raises(ValueError, match=rf"room for {room} .*{actors} are needed"):
            check_capacity(nodes, actors, cpus, gpus)


def job(folder: Path) -> Plan:
    text = folder.parent / "text"
    text.write_text("".join(f"line {number}\n" for number in range(LINES)))
    return open_plan(folder, {}, {"input": text}, ".txt", 10, "nmtkit again", lambda: divide([text], 10))


# Runs the job with the named event in the middle: nothing, the death of an actor, of a node, or of the driver.
DRIVER = """
import os, signal, sys, time
from pathlib import Path
import ray
from nmtkit.jobs.shard_plan import read_plan
from nmtkit.jobs.shard_processes import RayCluster

folder, address, event = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["RAY_ADDRESS"] = address

def factory(threads):
    import os, signal, time
    class Upper:
        def output(self, shard, counts):
            if event == "actor" and shard.index == 7 and not (folder.parent / "once").exists():
                (folder.parent / "once").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            for number in range(shard.first, shard.first + shard.lines):
                time.sleep(0.03)
                yield b"LINE %d\\n" % number
    return Upper()

plan = read_plan(folder)
for shard, record in RayCluster(2, 1, 0).run(factory, plan, plan.unfinished()):
    print(shard.index, flush=True)
plan.remove_temporary_files(plan.shards)
print("end", flush=True)
"""


PORTS = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port", "metrics_export_port")


def free_ports() -> dict[str, int]:
    """Returns ports for a node. Without given ports, a node fails if its agents start slowly."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in PORTS]
        return {name: each.getsockname()[1] for name, each in zip(PORTS, sockets, strict=True)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, **free_ports()}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def start(plan: Plan, cluster: Any, event: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", DRIVER, str(plan.folder), cluster.address, event]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("event", ["nothing", "actor", "node", "driver"])
def test_two_nodes_write_identical_bytes_whatever_is_killed(cluster: Any, tmp_path: Path, event: str) -> None:
    node = cluster.add_node(num_cpus=1, **free_ports())
    cluster.wait_for_nodes()
    plan = job(tmp_path / "shards")
    with start(plan, cluster, event) as driver:
        assert driver.stdout is not None
        seen = [driver.stdout.readline() for _ in range(3)]
        if event == "node":
            cluster.remove_node(node, allow_graceful=False)
        elif event == "driver":
            driver.kill()
        rest = driver.stdout.read()
    if event == "driver":
        assert plan.unfinished()
        with start(plan, cluster, "nothing") as driver:
            assert driver.stdout is not None
            rest = driver.stdout.read()
    assert "end" in rest, seen
    if event != "node":
        cluster.remove_node(node)
    out = io.BytesIO()
    merge(plan, out)
    assert out.getvalue() == WHOLE
    end = time.monotonic() + 300  # Ray ends the actors of a killed driver after a while
    while (left := [name for name in os.listdir(plan.folder) if ".tmp" in name]) and time.monotonic() < end:
        time.sleep(0.5)
        plan.remove_temporary_files(plan.shards)
    assert left == []


@pytest.mark.slow
def test_actors_without_room_are_refused(cluster: Any, tmp_path: Path) -> None:
    plan = job(tmp_path / "shards")
    code = DRIVER.replace("RayCluster(2,", "RayCluster(9,")
    command = [sys.executable, "-c", code, str(plan.folder), cluster.address, "nothing"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert "room for 1 actors" in done.stderr


@pytest.mark.slow
def test_generate_on_a_cluster_equals_generate(cluster: Any, tmp_path: Path) -> None:
    save_tiny_transformer(tmp_path / "model.pt", tiny_tokenizer(), decoder_layers=1)
    (tmp_path / "text").write_text("".join(" ".join(WORDS[: 1 + number % 7]) + "\n" for number in range(50)))
    words = ["generate", "--path", "model.pt", "--input", "text", "--max-len-a", "0", "--max-len-b", "6"]
    command = [sys.executable, "-m", "nmtkit", *words]
    whole = subprocess.run([*command, "--device", "cpu"], cwd=tmp_path, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(
        [*command, "--output-dir", "shards", "--shard-lines", "8", "--executor", "ray"], cwd=tmp_path, check=True,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
    )  # fmt: skip
    out = io.BytesIO()
    assert merge(read_plan(tmp_path / "shards"), out)[0] == 50
    assert out.getvalue() == whole
