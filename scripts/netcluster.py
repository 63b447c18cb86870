"""An emulated cluster on one machine: every node a network namespace, every link as slow as you say.

    python scripts/netcluster.py up --nodes 2 --ranks 2 --rate 1gbit -- python train.py

The nodes hang on a bridge in a separate namespace, so nothing of the machine's own network is touched; `tc tbf`
limits every link in both directions. COMMAND is started `--ranks` times on each node with the environment that torchrun
gives (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT), or with `--per-node` once
on each with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. Ranks of one node talk over its loopback device, so the
counters of `eth0` are purely what crosses nodes: `network_bytes()` reads them from inside, around every step if you
like, and their totals are printed at the end.

Needs root and the commands ip and tc. Everything is removed at the end, however that comes about; what a killed
netcluster leaves behind goes when the next one starts, or with `netcluster.py down`. The exit status is that of the
first command that failed; then the others are ended.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from common.errors import FinetuneError, UserError
from common.hardware.machine import cpu_count
from common.units import format_bytes

PREFIX = "netcluster"
DEVICE = "eth0"  # Every node's network device, named as in a real one
MASTER_PORT = 29500
HEADER_BYTES = 14 + 20 + 32
ENDING_GRACE_S = 5.0

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class ClusterError(FinetuneError):
    """The emulated network could not be set up or taken down."""


def rate_bits(rate: str) -> float | None:
    """Bits per second in ``1gbit``, ``2.5gbit``, ``100mbit``; None for ``unlimited``.

    Raises:
        UserError: it is none of these.
    """
    if rate == "unlimited":
        return None
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(kbit|mbit|gbit)", rate)
    if not match or float(match[1]) <= 0:
        raise UserError(f"{rate!r} is not a rate. Write it as 1gbit, 2.5gbit, 100mbit, or unlimited.")
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class NetworkBytes:
    """Counters of a network device since it exists, headers and acknowledgements included."""

    sent: int
    received: int
    sent_packets: int

    @property
    def sent_payload(self) -> int:
        """Less the headers of Ethernet, IP and TCP with timestamps. An acknowledgement counts nothing then; with small
        packets that is worth 2 percent. The kernel's super-packets have one header each."""
        return self.sent - HEADER_BYTES * self.sent_packets

    def __sub__(self, earlier: "NetworkBytes") -> "NetworkBytes":
        return NetworkBytes(
            self.sent - earlier.sent,
            self.received - earlier.received,
            self.sent_packets - earlier.sent_packets,
        )


