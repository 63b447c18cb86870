"""A run listens where its endpoint says: on one machine at loopback only, and what strangers send is not run."""

import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from cli.train import sockets
from cli.train.sockets import interface_variables, listening_store, rank_stores, rendezvous_handler
from tests.helpers.processes.namespaces import needs_namespaces, netcluster
from tests.helpers.processes.pairs import COMMON, UNMEASURED, Node, Pair

SOON = timedelta(seconds=10)
ENDLESS = (*COMMON, *UNMEASURED, "--steps", 100_000, "--no-save")


def listening(*pids: int) -> set[tuple[str, int]]:
    """Addresses and ports at which these processes and their children listen."""
    processes = [psutil.Process(pid) for pid in pids]
    family = processes + [child for process in processes for child in process.children(recursive=True)]
    sockets = [each for process in family for each in process.net_connections("tcp")]
    return {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN}


def test_a_store_listens_at_its_address_alone() -> None:
    store = listening_store("127.0.0.1", 0, SOON)
    assert ("127.0.0.1", store.port) in listening(os.getpid())
    dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=SOON).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", store.port), timeout=10)
    with pytest.raises(
        ConnectionError, match=f"cannot listen at 127.0.0.1, port {store.port}: Address already in use"
    ):
        listening_store("127.0.0.1", store.port, SOON)


def test_a_launcher_of_one_node_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher does
    before = len(psutil.Process().net_connections("all"))
    handler = rendezvous_handler(
        RendezvousParameters(sockets.BACKEND, "127.0.0.1:0", "run", 1, 1, local_addr="here")
    )
    assert not handler.is_closed()
    assert len(psutil.Process().net_connections("all")) == before
    assert handler.shutdown()


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_ranks_of_our_launcher_share_a_store_at_one_address(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What torchrun gives as the address of a single node is this machine's name.
    for name, value in {
        "MASTER_ADDR": "127.0.0.1" if nodes > 1 else "a-name",
        "MASTER_PORT": str(port),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(sockets.LAUNCH, "launch")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    rank: Any = type("Rank", (), {"nodes": nodes, "is_rank0": True})()
    first, second = rank_stores(rank, SOON)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert {address for address, at in listening(os.getpid()) if at == port} == {"127.0.0.1"}


def test_gloo_and_nccl_listen_at_the_interface_of_an_address() -> None:
    (name, *_) = (
        name for name, held in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in held)
    )
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    assert interface_variables("192.0.2.1") == {}


def test_what_a_stranger_puts_into_the_rendezvous_is_not_unpickled(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "attacked"),)

    state, node = _RendezvousState(), _NodeDesc("here", 1, 0)
    state.participants[node], state.last_heartbeats[node] = 0, datetime.now(UTC)
    state.wait_list.add(node)
    state.deadline = datetime.now(UTC)
    store = dist.HashStore()
    backend = sockets._CheckedBackend(store, "run")
    token = backend.set_state(pickle.dumps(state))[1]
    assert pickle.loads(backend.get_state()[0]).participants == {node: 0}
    unchecked = C10dRendezvousBackend(store, "run")
    for bad, why in (
        (pickle.dumps(Attack()), "it holds posix.mkdir"),
        (pickle.dumps(dataclasses.replace), "it holds dataclasses.replace"),
        (b"torch.distributed", "a launcher's"),
    ):
        token = unchecked.set_state(bad, token)[1]  # type: ignore[index]
        with pytest.raises(RendezvousStateError, match=why):
            backend.get_state()
        with pytest.raises(RendezvousStateError, match=why):
            backend.set_state(pickle.dumps(state), b"an old token")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_of_one_machine_listens_at_loopback_only(
    pair: Pair, checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as two nodes at a loopback endpoint, and where the user has named another network."""
    words = ("--model", checkpoint, "--data", data, *ENDLESS)
    pair.start(*words, "--output", tmp_path / "two")
    pair.wait_for(r"^step 2/")
    places = listening(*(node.process.pid for node in pair.nodes))
    assert int(pair.endpoint.partition(":")[2]) in {port for _, port in places}
    assert {address for address, _ in places} == {"127.0.0.1"}
    for node in pair.nodes:
        node.process.send_signal(signal.SIGINT)
    assert pair.statuses(120) == [130, 130]
    pair.nodes.clear()

    outside = [
        name for name, held in psutil.net_if_addrs().items() if "127.0.0.1" not in {a.address for a in held}
    ]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", outside[0] if outside else "lo")
    pair.nodes.append(
        Node("alone", tmp_path, *words, "--output", tmp_path / "one", "--nodes", 1, "--gpus-per-node", 2)
    )
    pair.wait_for(r"^step 2/")
    launcher = psutil.Process(pair.nodes[-1].process.pid)
    places = listening(launcher.pid)
    assert len(places) >= 3  # rank 0's store, and gloo of each rank
    assert {address for address, _ in places} == {"127.0.0.1"}
    assert not [each for each in launcher.net_connections("tcp") if each.status == psutil.CONN_LISTEN]


@needs_namespaces
@pytest.mark.slow
def test_other_machines_reach_nothing_of_a_run_of_one_and_of_several_the_endpoints_address(
    checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    def start(node: int, name: str, *more: object) -> Any:
        words = ("--model", checkpoint, "--data", data, *ENDLESS, "--output", tmp_path / name, *more)
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with (tmp_path / f"{name}{node}.log").open("w") as log:
            command = [sys.executable, "-m", "cli.main", *map(str, words)]
            return cluster.start(node, command, environment, stdout=log, stderr=subprocess.STDOUT)

    def wait_for_steps(launcher: Any, name: str) -> None:
        log, deadline = tmp_path / f"{name}0.log", time.monotonic() + 240
        while "step 2/" not in log.read_text():
            assert launcher.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def listeners(node: int) -> set[tuple[str, str]]:
        """Addresses and ports of all listeners in the node's namespace, where nothing else runs."""
        said = cluster.start(node, ["ss", "-Hltn"], {}, stdout=subprocess.PIPE).communicate()[0]
        return {
            (where[0], where[2]) for where in (line.split()[3].rpartition(":") for line in said.splitlines())
        }

    with netcluster.Cluster(2, "unlimited") as cluster:
        alone = start(0, "alone", "--nodes", 1, "--gpus-per-node", 2)
        wait_for_steps(alone, "alone")
        assert {address for address, _ in listeners(0)} == {"127.0.0.1"}
        ports = {port for _, port in listeners(0)}
        for port in ports:
            connect = f"import socket; socket.create_connection(('{cluster.address(0)}', {port}), 10)"
            client = cluster.start(1, [sys.executable, "-c", connect], {}, stderr=subprocess.PIPE)
            assert "ConnectionRefusedError" in client.communicate()[1]
        alone.terminate()
        alone.wait(120)

        meet = ("--nodes", 2, "--rdzv-endpoint", f"{cluster.address(0)}:29400", "--gpus-per-node", 1)
        launchers = [start(node, "both", *meet) for node in range(2)]
        wait_for_steps(launchers[0], "both")
        for node in range(2):
            assert {address for address, _ in listeners(node)} == {cluster.address(node)}
