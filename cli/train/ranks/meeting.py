"""How ranks connect."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from cli.options.settings import Settings
from cli.train.ranks.placement import Placement, place
from cli.train.ranks.process import RankProcess
from common.errors import UserError
from common.hardware.machine import usable_gpus


def device_of(settings: Settings, local_rank: int) -> torch.device:
    """Return the device that this rank computes on, and make a GPU the current device.

    Raises:
        UserError: this rank does not see its GPU.
    """
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


def meet(settings: Settings, rank: RankProcess, device: torch.device) -> tuple[dist.Store, Placement | None]:
    """Return a store for this start of the run alone, and how nodes are numbered by leaf switches. Collective."""
    timeout = timedelta(seconds=settings.node_timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent has a store for all starts
    prefix = os.environ["TORCHELASTIC_RESTART_COUNT"] if is_agents else ""
    is_master = rank.is_rank0 and not is_agents
    store, news = (
        dist.PrefixStore(
            prefix,
            dist.TCPStore(
                address, port, is_master=is_master, multi_tenant=True, timeout=timeout, wait_for_workers=False
            ),
        )
        for _ in range(2)
    )
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
    return store, placement
