"""Where the launchers of a run meet: ``--rdzv-endpoint``, Slurm's variables, or MASTER_ADDR and MASTER_PORT."""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cli.options.settings import Settings
from common.errors import UserError

DEFAULT_PORT = 29400  # torchrun's
_OUTSIDE = "192.0.2.1"  # an address for documentation


@dataclass(frozen=True)
class Rendezvous:
    """The endpoint where the launchers of all nodes meet."""

    nodes: int
    host: str = "127.0.0.1"
    port: int = 0  # any free port, for a single node
    run_id: str = "finetune"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def locate(self) -> tuple[str, bool]:
        """Return this machine's address on the route to the endpoint, and whether the endpoint is on this machine."""
        try:
            family, _, _, _, target = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            address = _address_towards(family, target)
        except OSError as error:
            raise UserError(
                f"--rdzv-endpoint {self} cannot be reached from here: {error.strerror}. Give a name or an address of "
                "one of the nodes that all nodes can reach."
            ) from error
        is_here = address == target[0] or str(target[0]).startswith("127.")
        if address.startswith("127.") and not self.host.startswith(("127.", "localhost")):
            # A name of this machine, which Debian's /etc/hosts gives 127.0.1.1: where others reach it is the way out.
            with suppress(OSError):
                address = _address_towards(socket.AF_INET, (_OUTSIDE, DEFAULT_PORT))
        return address, is_here


def find_rendezvous(settings: Settings, environment: Mapping[str, str] = os.environ) -> Rendezvous:
    """Return where the launchers of a run meet.

    Raises:
        UserError: if nothing names the other nodes, or srun started other processes than one on each of ``--nodes``.
    """
    nodes = settings.nodes or 1
    slurm = {name.removeprefix("SLURM_"): value for name, value in environment.items() if name.startswith("SLURM_")}
    in_step = "STEP_NODELIST" in slurm and settings.rdzv_endpoint is None
    if in_step:
        step_nodes = slurm.get("STEP_NUM_NODES", str(nodes))
        tasks = slurm.get("STEP_NUM_TASKS", step_nodes)
        if not tasks == step_nodes == str(nodes):
            raise UserError(
                f"--nodes {nodes}: srun has started finetune {tasks} times on {step_nodes} nodes. Start it once on "
                f"each, and it starts the ranks itself: srun --nodes {nodes} --ntasks-per-node 1 finetune ..."
            )
    if nodes == 1:
        return Rendezvous(1)
    if settings.rdzv_endpoint is not None:
        return Rendezvous(nodes, *_parse_endpoint(settings.rdzv_endpoint))
    if in_step:
        job, step = int(slurm.get("JOB_ID", 0)), int(slurm.get("STEP_ID", 0))
        port = 20_000 + (job * 31 + step) % 10_000  # several jobs may share a node
        return Rendezvous(nodes, first_host(slurm["STEP_NODELIST"]), port, f"finetune-{job}-{step}")
    if "MASTER_ADDR" in environment:
        address = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', DEFAULT_PORT)}"
        return Rendezvous(nodes, *_parse_endpoint(address))
    raise UserError(
        f"--nodes {nodes}: nothing names the other nodes. Choose one of them and a free port there, start the same "
        f"line on every node, and add to it: --rdzv-endpoint {socket.gethostname()}:{DEFAULT_PORT}. With Slurm: srun "
        f"--nodes {nodes} --ntasks-per-node 1 finetune ..."
    )


def first_host(node_list: str) -> str:
    """Return the first name of Slurm's short form: that of ``gpu[01-03,7],login`` is gpu01."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else node_list)


def _address_towards(family: int, target: Any) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _parse_endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or port.endswith("]"):  # an IPv6 address is written in brackets
        host, port = text.strip(), str(DEFAULT_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65_536 or "/" in host:
        raise UserError(f"--rdzv-endpoint {text!r} is not HOST:PORT, as in node0:{DEFAULT_PORT}.")
    return host.strip("[]"), int(port)