def network_bytes(device: str = DEVICE) -> NetworkBytes:
    """The counters of ``device`` in the network namespace of this process.

    Raises:
        ClusterError: there is no such device.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            fields = numbers.split()
            return NetworkBytes(sent=int(fields[8]), received=int(fields[0]), sent_packets=int(fields[9]))
    raise ClusterError(
        f"This process has no network device {device!r}: it does not run on a node of a netcluster."
    )


class Cluster:
    """Namespaces joined by a bridge, from ``with`` to its end.

    Args:
        nodes: how many, at least 1, at most 250.
        rate: of every link, each direction: see :func:`rate_bits`.

    Raises:
        UserError: not root, a command is missing, or a bad rate.
        ClusterError: the kernel refused something.
    """

    def __init__(self, nodes: int, rate: str = "unlimited"):
        rate_bits(rate)
        if not 1 <= nodes <= 250:
            raise UserError(f"A cluster of {nodes} nodes cannot be made: 1 to 250 can.")
        self.nodes = nodes
        self.master_address = self.address(0)
        self._rate = rate
        self._name = f"{PREFIX}-{os.getpid()}"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Cluster":
        check_possible()
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def address(self, node: int) -> str:
        """The node's IP address."""
        return f"10.77.0.{node + 1}"

    def namespace(self, node: int) -> str:
        """The node's name, for ``ip netns exec``."""
        return f"{self._name}-{node}"

    def start(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], **options: object
    ) -> "subprocess.Popen[str]":
        """Start ``command`` on a node, in a separate process group that ends with the cluster.

        Args:
            environment: on top of ours and of what makes libraries find the right network device.
            options: for ``subprocess.Popen``.
        """
        variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), DEVICE)
        process: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
            ["ip", "netns", "exec", self.namespace(node), *command], env={**os.environ, **variables, **environment},
            start_new_session=True, text=True, **options,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def set_rate(self, rate: str, node: int | None = None) -> None:
        """Change the rate of one node's link, or of all, from now on."""
        for index in range(self.nodes) if node is None else [node]:
            for namespace, device in ((self.namespace(index), DEVICE), (self._switch, f"port{index}")):
                _shape(namespace, device, rate_bits(rate))

    def set_link(self, node: int, up: bool) -> None:
        """Plug a node's cable in, or pull it out. The switch's end is taken: the node sees its carrier go."""
        _ip("-n", self._switch, "link", "set", f"port{node}", "up" if up else "down")

    def counters(self, node: int) -> NetworkBytes:
        """What has crossed a node's link so far, seen from the node."""
        counters = {}
        for kind in ("tx_bytes", "rx_bytes", "tx_packets"):
            path = f"/sys/class/net/{DEVICE}/statistics/{kind}"
            counters[kind] = int(_run(["ip", "netns", "exec", self.namespace(node), "cat", path]))
        return NetworkBytes(counters["tx_bytes"], counters["rx_bytes"], counters["tx_packets"])

    def wait(self) -> int:
        """Wait for everything started; end the rest once one has failed. The exit status of the first that failed."""
        while True:
            statuses = [process.poll() for process in self._processes]
            failed = [status for status in statuses if status]
            if failed:
                self._end_processes()
                return failed[0] if failed[0] > 0 else 128 - failed[0]
            if all(status == 0 for status in statuses):
                return 0
            time.sleep(0.05)

    def close(self) -> None:
        """End what runs, remove the namespaces and with them all devices. Idempotent."""
        self._end_processes()
        for namespace in _namespaces():
            if namespace.startswith(f"{self._name}-"):
                _remove(namespace)

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for node in range(self.nodes):
            namespace, port = self.namespace(node), f"port{node}"
            _ip("netns", "add", namespace)
            pair = ["link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", namespace]
            _ip("-n", self._switch, *pair)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", namespace, "address", "add", f"{self.address(node)}/24", "dev", DEVICE)
            _ip("-n", namespace, "link", "set", DEVICE, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _keep_order(namespace, DEVICE)
            _keep_order(self._switch, port)
        self.set_rate(self._rate)

    def _end_processes(self) -> None:
        """Ask, then kill: whole process groups, because commands start workers."""
        for number, grace in ((signal.SIGTERM, ENDING_GRACE_S), (signal.SIGKILL, ENDING_GRACE_S)):
            for process in self._processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            deadline = time.monotonic() + grace
            while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
                time.sleep(0.02)


def _shape(namespace: str, device: str, bits: float | None) -> None:
    """Let a device send ``bits`` per second; None: as fast as it can."""
    _ip("-n", namespace, "link", "show", device)  # says which link, if it is not there
    _run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], may_fail=True)
    if bits is not None:
        # A bucket of 4 ms, but no less than one of the kernel's 64 KiB super-packets; a queue of 50 ms.
        burst = max(int(bits / 8 * 0.004), 128 << 10)
        limit = burst + int(bits / 8 * 0.05)
        shape = ["tbf", "rate", f"{bits:.0f}bit", "burst", str(burst), "limit", str(limit)]
        _run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape])


