"""``finetune --nodes``, as every rank runs it: meet the others, compare, prepare, train, export and report.

Ranks train out of core, each node on its own SSDs, or in memory, with FSDP2 and cached parameters.
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist

import fcdp.trainer
from cli.job.claim import claim
from cli.job.job import Job
from cli.job.model import trained_share
from cli.job.resolve import check_start, resolve
from cli.job.resumed import EarlierRun, check_same_run, decided
from cli.job.strategy import DEFAULT, PROFILE, choose_strategy, cluster_of, has_profile, measure_cluster
from cli.options.run_record import COMMITS
from cli.options.settings import Settings
from cli.report.results import EvaluationResult, StepResult, Usage
from cli.train.engine_trainer import EngineTrainer, profile_once
from cli.train.loop import Trainer, evaluate, train
from cli.train.meeting import check_same_command, check_shared, meet
from cli.train.process import LAUNCH, RankProcess
from common.activity import activity
from common.communication import all_gather_object, broadcast_from_rank0, run_on_all_ranks
from common.data import Batches
from common.errors import FinetuneError, printable
from common.store import load_manifest, remove
from common.store.folders import rank_folder, remove_folder
from common.units import format_bytes, format_seconds
from fcdp.planner import Workload
from fcdp.strategy.strategy import AUTO
from fcdp.strategy.topology import Topology
from fcdp.trainer import TrainerConfig
from fuyou import Engine
from fuyou.config import AUTO as AUTO_DTYPE
from fuyou.engine.common_decisions import dtype_of_all
from fuyou.layout.record import DTYPES
from fuyou.runtime.ranks import share_of


def train_rank(settings: Settings, rank: RankProcess) -> None:
    """Do the whole run, as this rank's part of it."""
    is_first = LAUNCH not in os.environ and not rank.restarted  # else our launcher has checked this
    settings = decided(settings, checks=is_first)
    settings = dataclasses.replace(settings, gpus_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    if is_first:
        check_start(settings, int(os.environ["LOCAL_WORLD_SIZE"]))
    store, placement, topology = meet(settings, rank)
    launches = check_same_command(settings, rank)
    if settings.dtype == AUTO_DTYPE:
        stored = EarlierRun.of(settings).dtype if settings.resume or rank.restarted else None
        dtype = dtype_of_all(stored, str(topology.device), all_gather_object)
        settings = dataclasses.replace(settings, dtype=dtype)
    with contextlib.ExitStack() as stack:
        job = _prepare(settings, rank, store, stack)
        if placement is not None and rank.is_rank0 and not rank.restarted:
            print(f"nodes    {placement}", flush=True)
        check_shared(job.output)
        open_ = InMemoryTrainer if job.settings.in_memory else open_trainer
        with activity("reading the weights, on every rank", announced=rank.is_rank0):
            trainer = open_(job, topology, rank, launches)
        try:
            train(job, trainer, rank)
        except Exception as error:
            # Leaves the trainer open: its threads may wait for ranks that will never answer
            if trainer.can_continue_after(error):
                error.add_note(job.settings.how_to_continue)
            raise
        dist.barrier()
        trainer.model.close()
        topology.close()
        dist.destroy_process_group()
        job.close()


def _prepare(settings: Settings, rank: RankProcess, store: dist.Store, stack: contextlib.ExitStack) -> Job:
    if rank.is_rank0:
        with activity("preparing the run: model, memory, data", announced=True):
            job = resolve(settings, lambda: stack.enter_context(claim(settings, rank.launch)), rank.restarted)
        if not rank.restarted:
            print(printable(job.header()), flush=True)
        store.set("prepared", "")
        return job
    speaks = os.environ["LOCAL_RANK"] == "0" and rank.node > 0
    if speaks:
        print(
            f"nodes    this is node {rank.node + 1} of {rank.nodes}: rank 0 reads the data first", flush=True
        )
    while not store.check(["prepared"]):  # not a collective: tokenizing may take longer than those may wait
        time.sleep(0.1)
    job = resolve(settings, is_restart=rank.restarted)
    stack.enter_context(job.outputs.held(settings))
    if speaks:
        print("nodes    this node trains from here on; its figures are part of what rank 0 shows", flush=True)
    return job


def open_trainer(job: Job, topology: Topology, rank: RankProcess, launches: Collection[str]) -> EngineTrainer:
    """Open this rank's engine, which takes its part of every batch, given all nodes' launches. Collective."""
    run_on_all_ranks(job.watched.check)
    broadcast_from_rank0(lambda: profile_once(job, share_of(topology)))
    engine = _open_engine(job, topology, launches)
    check_same_run(job, engine, launches)
    return EngineTrainer(job, engine, topology, lambda: rank.stopping)


def _open_engine(job: Job, topology: Topology, launches: Collection[str]) -> Engine:
    folders = [path / job.run_name for path in job.ssd]
    leaving = job.engine.store.folders_to_leave
    name = rank_folder(topology.local_rank)
    continued = job.settings.resume or _is_restart(folders[0] / name, launches)
    for folder in folders:
        folder.mkdir(exist_ok=True)
        if topology.local_rank == 0 and not continued:
            # What more ranks than now have left there, or a single one
            remove([folder])
            here = {rank_folder(number) for number in range(topology.ranks_per_node)}
            for path in folder.glob(rank_folder("*")):
                if path.name not in here:
                    remove_folder(path, shared=True)
    config = job.engine.with_options(
        ssd=folders,
        leave_ssd=[path for path in leaving if continued and path.is_dir()],
        device=topology.device,
        run_name=name,
        resume=continued,
        overwrite=True,  # the launcher would not have come so far if something were there that is to be kept
        batch_shape=(
            -(-job.settings.batch_size // topology.world_size) * job.batches.rows_per_item,
            job.seq_len,
        ),
        topology=topology,
    )
    return Engine(job.checkpoint or job.settings.model, config)  # type: ignore[call-arg] # the config has ssd


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
        self._job = job
        self._rank = rank
        self._stop_requested = False

    def train_step(self, batch: dict[str, torch.Tensor], lr: float) -> StepResult:
        done = self._trainer.train_step(batch, lr, self._rank.stopping)
        self._stop_requested = done.stop
        return StepResult(done.loss, done.grad_norm, aux_loss=done.aux_loss, sent_bytes=done.sent_bytes)

    def commit_if_due(self, step: int) -> None:
        if step % self._job.engine.store.commit_every == 0:
            self._trainer.commit()

    def evaluate(self, batches: Batches) -> EvaluationResult:
        return evaluate(batches, self._job.settings.batch_size, self._trainer.eval_loss)

    def stop_requested(self) -> bool:
        return self._stop_requested

    def commit(self) -> None:
        self._trainer.commit()

    def has_commit(self) -> bool:
        return self._trainer.checkpoints.newest() is not None

    def can_continue_after(self, error: Exception) -> bool:
        return isinstance(error, FinetuneError) and self.has_commit()

    def usage(self) -> Usage:
        trainer = self._trainer
        return Usage(
            trainer.device_peak_bytes,
            trainer.meter.peak_bytes,
            trainer.meter.peak_bytes,
            trainer.meter.baseline_bytes,
        )


def _open_commits(job: Job, topology: Topology, launches: Collection[str]) -> fcdp.trainer.Trainer:
    run_on_all_ranks(job.watched.check)
    directory = job.output / COMMITS
    engine = job.engine
    cache = engine.host_cache
    options = engine.optimizer
    config = TrainerConfig(
        strategy=_strategy(job, topology, launches),
        dtype=engine.dtype,
        betas=engine.adam.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        micro_batch=engine.memory.micro_batch,
        seed=engine.seed,
        host_cache_bytes=None if cache is None else cache // topology.ranks_per_node,
        device_cache_threshold=job.settings.device_cache_threshold,
        towers=engine.towers,
        router_loss=engine.router_loss,
    )
    adapters = engine.adapters if engine.saved_adapter is None else engine.saved_adapter.directory
    trainer = fcdp.trainer.Trainer(
        job.checkpoint or job.settings.model, topology, config, directory, adapters
    )
    if broadcast_from_rank0(lambda: _is_continued(job, launches)):
        trainer.resume()
    else:
        trainer.begin()
    check_same_run(job, trainer, launches)
    return trainer


def _strategy(job: Job, topology: Topology, launches: Collection[str]) -> str:
    """Return the name of the strategy. If one is to be chosen, rank 0 does, as only it need know the cluster, which is
    measured before if no file describes it. Collective.
    """
    if job.settings.strategy not in (None, AUTO):
        return job.settings.strategy
    profile = job.output / PROFILE
    cluster = job.settings.cluster
    unnamed = job.settings.strategy is None and cluster is None
    if unnamed and (
        topology.world_size == 1 or broadcast_from_rank0(lambda: _began_unmeasured(job, launches))
    ):
        return DEFAULT
    micro_batch, micro_batches = _micro_batches(job, topology)
    has_measured = broadcast_from_rank0(lambda: has_profile(profile, topology.levels))
    if cluster in (None, AUTO):
        if not has_measured:
            measure_cluster(job.choice.config, profile, topology, micro_batch, job.seq_len, job.engine.dtype)
        cluster = str(profile)

    def choose() -> str:
        workload = Workload.of_model(
            job.choice.config,
            seq_len=job.seq_len,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            trainable_ratio=trained_share(job.model),
            dtype_bytes=DTYPES[job.engine.dtype].itemsize,
            cache_threshold=job.settings.device_cache_threshold,
            router_loss=job.engine.router_loss,
        )
        levels = topology.levels
        choice = choose_strategy(
            cluster_of(cluster, job.settings.levels, levels.nodes, levels.ranks_per_node), workload, levels
        )
        seconds, sent = format_seconds(choice.step_seconds), format_bytes(choice.inter_node_bytes)
        print(
            f"strategy {choice.name}; the planner expects {seconds} and {sent} across nodes per step",
            flush=True,
        )
        return choice.name

    name: str = broadcast_from_rank0(choose)
    return name


def _began_unmeasured(job: Job, launches: Collection[str]) -> bool:
    measured = (job.output / PROFILE).exists()
    return not measured and _is_continued(job, launches)


def _micro_batches(job: Job, topology: Topology) -> tuple[int, int]:
    """Return the sequences that a rank computes at once, and how often it does in a step."""
    rows = job.settings.batch_size / topology.world_size
    micro_batch = min(job.engine.memory.micro_batch or math.ceil(rows), math.ceil(rows))
    return micro_batch, math.ceil(rows / micro_batch)


def _is_continued(job: Job, launches: Collection[str]) -> bool:
    """Return whether to continue from a commit: with ``--resume``, or where one of these launches had a part in it, as
    a rank was lost.

    If not, commits that are there are deleted: ``--overwrite`` was given, or the launcher would not have come so far.
    """
    commit = EarlierRun.of(job.settings).commit or {}
    return job.settings.resume or bool(set(launches) & set(commit.get("user", {}).get("launches", ())))
