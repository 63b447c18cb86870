"""How ranks find each other, and make sure that they do the same."""

import hashlib
import os
import platform
import socket
import time
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

import common
from cli.options.adapters import adapter_digest
from cli.options.option import declaration_of, option_fields, spelled
from cli.options.settings import Settings
from cli.train.ranks.liveness import LAUNCH, RankProcess
from cli.train.ranks.placement import Placement, place
from common.communication.object_collectives import all_gather_object
from common.errors import UserError
from common.hardware.machine import list_gpus
from common.models.adapters.options import CONFIG

_STUCK = timedelta(minutes=30)
"""How long a collective may wait for a rank that is alive: one may read its weights from slower drives than others."""


def device_of(settings: Settings, local_rank: int) -> torch.device:
    """Return the device that this rank computes on, and make a GPU the current one."""
    if settings.gpu == "cpu" or not list_gpus():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def meet(settings: Settings, rank: RankProcess, device: torch.device) -> tuple[dist.Store, Placement | None]:
    """Connect to the other ranks, numbered by leaf switches where these are known.

    Returns:
        A store for this start of the run alone, and how nodes were numbered.
    """
    timeout = timedelta(seconds=settings.node_timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(
        address, port, rank.world_size, is_master=rank.is_rank0, timeout=timeout, wait_for_workers=False
    )
    placement = place(settings, store)
    if placement is not None:
        rank.move(placement.order.index(rank.node))
    news = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    rank.connect(news, settings.node_timeout)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo",
        store=dist.PrefixStore("group", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=_STUCK,  # ranks that are lost are noticed much earlier, by their silence
    )
    return store, placement


def check_same_command(settings: Settings) -> set[str]:
    """Refuse nodes that differ in code, libraries or options. Collective.

    Returns:
        Ids of the launches of all nodes.

    Raises:
        UserError: names the first difference, on every rank.
    """
    declared = {field.name: declaration_of(field) for field in option_fields(Settings)}
    own = {
        **{name: str(getattr(settings, name)) for name, one in declared.items() if not one.may_differ},
        "model": Path(settings.model).name,  # a checkpoint may lie elsewhere on each node
        "ssd": "given" if settings.ssd else "left out",  # each node has drives of its own
        "data": str([Path(name).name for name in settings.data]),
        "peft_config": _content(settings.peft_config),
        "adapter": adapter_digest(settings),
        "eval_data": str([Path(name).name for name in settings.eval_data]),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{library: version(library) for library in ("torch", "transformers", "safetensors")},
        "finetune's code": _code(),
    }
    everyone = all_gather_object((socket.gethostname(), os.environ[LAUNCH], own))
    first_host, _, first = everyone[0]
    for number, (host, _, other) in enumerate(everyone):
        for name in sorted(first):
            if first[name] != other[name]:
                what = spelled(name) if name in declared else name
                raise UserError(
                    f"The nodes were not started alike: {what} is {first[name]} on {first_host} (rank 0), and "
                    f"{other[name]} on {host} (rank {number}). Start the same command with the same code on each."
                )
    return {launch for _, launch, _ in everyone}


def _content(peft_config: Path | None) -> str:
    """Return the content of a file that may lie elsewhere on each node."""
    if peft_config is None:
        return "None"
    file = peft_config.expanduser()
    return " ".join((file / CONFIG if file.is_dir() else file).read_text().split())


def _code() -> str:
    """Return a short digest of our own source."""
    digest = hashlib.sha256()
    root = Path(str(common.__file__)).parents[1]
    for package in ("cli", "common", "fcdp", "fuyou"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def check_shared(output: Path, rank: RankProcess) -> None:
    """Make sure that ``output`` is one directory for all ranks, into which they write commits. Collective.

    Raises:
        UserError: this rank does not see what rank 0 writes.
    """
    probe = output / f".finetune-{os.environ['MASTER_PORT']}"
    if rank.is_rank0:
        probe.touch()
    dist.barrier()
    deadline = time.monotonic() + 10  # network file systems may show new files late
    while not probe.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"--output {output} is not one directory for all nodes: a file that rank 0 has made in it is not "
                f"there on {socket.gethostname()}. Give a place on a file system that all nodes share."
            )
        time.sleep(0.1)
        os.listdir(output)
    dist.barrier()
    if rank.is_rank0:
        probe.unlink()
