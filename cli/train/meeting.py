"""How ranks connect: the numbers of nodes, the process group, and the checks that all run the same command."""

import contextlib
import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import common
from cli.job.resumed import adapter_digest, peft_digest
from cli.options.settings import Settings
from cli.train.process import RankProcess
from cli.train.sockets import LOOPBACK, interface_variables, rank_stores
from common.communication import all_gather_object
from common.errors import UserError
from common.hardware.machine import usable_gpus
from common.options import declaration_of, option_fields, spelled
from common.units import counted
from fcdp.planner import load_cluster
from fcdp.planner.cluster import group_of, node_order, nodes_per_switch
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import AUTO, parse_strategy
from fcdp.strategy.topology import Topology


class Placement(NamedTuple):
    """How nodes are numbered, where their leaf switches are known."""

    order: tuple[int, ...]  # The launchers' numbers of the nodes, by the number that each has now
    leaves: tuple[str, ...]  # Leaf switch of each node, by the number that it has now
    hosts: tuple[str, ...]  # Name of each node, by the number that it has now

    def __str__(self) -> str:
        switches = counted(len(set(self.leaves)), "leaf switch", "leaf switches")
        return f"{len(self.hosts)} nodes under {switches}, numbered {' '.join(self.hosts)}"


def place(settings: Settings, store: dist.Store, world: Mapping[str, str] = os.environ) -> Placement | None:
    """Agree with all ranks on the numbers of nodes, given the launcher's variables. Collective.

    Return None where switches are not known, or nodes have different numbers of ranks, which is refused once they are
    connected. Out of core nodes keep their numbers, to which their drives belong: each exchanges with all others
    directly, so that order would change nothing.
    """
    node = int(world["GROUP_RANK"])
    nodes = int(world["GROUP_WORLD_SIZE"])
    if settings.ssd or nodes == 1:
        return None
    if world["LOCAL_RANK"] == "0":
        leaf = leaf_by_slurm(world) or ""
        store.set(f"leaf{node}", json.dumps([leaf, socket.gethostname(), int(world["LOCAL_WORLD_SIZE"])]))
    if world["RANK"] == "0":
        there = [json.loads(store.get(f"leaf{each}")) for each in range(nodes)]
        store.set("placement", json.dumps(_decide(settings, there)))
    decided = json.loads(store.get("placement"))
    return None if decided is None else Placement(*map(tuple, decided))


def leaf_by_slurm(environment: Mapping[str, str]) -> str | None:
    """Return this node's leaf switch by Slurm's ``topology/tree`` (srun(1), SLURM_TOPOLOGY_ADDR); None if none.

    The address goes from the top switch to the node: ``spine1.leaf2.gpu07``, with the pattern ``switch.switch.node``.
    """
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    if len(kinds) < 2 or kinds[-2:] != ["switch", "node"] or len(names) < len(kinds):
        return None
    return names[len(kinds) - 2]  # a node's own name may have dots


def _decide(settings: Settings, there: list[tuple[str, str, int]]) -> Placement | None:
    leaves, hosts, ranks_per_node = map(list, zip(*there, strict=True))
    if len(set(ranks_per_node)) > 1:
        return None
    if not all(leaves):  # of Slurm; a description of the cluster may have them
        described = None if settings.cluster in (None, AUTO) else load_cluster(settings.cluster).leaf_of_node
        if described is None or len(described) != len(there):
            return None
        leaves = [str(leaf) for leaf in described]
    group = 1
    switches = nodes_per_switch([leaves[node] for node in node_order(leaves, 1)])
    if settings.strategy not in (None, AUTO):
        levels = Levels((ranks_per_node[0], len(there)), nodes_per_switch=switches)
        with contextlib.suppress(UserError):  # it is refused later, on all ranks
            group = group_of(parse_strategy(settings.strategy).on(levels))
    order = node_order(leaves, group)
    return Placement(
        tuple(order), tuple(leaves[node] for node in order), tuple(hosts[node] for node in order)
    )


def check_same_command(settings: Settings, rank: RankProcess) -> set[str]:
    """Refuse nodes that differ in code, libraries or options; return the ids of all nodes' launches. Collective."""
    declared = {field.name: declaration_of(field) for field in option_fields(Settings)}
    named = {name: str(getattr(settings, name)) for name, option in declared.items() if not option.may_differ}
    command = (
        named
        | {
            "model": Path(settings.model).name,  # a checkpoint and data may lie elsewhere on each node
            "ssd": "given" if settings.ssd else "left out",
            "data": str([Path(name).name for name in settings.data]),
            "peft_config": peft_digest(settings),
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


def _code() -> str:
    digest = hashlib.sha256()
    root = Path(str(common.__file__)).parents[1]
    for file in sorted(
        file for package in ("cli", "common", "fcdp", "fuyou") for file in (root / package).rglob("*.py")
    ):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def check_shared(output: Path) -> None:
    """Refuse an output directory that this rank does not share with rank 0. Collective."""
    probe = output / f".finetune-{os.environ['MASTER_PORT']}"
    if dist.get_rank() == 0:
        for old in output.glob(".finetune-*"):  # of a start that was killed
            old.unlink(missing_ok=True)
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


def device_of(settings: Settings, local_rank: int) -> torch.device:
    if settings.gpu == "cpu" or not usable_gpus():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"Rank {local_rank} of this node computes on GPU {local_rank}, and sees {count} GPUs: let every rank see "
            "all of the node's (CUDA_VISIBLE_DEVICES, srun --gpu-bind), or start fewer ranks."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def meet(settings: Settings, rank: RankProcess) -> tuple[dist.Store, Placement | None, Topology]:
    """Return a store for this start of the run alone, how nodes are numbered by leaf switches, and the topology.
    Collective."""
    device = device_of(settings, int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=settings.node_timeout)
    store, news = rank_stores(rank, timeout)
    if rank.nodes == 1:
        # Also where the user has named one for runs of several nodes
        os.environ.update(interface_variables(LOOPBACK))
    placement = place(settings, store)
    if placement is not None:
        rank.move(placement.order.index(rank.node))
    rank.listen(news)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo",
        store=dist.PrefixStore("group", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timeout,
    )
    levels = None if settings.levels is None else Levels.parse(settings.levels)
    switch = None if placement is None else nodes_per_switch(placement.leaves)
    return store, placement, Topology.from_environment(device=device, levels=levels, nodes_per_switch=switch)
