"""The training loop of ``finetune --nodes``, as every rank runs it. Rank 0 speaks for all."""

import contextlib
import dataclasses
import hashlib
import math
import os
import platform
import socket
import time
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import common
from cli.launch.interrupts import Stopped
from cli.launch.nodes import LAUNCH
from cli.launch.rank import Rank
from cli.options.adapters import peft_config_of, towers_of, trainable_parameters
from cli.options.computing_dtype import with_dtype_of_all
from cli.options.settings import COMMITS, Settings
from cli.plan.choose_strategy import DEFAULT, choose_strategy
from cli.report.progress import ClusterLine
from cli.report.said import MetricsLogger
from cli.report.summary import Measurements
from cli.train.any_run import check_ids, check_same_run, conclude, measurements, save, say_resumed
from cli.train.evaluation import is_due, look
from cli.train.one_machine import quiet_transformers
from cli.train.prepare import Job, prepare
from cli.train.ranks import train_ranks
from common.errors import FinetuneError, UserError
from common.hardware.machine import list_gpus
from common.models.adapters.adapters import CONFIG
from common.models.meta import build_meta_model
from common.models.presets import load_config
from common.object_collectives import all_gather_object, broadcast_from_rank0
from common.units import format_bytes, format_seconds
from fcdp.checkpoint.commits import ShardedCheckpoints
from fcdp.config import TrainerConfig
from fcdp.planner import Workload
from fcdp.strategy.mesh import Levels
from fcdp.strategy.names import AUTO
from fcdp.strategy.topology import Topology
from fcdp.trainer import Trainer
from fuyou import Engine
from fuyou.layout.record import DTYPES

_STUCK = timedelta(minutes=30)
"""How long a collective may wait for a rank that is alive: one may read its weights from slower drives than others."""
_MAY_DIFFER = {
    "debug", "report", "trace", "arguments", "resume", "overwrite", "gpus_per_node", "rdzv_endpoint", "node_timeout",
    "log_to", "leave_ssd",
}  # fmt: skip
"""Settings that nodes need not agree about, or that others check with better words."""


def train(settings: Settings, rank: Rank) -> None:
    """All of it: meet, compare, prepare, train, export, report.

    Raises:
        Stopped, UserError, FinetuneError: as in :func:`cli.train.one_machine.finetune`; some on one rank only.
    """
    if not settings.debug:
        quiet_transformers()
    settings = dataclasses.replace(settings, gpus_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    device = device_of(settings, int(os.environ["LOCAL_RANK"]))
    store = meet(settings, rank, device)
    levels = None if settings.levels is None else Levels.parse(settings.levels)
    topology = Topology.from_environment(device=device, levels=levels)
    launches = _compare(settings)
    settings = with_dtype_of_all(settings, device.type, bool(rank.restarts))
    if rank.rank == 0:
        job = prepare(settings)
        if not rank.restarts:
            print(job.header(), flush=True)
        store.set("prepared", "")
    else:
        while not store.check(["prepared"]):  # not a collective: tokenizing may take longer than those may wait
            time.sleep(0.1)
        job = prepare(settings)
    _check_shared(job, rank.rank)
    run = train_ranks if settings.ssd else _train_in_memory
    trained: Engine | Trainer = run(job, topology, rank, launches)
    rank.disconnect()
    dist.barrier()
    trained.close()
    topology.close()
    dist.destroy_process_group()
    job.close()


def _train_in_memory(job: Job, topology: Topology, rank: Rank, launches: set[str]) -> Trainer:
    trainer = _open_trainer(job, topology, launches)
    try:
        _train_and_save(job, trainer, rank)
    except FinetuneError as error:
        if trainer.newest_commit() is not None:
            error.add_note(job.settings.how_to_continue)
        raise
    return trainer


def device_of(settings: Settings, local_rank: int) -> torch.device:
    """What this rank computes on."""
    if settings.gpu == "cpu" or not list_gpus():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def meet(settings: Settings, rank: Rank, device: torch.device) -> dist.Store:
    """Connect to the other ranks, with a store for this start alone, which is returned, and a client of it for news."""
    timeout = timedelta(seconds=settings.node_timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, rank.world, is_master=rank.rank == 0, timeout=timeout, wait_for_workers=False)
    news = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    rank.connect(news, settings.node_timeout)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo",
        store=dist.PrefixStore("group", store),
        rank=rank.rank,
        world_size=rank.world,
        timeout=_STUCK,  # ranks that are lost are noticed much earlier, by their silence
    )
    return store