def check_possible() -> None:
    """Refuse at once what would fail half-way.

    Raises:
        UserError: no root, or no ip or tc.
    """
    if os.geteuid() != 0:
        raise UserError(
            "An emulated cluster needs root: network namespaces and traffic control do. Try it with sudo."
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UserError(f"An emulated cluster needs the command {tool!r}: install the package iproute2.")


def remove_leftovers() -> list[str]:
    """Remove the namespaces of netclusters whose process is gone, and end what runs in them. Returns their names."""
    removed = []
    for namespace in _namespaces():
        match = re.fullmatch(rf"{PREFIX}-(\d+)-\w+", namespace)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove(namespace)
            removed.append(namespace)
    return removed


def _namespaces() -> list[str]:
    return [
        line.split()[0] for line in _run(["ip", "netns", "list"], may_fail=True).splitlines() if line.strip()
    ]


def _remove(namespace: str) -> None:
    """Delete a namespace after all that still runs in it: a namespace lives as long as its processes do."""
    for process in _run(["ip", "netns", "pids", namespace], may_fail=True).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    _ip("netns", "delete", namespace, may_fail=True)


def _keep_order(namespace: str, device: str) -> None:
    """Have each connection's packets handled by one CPU, as the queues of a real network device do.

    Else they queue on the CPU that their sender runs on, overtake each other when it moves, and TCP sends again what
    was never lost: measured, 1 to 3 percent of the bytes.
    """
    groups = f"{(1 << (os.cpu_count() or 1)) - 1:x}"
    groups = ",".join(re.findall(r".{1,8}", groups[::-1]))[::-1]  # 32 CPUs each
    queue = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
    # Kernels may have been built without it.
    _run(["ip", "netns", "exec", namespace, "sh", "-c", f"echo {groups} > {queue}"], may_fail=True)


def _ip(*arguments: str, may_fail: bool = False) -> str:
    return _run(["ip", *arguments], may_fail=may_fail)


def _run(command: list[str], *, may_fail: bool = False) -> str:
    """What ``command`` prints.

    Raises:
        ClusterError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise ClusterError(f"The emulated network failed at `{' '.join(command)}`: {reason}")
    return done.stdout


def rank_environments(cluster: Cluster, ranks: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Node and torchrun-like environment of every rank."""
    threads = thread_limit(cluster.nodes * ranks)
    for node in range(cluster.nodes):
        for local_rank in range(ranks):
            yield node, {
                "RANK": str(node * ranks + local_rank), "WORLD_SIZE": str(cluster.nodes * ranks),
                "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": str(node),
                "MASTER_ADDR": cluster.master_address, "MASTER_PORT": str(MASTER_PORT), **threads,
            }  # fmt: skip


def node_environments(cluster: Cluster) -> Iterator[tuple[int, dict[str, str]]]:
    """Node and environment of a launcher on each node."""
    shared = {
        "MASTER_ADDR": cluster.master_address,
        "MASTER_PORT": str(MASTER_PORT),
        **thread_limit(cluster.nodes),
    }
    for node in range(cluster.nodes):
        yield node, {"NNODES": str(cluster.nodes), "NODE_RANK": str(node), **shared}


def thread_limit(processes: int) -> dict[str, str]:
    """The cores of this machine, divided among processes that each believe they have the machine alone.

    Their threads wait for each other after every operator, spinning: with four times as many as there are cores, what
    takes seconds takes minutes. A value of OMP_NUM_THREADS wins.
    """
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_count() // processes)))}


def _relay(process: "subprocess.Popen[str]", label: str) -> threading.Thread:

    def copy() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            click.echo(f"[{label}] {line}", nl=False)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _turn_signals_into_exits() -> None:
    """So that ``with`` cleans up after SIGTERM and SIGHUP as after Ctrl-C."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


@click.group(help=__doc__)
def main() -> None:
    """The command."""


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--nodes", default=2, show_default=True, type=int, help="How many nodes.")
@click.option(
    "--ranks", default=1, show_default=True, type=int, help="How often COMMAND is started on each node."
)
@click.option(
    "--per-node", is_flag=True, help="Start COMMAND once on each node: it starts its workers itself."
)
@click.option(
    "--rate", default="unlimited", show_default=True, help="Of every link: 1gbit, 100mbit, unlimited."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def up(nodes: int, ranks: int, per_node: bool, rate: str, command: tuple[str, ...]) -> None:
    """Make a cluster, run COMMAND on it, take it down."""
    _turn_signals_into_exits()
    try:
        with Cluster(nodes, rate) as cluster:
            before = [cluster.counters(node) for node in range(nodes)]
            places = node_environments(cluster) if per_node else rank_environments(cluster, ranks)
            relays = []
            for node, environment in places:
                process = cluster.start(
                    node, command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=1
                )
                label = f"node {node}" if per_node else f"node {node} rank {environment['RANK']}"
                relays.append(_relay(process, label))
            status = cluster.wait()
            for relay in relays:
                relay.join(timeout=1)
            for node in range(nodes):
                moved = cluster.counters(node) - before[node]
                click.echo(
                    f"node {node}: sent {format_bytes(moved.sent)}, received {format_bytes(moved.received)}"
                )
    except FinetuneError as error:
        click.echo(f"netcluster: {error}", err=True)
        sys.exit(error.exit_status)
    sys.exit(status)


@main.command()
def down() -> None:
    """Remove what netclusters that were killed have left behind."""
    try:
        check_possible()
    except UserError as error:
        click.echo(f"netcluster: {error}", err=True)
        sys.exit(error.exit_status)
    removed = remove_leftovers()
    click.echo(f"removed {', '.join(removed)}" if removed else "nothing was left behind")


if __name__ == "__main__":
    main()
