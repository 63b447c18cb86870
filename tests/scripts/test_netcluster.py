"""``scripts/netcluster.py`` with real network namespaces where we may make them."""

import subprocess
import sys

import pytest

from tests.helpers.processes.namespaces import needs_namespaces, netcluster
from tests.helpers.scripts import SCRIPTS

SCRIPT = SCRIPTS / "netcluster.py"
SEND = """
import os, socket, sys, time
sys.path.insert(0, sys.argv[2])
import netcluster
node, nbytes = int(os.environ["GROUP_RANK"]), int(sys.argv[1])
before = netcluster.network_bytes()
if node == 0:
    with socket.create_server(("", 5001)) as server:
        connection, _ = server.accept()
        got = 0
        while data := connection.recv(1 << 20):
            got += len(data)
    print("got", got)
else:
    for _ in range(1000):
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], 5001))
            break
        except OSError:
            time.sleep(0.05)
    started = time.perf_counter()
    connection.sendall(bytes(nbytes))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print("seconds", time.perf_counter() - started)
    moved = netcluster.network_bytes() - before
    print("payload", moved.sent_payload)
"""


def _up(*options: str, command: list[str], timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "up", *options, "--", *command],
        capture_output=True, text=True, timeout=timeout, check=False, cwd="/",
    )  # fmt: skip


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return {line.split()[0] for line in listed.splitlines() if line.strip()}


@needs_namespaces
def test_links_are_as_slow_as_requested_and_counted() -> None:
    before = _namespaces()
    nbytes = 4_000_000
    done = _up("--rate", "40mbit", command=[sys.executable, "-c", SEND, str(nbytes), str(SCRIPT.parent)])
    assert done.returncode == 0, done.stdout + done.stderr
    said = {line.split()[-2]: float(line.split()[-1]) for line in done.stdout.splitlines() if "rank" in line}
    assert said["got"] == nbytes
    assert said["payload"] == pytest.approx(nbytes, rel=0.01)
    assert 0.9 * nbytes * 8 / 40e6 < said["seconds"] < 8 * nbytes * 8 / 40e6
    assert "node 1: sent 3.8" in done.stdout
    assert _namespaces() == before


@needs_namespaces
def test_environment_is_that_of_torchrun() -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR GLOO_SOCKET_IFNAME"
    show = "echo " + " ".join(f"${name}" for name in names.split())
    done = _up("--ranks", "2", command=["sh", "-c", show])
    lines = sorted(line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("["))
    assert lines == [f"{rank} 4 {rank % 2} 2 {rank // 2} 10.77.0.1 eth0" for rank in range(4)]
    done = _up("--per-node", "--nodes", "3", command=["sh", "-c", "echo $NNODES $NODE_RANK $RANK."])
    assert sorted(line for line in done.stdout.splitlines() if "]" in line) == [
        f"[node {node}] 3 {node} ." for node in range(3)
    ]


@needs_namespaces
def test_a_cut_link_and_a_changed_rate() -> None:
    with netcluster.Cluster(2) as cluster:
        carrier = ["ip", "netns", "exec", cluster.namespace(1), "cat", "/sys/class/net/eth0/carrier"]

        def plugged() -> bool:
            return subprocess.run(carrier, capture_output=True, text=True, check=True).stdout.strip() == "1"

        assert plugged()
        cluster.set_link(1, False)
        assert not plugged()
        cluster.set_link(1, True)
        assert plugged()
        show = ["tc", "-n", cluster.namespace(0), "qdisc", "show", "dev", "eth0"]
        assert "tbf" not in subprocess.run(show, capture_output=True, text=True, check=True).stdout
        cluster.set_rate("2.5gbit")
        assert "rate 2500Mbit" in subprocess.run(show, capture_output=True, text=True, check=True).stdout
        cluster.set_rate("unlimited", node=0)
        assert "tbf" not in subprocess.run(show, capture_output=True, text=True, check=True).stdout