def _compare(settings: Settings) -> set[str]:
    """Refuse nodes that differ in code, libraries or options. Returns the launches of all nodes.

    Raises:
        UserError: names the first difference, on every rank.
    """
    own = {
        **{name: str(value) for name, value in vars(settings).items() if name not in _MAY_DIFFER},
        "model": Path(settings.model).name,  # a checkpoint may lie elsewhere on each node
        "ssd": "given" if settings.ssd else "left out",  # each node has drives of its own
        "data": str([Path(name).name for name in settings.data]),
        "peft_config": _content(settings.peft_config),
        "eval_data": str([Path(name).name for name in settings.eval_data]),
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{library: version(library) for library in ("torch", "transformers", "safetensors")},
        "finetune's code": _code(),
    }
    mine = (socket.gethostname(), os.environ[LAUNCH], own)
    everyone = all_gather_object(mine)
    first_host, _, first = everyone[0]
    for number, (host, _, other) in enumerate(everyone):
        for name in sorted(first):
            if first[name] != other[name]:
                what = f"--{name.replace('_', '-')}" if hasattr(settings, name) else name
                raise UserError(
                    f"The nodes were not started alike: {what} is {first[name]} on {first_host} (rank 0), and "
                    f"{other[name]} on {host} (rank {number}). Start the same command with the same code on each."
                )
    return {launch for _, launch, _ in everyone}


def _content(peft_config: Path | None) -> str:
    """What a file says that may lie elsewhere on each node."""
    if peft_config is None:
        return "None"
    file = peft_config.expanduser()
    return " ".join((file / CONFIG if file.is_dir() else file).read_text().split())


