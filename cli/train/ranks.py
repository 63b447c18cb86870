"""The training loop of ``finetune --nodes --ssd``, as every rank runs it: out of core, each node on its own SSDs."""

import contextlib
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from cli.launch.interrupts import Stopped
from cli.launch.rank import Rank
from cli.report.said import MetricsLogger
from cli.report.summary import Measurements
from cli.train.any_run import check_ids, check_same_run, conclude, measurements, save, say_resumed
from cli.train.evaluation import is_due, look
from cli.train.one_machine import engine_options, profile_once, since, step_line
from cli.train.prepare import Job
from common.errors import UserError
from common.object_collectives import all_gather_object, broadcast_from_rank0
from common.store import load_manifest, remove
from common.store.migration import remove_folder
from fcdp.strategy.topology import Topology
from fuyou import Engine
from fuyou.checkpoint.run_files import rank_folder
from fuyou.ranks.topology import share_of


def train_ranks(job: Job, topology: Topology, rank: Rank, launches: set[str]) -> Engine:
    """Train, export and report. Returns the engine, which is to be closed when all ranks have come so far.

    An error leaves it as it is: its threads may wait for ranks that will never answer, and the process ends anyway.

    Raises:
        Stopped, UserError, FinetuneError: as in :func:`cli.train.one_machine.finetune`; some on one rank only.
    """
    settings = job.settings
    broadcast_from_rank0(lambda: profile_once(job, share_of(topology)))
    engine = _open_engine(job, topology, launches)
    try:
        _train_and_save(job, engine, topology, rank, launches)
    except UserError:
        raise
    except Exception as error:
        error.add_note(settings.how_to_continue)
        raise
    return engine


def _open_engine(job: Job, topology: Topology, launches: set[str]) -> Engine:
    settings = job.settings
    folders = [path / job.run_name for path in job.ssd]
    leaving = [Path(word).expanduser() / job.run_name for word in settings.leave_ssd]
    name = rank_folder(topology.local_rank)
    continued = settings.resume or _again(folders[0] / name, launches)
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
        batch_shape=(-(-settings.batch_size // topology.world_size), job.seq_len),
        automatic=True,
        topology=topology,
    )


def _again(folder: Path, launches: set[str]) -> bool:
    """Whether any rank's store was made by launchers that are still there: then a rank was lost, and all go on."""
    content = load_manifest(folder) if folder.exists() else None
    mine = bool(content and launches & set(content["user"].get("launches", ())))
    return any(all_gather_object(mine))


def _train_and_save(job: Job, engine: Engine, topology: Topology, rank: Rank, launches: set[str]) -> None:
    settings, speaks = job.settings, rank.rank == 0
    check_same_run(job, engine, launches)
    if settings.trace is not None:
        engine.keep_trace()
    if speaks and engine.step_count:
        say_resumed(job, engine, rank.restarts)
    io_before = engine.io_bytes()
    measured, sent = _train(job, engine, topology, rank)
    rank.where = "after the last step"
    engine.flush()
    if settings.trace is not None and measured.losses and speaks:
        engine.write_trace(settings.trace.expanduser())
    read, written = since(io_before, engine.io_bytes())
    save(job, engine, speaks)
    mine = (*engine.planned_io_bytes(), read, written, engine.created_bytes, engine.host_peak_bytes,
            engine.host_baseline_bytes)  # fmt: skip
    everyone = all_gather_object(mine)
    if not speaks:
        return
    node = [sum(each) for each in zip(*everyone[: topology.ranks_per_node], strict=True)]
    per_step = sent * topology.ranks_per_node / max(1, len(measured.losses))
    report = measured.report(
        (engine.parameters, engine.trainable_parameters),
        (engine.device_peak_bytes, node[5], node[6]),
        (node[2], node[3]),
        (node[0], node[1]),
        (per_step, per_step),
        engine.clip_by,
    )
    stores = ", ".join(str(path / job.run_name) for path in job.ssd)
    conclude(job, report, node[3] + node[4], "store", f"{stores} on every node")


def _train(job: Job, engine: Engine, topology: Topology, rank: Rank) -> tuple[Measurements, int]:
    """All steps that are left. Returns measurements, and the bytes that this rank has sent to other nodes."""
    done, sent, ranks = engine.step_count, 0, topology.ranks_per_node
    measured = measurements(job, engine)
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(MetricsLogger(job, done, asdict(engine.memory_plan))) if rank.rank == 0 else None
        if not done and is_due(job, 0):
            _evaluate(job, engine, topology, rank, said)
        ended, io_before = time.perf_counter(), engine.io_bytes()
        for step in range(done + 1, job.steps + 1):
            rank.where = f"in step {step}"
            batch = job.batches.batch(step - 1)
            check_ids(job, batch)
            engine.lr = job.learning_rate.at(step)
            engine(**_part(batch, topology)).loss.backward()
            report = engine.step()

            began, ended = ended, time.perf_counter()
            measured.add(report.loss, ended - began, report.bound_seconds, report.clipped, report.skipped)
            sent += report.planned_sent_bytes
            if said is not None:
                now = engine.io_bytes()
                moved = tuple(nbytes * ranks for nbytes in since(io_before, now))  # of a node: its ranks move alike
                io_before = now
                line = step_line(
                    engine, report, measured, ended - began, moved, engine.host_peak_bytes * ranks,
                    sent_bytes=report.planned_sent_bytes * ranks,
                )  # fmt: skip
                said.step(line, engine.lr, ended - began, topology.world_size)
            if _any(rank.stopping) and step < job.steps:
                engine.flush()
                raise Stopped(f"stopped after step {step}, which is committed. {job.settings.how_to_continue}")
            if is_due(job, step):
                _evaluate(job, engine, topology, rank, said)
                ended, io_before = time.perf_counter(), engine.io_bytes()
    return measured, sent


def _part(batch: dict[str, torch.Tensor], topology: Topology) -> dict[str, torch.Tensor]:
    """This rank's rows."""
    rows = len(batch["input_ids"])
    first, last = (rows * number // topology.world_size for number in (topology.rank, topology.rank + 1))
    return {name: value[first:last] for name, value in batch.items()}


def _evaluate(job: Job, engine: Engine, topology: Topology, rank: Rank, said: MetricsLogger | None) -> None:
    """Look at the held-out data, on all ranks."""
    rank.where = f"evaluating after step {engine.step_count}"
    look(job, lambda batch: engine.eval_loss(**_part(batch, topology)), engine.step_count, said)


def _any(stop: bool) -> bool:
    """Whether any rank has been asked to stop."""
    told = torch.tensor([float(stop)])
    dist.all_reduce(told)
    return bool(told > 0)
