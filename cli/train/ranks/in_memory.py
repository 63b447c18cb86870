"""Training of several ranks in memory, with FSDP2 and cached parameters."""

import dataclasses
import math
from collections.abc import Collection

import torch

from cli.job.job import Job
from cli.job.resumed import check_same_run
from cli.job.strategy import DEFAULT, PROFILE, choose_strategy, has_profile, measure_cluster, workload_of
from cli.options.settings import COMMITS, Settings
from cli.report.results import EvaluationResult, StepResult, Usage
from cli.train import loop
from cli.train.loop import evaluate
from cli.train.ranks.process import RankProcess
from common.communication import broadcast_from_rank0
from common.data import Batches
from common.errors import FinetuneError
from common.units import format_bytes, format_seconds
from fcdp.checkpoint import ShardedCheckpoints
from fcdp.strategy.strategy import AUTO
from fcdp.strategy.topology import Topology
from fcdp.trainer import Trainer, TrainerConfig
from fuyou.layout.record import DTYPES


class InMemoryTrainer(loop.Trainer):
    """Trains as one of several ranks, and commits to a directory that all share."""

    def __init__(self, job: Job, topology: Topology, rank: RankProcess, launches: Collection[str]) -> None:
        self.model = self._trainer = trainer = _open_trainer(job, topology, launches)
        self.is_resumed = job.settings.resume or rank.restarted
        sent_bytes = trainer.planned_sent_bytes(job.settings.batch_size)
        self.plan = {"strategy": trainer.strategy, "sent_bytes_per_step": sent_bytes}
        self.location = ("commits", str(job.output / COMMITS))
        self._job, self._rank = job, rank
        self._stop_requested = False

    def train_step(self, batch: dict[str, torch.Tensor], lr: float) -> StepResult:
        done = self._trainer.train_step(batch, lr, self._rank.stopping)
        self._stop_requested = done.stop
        return StepResult(
            loss=done.loss,
            grad_norm=done.grad_norm,
            aux_loss=done.aux_loss,
            sent_bytes=done.sent_bytes,
        )

    def commit_if_due(self, step: int) -> None:
        if step % self._job.settings.commit_interval == 0:
            self._trainer.commit()

    def evaluate(self, batches: Batches) -> EvaluationResult:
        return evaluate(batches, self._job.settings.batch_size, self._trainer.eval_loss)

    def stop_requested(self) -> bool:
        return self._stop_requested

    def commit(self) -> None:
        self._trainer.commit()

    def can_continue_after(self, error: Exception) -> bool:
        return isinstance(error, FinetuneError) and self._trainer.newest_commit() is not None

    def usage(self) -> Usage:
        trainer = self._trainer
        return Usage(
            trainer.device_peak_bytes, trainer.host_peak_bytes, trainer.host_peak_bytes, trainer.host_baseline_bytes
        )


def _open_trainer(job: Job, topology: Topology, launches: Collection[str]) -> Trainer:
    settings = job.settings
    directory = job.output / COMMITS
    names = {field.name for field in dataclasses.fields(TrainerConfig)} - {"strategy"}
    cache = settings.engine.host_cache
    config = TrainerConfig(
        **settings.named(names),
        strategy=_strategy(job, topology, launches),
        host_cache_bytes=None if cache is None else cache // topology.ranks_per_node,
        towers=settings.engine.towers,
    )
    adapters = settings.engine.adapters if settings.adapter is None else settings.adapter.expanduser()
    trainer = Trainer(job.checkpoint or settings.model, topology, config, directory, adapters)
    if broadcast_from_rank0(lambda: _is_continued(settings, ShardedCheckpoints(directory), launches)):
        trainer.resume()
    else:
        trainer.begin()
    check_same_run(job, trainer, launches)
    return trainer


def _strategy(job: Job, topology: Topology, launches: Collection[str]) -> str:
    """Return the name of the strategy. If one is to be chosen, rank 0 does, as only it need know the cluster, which is
    measured before if nobody has described it. Collective.
    """
    settings = job.settings
    if settings.strategy not in (None, AUTO):
        return settings.strategy
    unnamed = settings.strategy is None and settings.cluster is None
    if unnamed and (topology.world_size == 1 or broadcast_from_rank0(lambda: _began_unmeasured(job, launches))):
        return DEFAULT
    has_measured = broadcast_from_rank0(lambda: has_profile(settings, topology.levels))
    if settings.cluster in (None, AUTO):
        path = settings.output_directory / PROFILE
        if not has_measured:
            micro_batch, _ = _micro_batches(settings, topology)
            measure_cluster(settings, topology, micro_batch, job.seq_len)
        settings = dataclasses.replace(settings, cluster=str(path))
    name: str = broadcast_from_rank0(lambda: _choose(job, settings, topology))
    return name


def _began_unmeasured(job: Job, launches: Collection[str]) -> bool:
    measured = (job.settings.output_directory / PROFILE).exists()
    return not measured and _is_continued(job.settings, ShardedCheckpoints(job.output / COMMITS), launches)


def _micro_batches(settings: Settings, topology: Topology) -> tuple[int, int]:
    """Return the sequences that a rank computes at once, and how often it does in a step."""
    rows = settings.batch_size / topology.world_size
    micro_batch = min(settings.micro_batch or math.ceil(rows), math.ceil(rows))
    return micro_batch, math.ceil(rows / micro_batch)


def _choose(job: Job, settings: Settings, topology: Topology) -> str:
    micro_batch, micro_batches = _micro_batches(settings, topology)
    workload = workload_of(settings, job.seq_len, micro_batch, micro_batches, DTYPES[settings.dtype].itemsize)
    choice = choose_strategy(settings, workload, topology.levels)
    seconds, sent = format_seconds(choice.step_seconds), format_bytes(choice.inter_node_bytes)
    print(f"strategy {choice.name}; the planner expects {seconds} and {sent} across nodes per step", flush=True)
    return choice.name


def _is_continued(settings: Settings, commits: ShardedCheckpoints, launches: Collection[str]) -> bool:
    """Return whether to continue from a commit.

    If not, commits that are there are deleted: ``--overwrite`` was given, or the launcher would not have come so far.
    """
    if settings.resume or (newest := commits.newest()) is None:
        return settings.resume
    # Started again by a launcher that has had a part in this run: --resume goes without saying.
    try:
        return bool(set(launches) & set(commits.describe(newest)["user"].get("launches", ())))
    except FinetuneError:  # of another format, or damaged: nothing that this launcher has made
        return False