def _code() -> str:
    """A short digest of our own source."""
    digest = hashlib.sha256()
    root = Path(str(common.__file__)).parents[1]
    for package in ("cli", "common", "fcdp", "fuyou"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _check_shared(job: Job, rank: int) -> None:
    """All ranks write commits into one directory: make sure that it is one.

    Raises:
        UserError: this rank does not see what rank 0 writes.
    """
    probe = job.output / f".finetune-{os.environ['MASTER_PORT']}"
    if rank == 0:
        probe.touch()
    dist.barrier()
    deadline = time.monotonic() + 10  # network file systems may show new files late
    while not probe.exists():
        if time.monotonic() > deadline:
            raise UserError(
                f"--output {job.output} is not one directory for all nodes: a file that rank 0 has made in it is not "
                f"there on {socket.gethostname()}. Give a place on a file system that all nodes share."
            )
        time.sleep(0.1)
        os.listdir(job.output)
    dist.barrier()
    if rank == 0:
        probe.unlink()


def _open_trainer(job: Job, topology: Topology, launches: set[str]) -> Trainer:
    settings = job.settings
    directory = job.output / COMMITS
    config = TrainerConfig(
        strategy=_strategy(job, topology),
        dtype=settings.dtype,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm or None,
        micro_batch=settings.micro_batch,
        seed=settings.seed,
        host_cache_bytes=None if settings.host_cache is None else settings.host_cache // topology.ranks_per_node,
        on_nonfinite=settings.on_nonfinite,
        towers=towers_of(settings),
        router_loss=settings.router_loss,
        device_cache_threshold=0.9 if settings.device_cache_threshold is None else settings.device_cache_threshold,
    )
    trainer = Trainer(job.checkpoint or settings.model, topology, config, directory, peft_config_of(settings))
    if broadcast_from_rank0(lambda: _is_continued(settings, ShardedCheckpoints(directory), launches)):
        trainer.resume()
    else:
        trainer.begin()
    check_same_run(job, trainer, launches)
    return trainer


def _strategy(job: Job, topology: Topology) -> str:
    """The name of the strategy, on every rank: rank 0 chooses if that is asked for, for only it need know the cluster.

    Raises:
        UserError, FinetuneError: see :func:`cli.plan.choose_strategy.choose_strategy`.
    """
    settings = job.settings
    if settings.strategy != AUTO:
        return settings.strategy or DEFAULT
    name: str = broadcast_from_rank0(lambda: _choose(job, topology))
    return name


def _choose(job: Job, topology: Topology) -> str:
    """As the planner advises."""
    settings = job.settings
    rows = settings.batch_size / topology.world_size
    micro_batch = min(settings.micro_batch or math.ceil(rows), math.ceil(rows))
    config, _ = load_config(settings.model)
    model = build_meta_model(config)
    whole = sum(parameter.numel() for parameter in model.parameters())
    trained = trainable_parameters(settings, model) if settings.trains_adapters else whole
    workload = Workload.of_model(
        config,
        seq_len=job.seq_len,
        micro_batch=micro_batch,
        micro_batches=math.ceil(rows / micro_batch),
        trainable_ratio=min(1.0, trained / whole),
        dtype_bytes=DTYPES[settings.dtype].itemsize,
    )
    choice = choose_strategy(settings, workload, topology.levels)
    seconds, sent = format_seconds(choice.step_seconds), format_bytes(choice.inter_node_bytes)
    print(f"strategy {choice.name}; the planner expects {seconds} and {sent} across nodes per step", flush=True)
    return choice.name


def _is_continued(settings: Settings, commits: ShardedCheckpoints, launches: set[str]) -> bool:
    """Whether to go on from a commit; if not, commits that are there go: ``--overwrite`` was given, or the launcher
    would not have come so far."""
    if settings.resume or (newest := commits.newest()) is None:
        return settings.resume
    # Started again by a launcher that has had a part in this run: --resume goes without saying.
    try:
        return bool(launches & set(commits.describe(newest)["user"].get("launches", ())))
    except FinetuneError:  # of another format, or damaged: nothing that this launcher has made
        return False


def _train_and_save(job: Job, trainer: Trainer, rank: Rank) -> None:
    settings, speaks = job.settings, rank.rank == 0
    if speaks and (settings.resume or rank.restarts):
        say_resumed(job, trainer, rank.restarts)
    measured, sent = _train(job, trainer, rank)
    rank.where = "after the last step"
    trainer.commit()
    save(job, trainer, speaks)
    if not speaks:
        return
    per_step = sent / len(measured.losses) if measured.losses else 0.0
    planned = trainer.planned_sent_bytes(settings.batch_size)
    report = measured.report(
        (trainer.parameters, trainer.trainable_parameters),
        (trainer.device_peak_bytes, trainer.host_peak_bytes, trainer.host_baseline_bytes),
        (0, 0),
        (0, 0),
        (per_step, planned),
    )
    conclude(job, report, 0, "commits", str(job.output / COMMITS))


def _train(job: Job, trainer: Trainer, rank: Rank) -> tuple[Measurements, int]:
    """All steps that are left. Returns measurements, and the bytes that a node has sent to others."""
    settings, done, sent = job.settings, trainer.step_count, 0
    measured = measurements(job, trainer)
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(MetricsLogger(job, done, _plan_of(job, trainer))) if rank.rank == 0 else None
        if not done and is_due(job, 0):
            _evaluate(job, trainer, rank, said)
        ended = time.perf_counter()
        for step in range(done + 1, job.steps + 1):
            rank.where = f"in step {step}"
            batch = job.batches.batch(step - 1)
            check_ids(job, batch)
            rate = job.learning_rate.at(step)
            result = trainer.train_step(batch, rate, rank.stopping)
            if step % settings.commit_interval == 0:
                trainer.commit()
            began, ended = ended, time.perf_counter()
            sent += result.sent_bytes
            measured.add(result.loss, ended - began, {}, skipped=result.skipped)
            if said is not None:
                tokens = measured.tokens_per_step / (ended - began)
                line = ClusterLine(
                    step, result.loss, result.grad_norm, tokens, tokens * measured.model_flops, result.sent_bytes,
                    trainer.device_peak_bytes, trainer.host_peak_bytes, result.skipped, result.aux_loss,
                )  # fmt: skip
                said.step(line, rate, ended - began, rank.world)
            if result.stop and step < job.steps:
                trainer.commit()
                raise Stopped(f"stopped after step {step}, which is committed. {settings.how_to_continue}")
            if is_due(job, step):
                _evaluate(job, trainer, rank, said)
                ended = time.perf_counter()
    return measured, sent


def _plan_of(job: Job, trainer: Trainer) -> dict[str, Any]:
    return {
        "strategy": trainer.strategy,
        "sent_bytes_per_step": trainer.planned_sent_bytes(job.settings.batch_size),
    }


def _evaluate(job: Job, trainer: Trainer, rank: Rank, said: MetricsLogger | None) -> None:
    """Look at the held-out data, on all ranks."""
    rank.where = f"evaluating after step {trainer.step_count}"
    look(job, trainer.eval_loss, trainer.step_count, said)
