"""Where a run of several ranks listens: at one address of each node, and on one machine nowhere but at loopback.

PyTorch's stores listen at every address of the machine unless they are given a socket.
"""

import io
import os
import pickle
import socket
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from cli.train.process import LAUNCH, RankProcess

LOOPBACK = "127.0.0.1"
BACKEND = "finetune"  # name of :func:`rendezvous_handler` in PyTorch's registry
# "=": NCCL's eth1 would match eth10, too
_INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}


def interface_variables(address: str) -> dict[str, str]:
    """Return the environment variables that have gloo and NCCL listen at ``address``; none if no interface has it."""
    devices: dict[str, list[Any]] = psutil.net_if_addrs()
    names = [name for name, held in devices.items() if any(each.address == address for each in held)]
    return {variable: form.format(names[0]) for variable, form in _INTERFACES.items()} if names else {}


def listening_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return a store whose server is in this process and listens at ``address`` only.

    Raises:
        ConnectionError: if the address is not this machine's, or its port is in use.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(target)
            server.listen(socket.SOMAXCONN)
            port = server.getsockname()[1]
            descriptor = server.detach()  # the store closes it
    except OSError as error:
        raise ConnectionError(f"cannot listen at {address}, port {port}: {error.strerror}") from error
    return dist.TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
    )


def rank_stores(rank: RankProcess, timeout: timedelta) -> tuple[dist.Store, dist.Store]:
    """Return two connections to the store that all ranks share for this start of the run."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    # Torchrun's agent has a store for all starts
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank.nodes == 1 and not is_agents:
        address = LOOPBACK
    prefix = os.environ["TORCHELASTIC_RESTART_COUNT"] if is_agents else ""
    stores: list[dist.Store] = []
    for _ in range(2):
        if not rank.is_rank0 or is_agents or stores:
            store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        elif rank.nodes == 1 or LAUNCH in os.environ:
            store = listening_store(address, port, timeout)
        else:  # torchrun's address may be a name that means another address on other nodes
            store = dist.TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False)
        stores.append(dist.PrefixStore(prefix, store))
    return stores[0], stores[1]


def rendezvous_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Return what a launcher meets the others with: PyTorch's rendezvous, over a store that we open.

    The launcher of a single node meets nobody: its store is in its memory.
    """
    if params.max_nodes == 1:
        store: dist.Store = dist.HashStore()
    else:
        host, port = parse_rendezvous_endpoint(params.endpoint, -1)
        timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
        try:
            if params.get_as_bool("is_host"):
                store = listening_store(host, port, timeout)
            else:
                store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        except (OSError, RuntimeError) as error:
            raise RendezvousConnectionError(str(error)) from error
    return create_handler(store, _CheckedBackend(store, params.run_id), params)


class _CheckedBackend(C10dRendezvousBackend):
    """Refuses states that are not made of what launchers write, before PyTorch unpickles them."""

    name = BACKEND

    def get_state(self) -> Any:
        return _checked(super().get_state())

    def set_state(self, state: bytes, token: Any = None) -> Any:
        return _checked(super().set_state(state, token))


def _checked(response: Any) -> Any:
    if response is not None:
        try:
            _StateReader(io.BytesIO(response[0])).load()
        except Exception as error:  # anything, where the bytes are anything
            raise RendezvousStateError(f"the state of the rendezvous is not a launcher's: {error}") from error
    return response


_CLASSES = {
    "datetime": ("datetime", "timedelta", "timezone"),
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous": ("_NodeDesc", "_RendezvousState"),
}


class _StateReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return super().find_class(module, name)
