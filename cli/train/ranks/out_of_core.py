"""Training of several ranks out of core, each node on its own SSDs."""

from collections.abc import Collection, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import torch
import torch.distributed as dist

from cli.job.job import Job
from cli.job.resumed import check_same_run
from cli.report.results import IoCounts, MemoryUse, RunTotals, StepResult
from cli.train.engine_trainer import EngineTrainer, engine_options, profile_once
from cli.train.objectives import Ranks
from cli.train.ranks.process import RankProcess
from common.communication import all_gather_object, broadcast_from_rank0
from common.errors import UserError
from common.store import load_manifest, remove
from common.store.folders import remove_folder
from fcdp.strategy.topology import Topology
from fuyou import Engine
from fuyou.checkpoint.run_files import rank_folder
from fuyou.runtime.ranks import share_of


class RankEngineTrainer(EngineTrainer):
    """A rank's engine trainer takes its part of every batch, and reports for its node.

    Args:
        job: the run.
        topology: the ranks.
        rank: this process.
        launches: ids of the launches of all nodes.
    """

    def __init__(self, job: Job, topology: Topology, rank: RankProcess, launches: Collection[str]) -> None:
        broadcast_from_rank0(lambda: profile_once(job, share_of(topology)))
        ranks = Ranks(topology.rank, topology.world_size, sum_over_ranks)
        engine = _open_engine(job, topology, launches)
        check_same_run(job, engine, launches)
        self._topology, self._rank = topology, rank
        super().__init__(job, engine, rank.is_rank0, ranks, topology.local_rank == 0)
        self.is_resumed = engine.step_count > 0
        kind, place = self.location
        self.location = (kind, f"{place} on every node")

    def train_step(self, batch: dict[str, torch.Tensor], lr: float) -> StepResult:
        report = self._step(batch, lr)
        return self._step_result(report, report.planned_sent_bytes * self._topology.ranks_per_node)

    def can_continue_after(self, error: Exception) -> bool:
        """Return whether to print how to continue."""
        return not isinstance(error, UserError)

    def stop_requested(self) -> bool:
        stopping = torch.tensor([float(self._rank.stopping)])
        dist.all_reduce(stopping)
        return bool(stopping > 0)

    def agree(self, wish: bool) -> bool:
        return any(all_gather_object(wish))

    def io_counts(self) -> IoCounts:
        """Return the bytes that this node has moved: its ranks move alike."""
        return IoCounts(*(nbytes * self._topology.ranks_per_node for nbytes in astuple(super().io_counts())))

    def memory(self) -> MemoryUse:
        """Return the memory in use: the ranks of a node take alike."""
        ranks = self._topology.ranks_per_node
        return MemoryUse(self.model.device_peak_bytes, self.model.host_memory_in_use() * ranks)

    def totals(self) -> RunTotals:
        """Return what the run took on the first node. Collective."""
        own = super().totals()
        sizes = [*astuple(own.io), own.memory.host_bytes, own.host_baseline_bytes, own.created_bytes]
        node = all_gather_object(sizes)[: self._topology.ranks_per_node]
        *io, host, baseline, created = (sum(each) for each in zip(*node, strict=True))
        return replace(
            own,
            memory=MemoryUse(own.memory.device_bytes, host),
            host_baseline_bytes=baseline,
            io=IoCounts(*io),
            created_bytes=created,
        )


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sums of what all ranks give, place by place, added in the order of the ranks."""
    return [sum(each) for each in zip(*all_gather_object(list(values)), strict=True)]


def _open_engine(job: Job, topology: Topology, launches: Collection[str]) -> Engine:
    settings = job.settings
    folders = [path / job.run_name for path in job.ssd]
    leaving = [Path(word).expanduser() / job.run_name for word in settings.leave_ssd]
    name = rank_folder(topology.local_rank)
    continued = settings.resume or _is_restart(folders[0] / name, launches)
    for folder in folders:
        folder.mkdir(exist_ok=True)
        if topology.local_rank == 0 and not continued:  # what more ranks than now have left there, or a single one
            remove([folder])
            here = {rank_folder(number) for number in range(topology.ranks_per_node)}
            for path in folder.glob(rank_folder("*")):
                if path.name not in here:
                    remove_folder(path, shared=True)
    return Engine(
        **engine_options(job),
        ssd=folders,
        leave_ssd=[path for path in leaving if continued and path.is_dir()],
        device=topology.device,
        run_name=name,
        resume=continued,
        overwrite=True,  # the launcher would not have come so far if something were there that is to be kept
        batch_shape=(-(-settings.batch_size // topology.world_size) * settings.traits.rows, job.seq_len),
        topology=topology,
    )


def _is_restart(folder: Path, launches: Collection[str]) -> bool:
    """Return whether any rank's store was made by one of these launches: then a rank was lost, and all continue."""
    content = load_manifest(folder) if folder.exists() else None
    mine = bool(content and set(launches) & set(content["user"].get("launches", ())))
    return any(all_gather_object(mine))
