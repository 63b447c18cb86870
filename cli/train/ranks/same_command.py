"""Checks that all nodes run the same command on the same output directory."""

import hashlib
import os
import platform
import socket
import time
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist

import common
from cli.options.adapters import adapter_digest
from cli.options.option import declaration_of, option_fields, spelled
from cli.options.settings import Settings
from cli.train.ranks.process import RankProcess
from common.communication import all_gather_object
from common.errors import UserError
from common.models.adapters.options import CONFIG


def check_same_command(settings: Settings, rank: RankProcess) -> set[str]:
    """Refuse nodes that differ in code, libraries or options. Collective.

    Returns:
        Ids of the launches of all nodes.
    """
    declared = {field.name: declaration_of(field) for field in option_fields(Settings)}
    named = {name: str(getattr(settings, name)) for name, option in declared.items() if not option.may_differ}
    command = (
        named
        | {
            "model": Path(settings.model).name,  # a checkpoint and data may lie elsewhere on each node
            "ssd": "given" if settings.ssd else "left out",
            "data": str([Path(name).name for name in settings.data]),
            "peft_config": _content(settings.peft_config),
            "adapter": adapter_digest(settings),
            "eval_data": str([Path(name).name for name in settings.eval_data]),
            "Python": ".".join(platform.python_version_tuple()[:2]),
            **{library: version(library) for library in ("torch", "transformers", "safetensors")},
            "finetune's code": _code(),
        }
    )
    everyone = all_gather_object((socket.gethostname(), rank.launch, rank.restarted, command))
    first_host, _, _, first = everyone[0]
    for number, (host, _, _, other) in enumerate(everyone):
        for name in sorted(first):
            if first[name] != other[name]:
                raise UserError(
                    f"The nodes were not started alike: {spelled(name) if name in declared else name} is {first[name]} "
                    f"on {first_host} (rank 0), and {other[name]} on {host} (rank {number}). Start the same command "
                    "with the same code on each."
                )
    rank.restarted = any(restarted for _, _, restarted, _ in everyone)
    return {launch for _, launch, _, _ in everyone}


def _content(peft_config: Path | None) -> str:
    if peft_config is None:
        return "None"
    file = peft_config.expanduser()
    return " ".join((file / CONFIG if file.is_dir() else file).read_text().split())


def _code() -> str:
    digest, root = hashlib.sha256(), Path(str(common.__file__)).parents[1]
    for file in sorted(
        file for package in ("cli", "common", "fcdp", "fuyou") for file in (root / package).rglob("*.py")
    ):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def check_shared(output: Path) -> None:
    """Refuse an output directory that this rank does not share with rank 0. Collective."""
    probe = output / f".finetune-{os.environ['MASTER_PORT']}"
    if dist.get_rank() == 0:
        probe.touch()
    dist.barrier()
    deadline = time.monotonic() + 10  # network file systems may show new files late
    while probe.name not in os.listdir(output):
        if time.monotonic() > deadline:
            raise UserError(
                f"--output {output} is not one directory for all nodes: a file that rank 0 made in it is not there on "
                f"{socket.gethostname()}. Give a directory on a file system that all nodes share."
            )
        time.sleep(0.1)
    dist.barrier()
    if dist.get_rank() == 0:
        probe.unlink()
