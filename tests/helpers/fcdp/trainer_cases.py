"""What ranks do in the tests of the trainer."""

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fcdp
import fuyou
from common.errors import FinetuneError
from common.memory import numa
from common.models.adapters.options import AdapterOptions
from common.models.checkpoint.watched import WatchedFiles
from fcdp.model import TrainerConfig
from fcdp.trainer import Trainer, _pin_threads
from fuyou import NonFiniteLoss

VOCABULARY = 67


@dataclass(frozen=True)
class Run:
    """One run, or a part of one."""

    model: str
    folder: Path
    strategy: Any = "fcdp"
    steps: int = 3
    rows: int = 5
    """More than a multiple of 2, 3 and 4 ranks: some compute a sequence more than others."""
    resume: bool = False
    save: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    adapters: AdapterOptions | Path | None = None


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    sent: int
    planned: float
    held: int
    """Elements of parameters that this rank holds."""
    kinds: set[tuple[bool, torch.dtype]]
    """Whether parameters are trained, and their dtype here."""


def batch(step: int, rows: int) -> dict[str, torch.Tensor]:
    """Two documents in each row, with unequal numbers of labels."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (rows, 10), generator=generator)
    labels = ids.clone()
    labels[:, 0] = labels[:, 4] = -100
    labels[1, 5:] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(4), torch.arange(6)]).repeat(rows, 1),
    }


def rate(step: int) -> float:
    return 1e-2 / step


def train(topology: fcdp.Topology, run: Run) -> Outcome:
    config = TrainerConfig(**{"strategy": run.strategy, "dtype": "fp32", "max_grad_norm": 0.5, **run.options})
    adapters = run.adapters.peft_config() if isinstance(run.adapters, AdapterOptions) else run.adapters
    trainer = Trainer(run.model, topology, config, run.folder, adapters)
    trainer.resume() if run.resume else trainer.begin()
    losses, norms = [], []
    sent = 0
    for step in range(trainer.step_count + 1, trainer.step_count + run.steps + 1):
        done = trainer.train_step(batch(step, run.rows), rate(step))
        losses.append(done.loss)
        norms.append(done.grad_norm)
        sent = done.sent_bytes
    trainer.user_state["steps"] = trainer.step_count
    trainer.commit()
    if run.save is not None:
        trainer.save_pretrained(run.save, merge=run.adapters is not None)
    held = sum(parameter.to_local().numel() for parameter in trainer._model.module.parameters())
    kinds = {(parameter.requires_grad, parameter.dtype) for parameter in trainer._model.module.parameters()}
    planned = trainer.planned_sent_bytes(run.rows)
    trainer.close()
    return Outcome(losses, norms, sent, planned, held, kinds)


def export(topology: fcdp.Topology, run: Run) -> str:
    """As :func:`tests.helpers.fcdp.engine_cases.export`."""
    adapters = run.adapters.peft_config() if isinstance(run.adapters, AdapterOptions) else run.adapters
    trainer = Trainer(run.model, topology, TrainerConfig(run.strategy, "fp32"), run.folder, adapters)
    trainer.begin()
    assert run.save is not None
    said = "exported"
    try:
        trainer.save_pretrained(run.save, merge=adapters is not None)
    except FinetuneError as error:
        left = sorted(str(file.relative_to(run.save)) for file in run.save.rglob("*") if file.is_file())
        said = f"{error} {left}"
    dist.barrier()
    trainer.save_pretrained(run.save, merge=adapters is not None, allow_nonfinite=True)
    trainer.close()
    return said


def diverge(topology: fcdp.Topology, run: Run) -> str:
    """A step whose loss is not finite: every rank reports it, and nothing hangs."""
    trainer = Trainer(run.model, topology, TrainerConfig(dtype="fp32"), run.folder)
    trainer.begin()
    trainer.train_step(batch(1, run.rows), 1e30)
    try:
        trainer.train_step(batch(2, run.rows), 1e-3)
    except NonFiniteLoss as error:
        assert not trainer._gradients(), "the next step would add to them"
        return str(error)
    finally:
        trainer.close()
    return "finite"


def pinned(topology: fcdp.Topology, system: Path) -> tuple[tuple[int, ...] | None, set[int]]:
    """Where a rank whose GPU is on the NUMA node of its local number is pinned, on a machine with this /sys; it is as
    it was afterwards."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    plain = numa.cores_for
    with (
        mock.patch.object(numa, "node_of", return_value=topology.local_rank),
        mock.patch.object(numa, "cores_for", functools.partial(plain, system=system)),
    ):
        cores = _pin_threads(topology)
    now = os.sched_getaffinity(0)
    numa.pin(sorted(before))
    torch.set_num_threads(threads)
    return cores, now


def open_what_one_rank_sees_change(topology: fcdp.Topology, run: Run, other: Path | None) -> str:
    """Return what is reported where rank 1 sees the checkpoint change, or has that in ``other``."""
    changed = WatchedFiles.changed
    is_one = topology.rank == 1
    sees = (lambda _: "The model was replaced.") if is_one and other is None else changed
    model = str(other) if is_one and other is not None else run.model
    try:
        with mock.patch.object(WatchedFiles, "changed", sees):
            if run.options:
                with fuyou.Engine(
                    model, ssd=[make_ssd(run.folder, topology.rank)], topology=topology, **run.options
                ):
                    return "nothing"
            trainer = Trainer(model, topology, TrainerConfig("fcdp", "fp32"), run.folder)
            trainer.begin()
            trainer.close()
    except FinetuneError as error:
        return str(error)
    return "nothing"


def make_ssd(folder: Path, rank: int) -> Path:
    path = folder / f"rank{rank}"
    path.mkdir(parents=True, exist_ok=True)
    return path
