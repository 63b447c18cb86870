"""``finetune --nodes``, as every rank runs it: meet the others, compare, prepare, train, export and report.

Ranks train out of core, each node on its own SSDs, or in memory, with FSDP2 and cached parameters.
"""

import dataclasses
import math
import os
import time
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist

import fcdp.trainer
from cli.job.job import Job
from cli.job.machine import with_dtype_of_all
from cli.job.resolve import check_start, resolve
from cli.job.resumed import check_same_run, committed, decided, forget_earlier_run
from cli.job.strategy import DEFAULT, PROFILE, choose_strategy, has_profile, measure_cluster, workload_of
from cli.options.settings import COMMITS, Settings
from cli.report.results import EvaluationResult, StepResult, Usage
from cli.train.engine_trainer import EngineTrainer, engine_options, profile_once
from cli.train.loop import Trainer, evaluate, train
from cli.train.meeting import check_same_command, check_shared, meet
from cli.train.process import LAUNCH, RankProcess
from common.activity import activity
from common.communication import all_gather_object, broadcast_from_rank0
from common.data import Batches
from common.errors import FinetuneError
from common.store import load_manifest, remove
from common.store.folders import remove_folder
from common.units import format_bytes, format_seconds
from fcdp.strategy.strategy import AUTO
from fcdp.strategy.topology import Topology
from fcdp.trainer import TrainerConfig
from fuyou import Engine
from fuyou.checkpoint.run_files import rank_folder
from fuyou.layout.record import DTYPES
from fuyou.runtime.ranks import share_of


def train_rank(settings: Settings, rank: RankProcess) -> None:
    """Do the whole run, as this rank's part of it."""
    settings = dataclasses.replace(decided(settings), gpus_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    if LAUNCH not in os.environ and not rank.restarted:  # our launcher has checked this
        check_start(settings, int(os.environ["LOCAL_WORLD_SIZE"]))
    store, placement, topology = meet(settings, rank)
    launches = check_same_command(settings, rank)
    settings = with_dtype_of_all(settings, str(topology.device), rank.restarted)
    job = _prepare(settings, rank, store)
    if placement is not None and rank.is_rank0 and not rank.restarted:
        print(f"nodes    {placement}", flush=True)
    check_shared(job.output)
    open_ = open_trainer if settings.ssd else InMemoryTrainer
    with activity("reading the weights, on every rank", announced=rank.is_rank0):
        trainer = open_(job, topology, rank, launches)
    try:
        train(job, trainer, rank)
    except Exception as error:  # leaves the trainer open: its threads may wait for ranks that will never answer
        if trainer.can_continue_after(error):
            error.add_note(job.settings.how_to_continue)
        raise
    dist.barrier()
    trainer.model.close()
    topology.close()
    dist.destroy_process_group()
    job.close()


def _prepare(settings: Settings, rank: RankProcess, store: dist.Store) -> Job:
    if rank.is_rank0:
        if not rank.restarted:
            forget_earlier_run(settings)
        with activity("preparing the run: model, memory, data", announced=True):
            job = resolve(settings)
        if not rank.restarted:
            print(job.header(), flush=True)
        store.set("prepared", "")
        return job
    speaks = os.environ["LOCAL_RANK"] == "0" and rank.node > 0
    if speaks:
        print(f"nodes    this is node {rank.node + 1} of {rank.nodes}: rank 0 reads the data first", flush=True)
    while not store.check(["prepared"]):  # not a collective: tokenizing may take longer than those may wait
        time.sleep(0.1)
    job = resolve(settings)
    if speaks:
        print("nodes    this node trains from here on; its figures are part of what rank 0 shows", flush=True)
    return job


def open_trainer(job: Job, topology: Topology, rank: RankProcess, launches: Collection[str]) -> EngineTrainer:
    """Open this rank's engine, which takes its part of every batch, given all nodes' launches. Collective."""
    broadcast_from_rank0(lambda: profile_once(job, share_of(topology)))
    engine = _open_engine(job, topology, launches)
    check_same_run(job, engine, launches)
    return EngineTrainer(job, engine, topology, lambda: rank.stopping)


def _open_engine(job: Job, topology: Topology, launches: Collection[str]) -> Engine:
    settings = job.settings
    folders = [path / job.run_name for path in job.ssd]
    leaving = [path / job.run_name for path in settings.drives_to_leave]
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


class InMemoryTrainer(Trainer):
    """Trains as one of several ranks, and commits to a directory that all share."""

    def __init__(self, job: Job, topology: Topology, rank: RankProcess, launches: Collection[str]) -> None:
        self.model = self._trainer = trainer = _open_commits(job, topology, launches)
        self.is_resumed = job.settings.resume or rank.restarted
        sent_bytes = trainer.planned_sent_bytes(job.settings.batch_size)
        self.plan = {"strategy": trainer.sharding.strategy.name, "sent_bytes_per_step": sent_bytes}
        self.location = ("commits", str(job.output / COMMITS))
        self._job, self._rank = job, rank
        self._stop_requested = False

    def train_step(self, batch: dict[str, torch.Tensor], lr: float) -> StepResult:
        done = self._trainer.train_step(batch, lr, self._rank.stopping)
        self._stop_requested = done.stop
        return StepResult(done.loss, done.grad_norm, aux_loss=done.aux_loss, sent_bytes=done.sent_bytes)

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
        return isinstance(error, FinetuneError) and self._trainer.checkpoints.newest() is not None

    def usage(self) -> Usage:
        trainer = self._trainer
        return Usage(
            trainer.device_peak_bytes, trainer.meter.peak_bytes, trainer.meter.peak_bytes, trainer.meter.baseline_bytes
        )


def _open_commits(job: Job, topology: Topology, launches: Collection[str]) -> fcdp.trainer.Trainer:
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
    trainer = fcdp.trainer.Trainer(job.checkpoint or settings.model, topology, config, directory, adapters)
    if broadcast_from_rank0(lambda: _is_continued(settings, launches)):
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
    return not measured and _is_continued(job.settings, launches)


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


def _is_continued(settings: Settings, launches: Collection[str]) -> bool:
    """Return whether to continue from a commit: with ``--resume``, or where one of these launches had a part in it, as
    a rank was lost.

    If not, commits that are there are deleted: ``--overwrite`` was given, or the launcher would not have come so far.
    """
    commit = committed(settings) or {}
    return settings.resume or bool(set(launches) & set(commit.get("user", {}).get("launches", ())))
