"""Where the launchers of a run meet: from options, from Slurm, or from the variables that torchrun has made usual.

Every node has one launcher. One of them holds the meeting point, the others connect to it; which one, each finds out
for itself: the endpoint is an address of its own machine. Imports nothing slow.
"""

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import psutil

from cli.options.settings import Settings
from common.errors import UserError
from common.units import format_seconds

DEFAULT_PORT = 29400
"""Port that torchrun has by default."""


@dataclass(frozen=True)
class Rendezvous:
    """A rendezvous is where and how this node's launcher meets the others."""

    nodes: int
    host: str
    port: int
    """Port of the meeting point; 0: any free one, for a single node."""
    run_id: str
    """Name that tells runs apart that meet in one place."""
    is_host: bool = True
    """Whether this launcher holds the meeting point."""
    address: str = "127.0.0.1"
    """Address of this machine, as others reach it."""
    claim: socket.socket | None = field(default=None, repr=False)
    """Socket that keeps other launchers on this machine from holding the meeting point, too."""

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def interface(self) -> str | None:
        """Network device that has this machine's address, for libraries that would guess."""
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address == self.address for address in addresses):
                return str(name)
        return None


def find_meeting(settings: Settings, environment: Mapping[str, str] = os.environ) -> Rendezvous:
    """Decide where the launchers meet.

    Raises:
        UserError: the other nodes cannot be found, or the environment does not go with the options; says what to add.
    """
    nodes = settings.nodes or 1
    in_slurm = "SLURM_STEP_NODELIST" in environment and settings.rdzv_endpoint is None
    if in_slurm:
        _check_slurm(nodes, environment)
    if nodes == 1:
        return Rendezvous(1, "127.0.0.1", 0, f"finetune-{os.getpid()}")
    if settings.rdzv_endpoint is not None:
        host, port = _parse_endpoint(settings.rdzv_endpoint)
        run_id = "finetune"
    elif in_slurm:
        job, step = environment.get("SLURM_JOB_ID", "0"), environment.get("SLURM_STEP_ID", "0")
        host = expand_node_list(environment["SLURM_STEP_NODELIST"])[0]
        port = 20_000 + (int(job) * 31 + int(step)) % 10_000  # several jobs may share a node
        run_id = f"finetune-{job}-{step}"
    elif "MASTER_ADDR" in environment:
        if (started := int(environment.get("LOCAL_WORLD_SIZE", 1))) > 1:
            raise UserError(
                f"torchrun has started finetune {started} times on this node; once on each is right, as it starts its "
                "own ranks: torchrun --nproc-per-node 1."
            )
        host, port = _parse_endpoint(f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', DEFAULT_PORT)}")
        run_id = "finetune"
    else:
        raise UserError(_no_means(nodes, environment))
    return _locate(Rendezvous(nodes, host, port, run_id))


def wait_for_host(meeting: Rendezvous, timeout: float) -> None:
    """Wait until somebody answers at the endpoint; PyTorch's own wait cannot be interrupted.

    Raises:
        UserError: nobody did.
    """
    deadline = time.monotonic() + timeout
    while not meeting.is_host:
        try:
            socket.create_connection((meeting.host, meeting.port), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Nobody answers at {meeting.endpoint} ({error}), for {format_seconds(timeout)} now. Start "
                    f"finetune with the same options on {meeting.host} too, and see that no firewall is in between."
                ) from error
            time.sleep(0.2)


def expand_node_list(text: str) -> list[str]:
    """Expand Slurm's short form of names: ``gpu[01-03,7],login`` is gpu01, gpu02, gpu03, gpu7, login."""
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        prefix, bracket, rest = part.partition("[")
        if not bracket:
            names.append(part)
            continue
        inside, _, suffix = rest.partition("]")
        for item in inside.split(","):
            first, _, last = item.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names += [prefix + str(number).zfill(len(first)) + end for end in expand_node_list(suffix) or [""]]
    return names


def _check_slurm(nodes: int, environment: Mapping[str, str]) -> None:
    here = int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", nodes)))
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", here)))
    if tasks != here:
        raise UserError(
            f"srun has started finetune {tasks} times on {here} nodes; once on each is right, as it starts its own "
            "ranks: srun --ntasks-per-node 1."
        )
    if here != nodes:
        raise UserError(f"srun has started finetune on {here} nodes, and --nodes says {nodes}: give --nodes {here}.")


def _no_means(nodes: int, environment: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" in environment:
        return (
            f"--nodes {nodes}: this is a Slurm job, but srun has not started finetune, so it runs on this node alone. "
            f"Start it with srun --nodes {nodes} --ntasks-per-node 1 finetune ..."
        )
    return (
        f"--nodes {nodes}: it is unknown where the other nodes are. Choose one of them and a free port there, start "
        f"the same line on every node, and add to it: --rdzv-endpoint {socket.gethostname()}:{DEFAULT_PORT}. "
        "(With Slurm, srun is enough.)"
    )


def _parse_endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or port.endswith("]"):  # an address of IPv6 is written in brackets
        host, port = text.strip(), str(DEFAULT_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65_536 or "/" in host:
        raise UserError(f"--rdzv-endpoint {text!r} is not HOST:PORT, as in node0:{DEFAULT_PORT}.")
    return host.strip("[]"), int(port)


def _locate(meeting: Rendezvous) -> Rendezvous:
    """Find out this machine's own address on the way to the endpoint, and whether the endpoint is here."""
    try:
        family, _, _, _, target = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            address = probe.getsockname()[0]
    except OSError as error:
        raise UserError(
            f"The meeting point {meeting.endpoint} cannot be reached from here: {error.strerror}. Give --rdzv-endpoint "
            "a name or an address of one of the nodes that all nodes can reach."
        ) from error
    claim = _claim(meeting.port) if _is_here(family, target) else None
    if claim is not None:
        _check_free(family, target, meeting)
    return replace(meeting, is_host=claim is not None, address=address, claim=claim)


def _is_here(family: int, target: tuple[object, ...]) -> bool:
    """Return whether the endpoint's address is one of this machine."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((target[0], 0, *target[2:]))
        except OSError:
            return False
    return True


def _claim(port: int) -> socket.socket | None:
    """Take what only one launcher in this machine (or network namespace) can hold for a port.

    Returns:
        The socket to hold; None: another launcher holds it.

    Launchers of several emulated nodes may start at the same moment: to look whether the port is free is not enough.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0finetune-{port}")  # not a file: a name that is gone with its process
    except OSError:
        claim.close()
        return None
    return claim


def _check_free(family: int, target: tuple[object, ...], meeting: Rendezvous) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
        except OSError as error:
            raise UserError(
                f"The meeting point {meeting.endpoint} cannot be opened here: {error.strerror}. Another program may "
                "have the port: give --rdzv-endpoint with another one, on all nodes."
            ) from error
