"""Training and evaluating with an objective other than the engine's own loss, and the reference of some."""

import hashlib
import importlib
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cli.job.job import Job
from cli.job.resumed import table_sum
from cli.options.run_record import REFERENCES, RUN
from cli.report.results import EvaluationResult
from common.activity import activity
from common.data import Batches, PackedBatches
from common.data.batches import REFERENCE
from common.data.rows import PADDING
from common.errors import UserError
from common.files import file_when_complete
from common.models.adapters.options import AdapterOptions
from common.units import counted
from fuyou import Engine
from fuyou.objectives.losses import BatchNumbers, Learned, Objective, SumOverRanks, alone

Batch = dict[str, torch.Tensor]


def objective_of(job: Job) -> Objective | None:
    """Return what computes the loss of a job; None: the engine does."""
    if job.traits.loss is None:
        return None
    module, _, name = job.traits.loss.rpartition(".")
    objective: Objective = getattr(importlib.import_module(module), name)(
        **job.settings.named(job.traits.options)
    )
    return objective


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a batch."""

    rank: int = 0
    world_size: int = 1
    sum: SumOverRanks = alone  # Adds up numbers of all ranks

    def part(self, batch: Batch, items: int) -> Batch:
        """Return this rank's items of a batch; every rank has all of them where there are fewer items than ranks."""
        return batch if items < self.world_size else self.cut(batch, items)

    def cut(self, batch: Batch, items: int) -> Batch:
        """Return this rank's items of a batch: none on some ranks where there are fewer items than ranks."""
        first = items * self.rank // self.world_size
        last = items * (self.rank + 1) // self.world_size
        return _cut(batch, first, last, items)


class ObjectiveLoop:
    """Computes an objective's loss with an engine, on the ranks that share each batch."""

    def __init__(self, objective: Objective, engine: Engine, ranks: Ranks = Ranks()) -> None:
        self._objective = objective
        self._engine = engine
        self._ranks = ranks

    def loss(self, batch: Batch, items: int) -> tuple[torch.Tensor, dict[str, float]]:
        """Return this rank's share of the loss of a batch of all ranks, and means over its items to watch."""
        learned, aux = self._learn(batch, items)
        return learned.loss + aux, self._means(learned.watched)

    @torch.no_grad()
    def evaluate(self, batches: Batches, batch_size: int) -> EvaluationResult:
        """Return the mean loss of all held-out items, forward only.

        The last batch is completed with items that were seen, which do not count.
        """
        start_time = time.perf_counter()
        computed = 0
        targets = 0
        totals = Counter[str]()
        for number in range(batches.steps_per_epoch):
            items = min(batch_size, batches.rows - number * batch_size)
            batch = _cut(batches.batch(number), 0, items, batch_size)
            learned, _ = self._learn(batch, items)
            (loss,) = self._ranks.sum([float(learned.loss)])
            means = {"loss": loss, **self._means(learned.watched)}
            totals.update({name: value * items for name, value in means.items()})
            computed += batch["input_ids"].numel()
            targets += int((batch["labels"] != -100).sum()) if "labels" in batch else len(batch["input_ids"])
        means = {name: total / batches.rows for name, total in totals.items()}
        rate = computed / (time.perf_counter() - start_time)
        return EvaluationResult(means.pop("loss"), targets, rate, means)

    def _learn(self, batch: Batch, items: int) -> tuple[Learned, torch.Tensor]:
        """Return what is learned from this rank's part of a batch, and its share of the router loss."""
        objective = self._objective
        part = self._ranks.part(batch, items)
        extras = {name: part[name] for name in objective.extras if name in part}
        apart = (extras.keys() - {"labels"}) | {REFERENCE}
        named: dict[str, Any] = {name: value for name, value in part.items() if name not in apart}
        out = self._engine.tokens(**named, outputs=objective.outputs)
        learned = objective.learn(BatchNumbers(out, part.get(REFERENCE), extras, self._ranks.sum))
        if out.aux_loss is None:
            return learned, torch.zeros(())
        return learned, out.aux_coefficient / self._ranks.world_size * out.aux_loss

    def _means(self, watched: Mapping[str, torch.Tensor]) -> dict[str, float]:
        numbers = [
            number for value in watched.values() for number in (float(value.detach().sum()), value.numel())
        ]
        sums = self._ranks.sum(numbers)
        return {
            name: total / count for name, total, count in zip(watched, sums[0::2], sums[1::2], strict=True)
        }


def _cut(batch: Batch, first: int, last: int, items: int) -> Batch:
    return {
        name: value[first * len(value) // items : last * len(value) // items] for name, value in batch.items()
    }


@dataclass(frozen=True)
class ReferencePass:
    """One forward pass over the data before the first step: a number for each row.

    As ``precompute_ref_log_probs`` of TRL: nothing of the reference is computed, read or kept in training. One rank of
    a node ``writes`` its file.
    """

    engine: Engine
    ranks: Ranks
    writes: bool

    def attach_all(self, job: Job) -> None:
        """Give the batches of a job the reference's log-probabilities: from files once the model has been trained."""
        lacking = []
        base = reference_identity(job, self.engine.base_identity)
        for batches, steps, path in _compared(job):
            table = _stored(path, batches, base) if self.engine.step_count else None
            batches.reference = table if table is not None and _has_all(table, batches, steps) else None
            if batches.reference is not None:
                self._check_noted(path, batches, batches.reference)
            have = self.ranks.sum([float(batches.reference is not None)])[0]
            if have < self.ranks.world_size:
                lacking.append((batches, steps, path))
        if not lacking:
            self._note(job)
            return
        # Once trained, a model is no longer its reference; without new adapters, which began as no change, it still is.
        begun = self.engine.step_count > 0
        if begun and not isinstance(job.engine.weights.adapters, AdapterOptions):
            if is_reference_short(job, base):  # on one machine, `extend` was called before
                raise UserError(
                    f"--steps {job.steps}: the pairs of more than {counted(self.engine.step_count, 'step')} were not "
                    "compared with the model before training, and with --nodes they cannot be once it is trained. "
                    f"Begin a new run of {job.steps} steps with --overwrite."
                )
            raise UserError(
                f"{lacking[0][2]} is missing, damaged, of fewer steps, or of another model: it had the "
                "log-probabilities of the data under the model before training, which is trained by now. Begin a new "
                "run with --overwrite."
            )
        with self.engine.disable_adapters() if begun else nullcontext():
            for batches, steps, path in lacking:
                batches.reference = self._computed(batches, job, steps, path)
        self._note(job)

    def _note(self, job: Job) -> None:
        """Have the next commit hold a hash of the numbers, so that those of another run are noticed."""
        self.engine.user_state[REFERENCES] = {
            path.name: [
                batches.digest,
                steps,
                _sum_of(batches, batches.reference, steps),
                table_sum(batches.reference),
            ]
            for batches, steps, path in _compared(job)
            if batches.reference is not None
        }

    def _check_noted(self, path: Path, batches: PackedBatches, table: np.ndarray) -> None:
        noted = self.engine.user_state.get(REFERENCES, {}).get(path.name)
        if noted is None or noted[0] != batches.digest:  # an earlier version, or other held-out data
            return
        if _sum_of(batches, table, noted[1]) != noted[2]:
            raise UserError(
                f"{path} has other log-probabilities than those that this run was compared with: it is of another run, "
                "or edited. Put the file of this run back, or begin a new run with --overwrite."
            )

    def extend(self, job: Job) -> None:
        """Add to the files what more steps need. The engine has the model before training."""
        base = reference_identity(job, self.engine.base_identity)
        for batches, steps, path, table in _short(job, base):
            self._computed(batches, job, steps, path, table)

    @torch.no_grad()
    def _computed(
        self, batches: PackedBatches, job: Job, steps: int, path: Path, table: np.ndarray | None = None
    ) -> np.ndarray:
        before = ""  # the hash that a commit may have of fewer rows
        if table is not None:
            before = table_sum(table)
        else:
            table = np.full(batches.rows * batches.rows_per_item, np.nan, dtype=np.float32)
        number = min(steps, batches.steps_per_epoch)  # all rows, once
        with activity("computing the reference") as doing:
            for step in range(number):
                doing.what = f"computing the reference: batch {step + 1:,} of {number:,}"
                if np.isnan(table[batches.row_numbers(step)]).any():
                    table[batches.row_numbers(step)] = self._rows(
                        batches.batch(step), job.settings.batch_size
                    )
        if self.writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            base = reference_identity(job, self.engine.base_identity)
            with file_when_complete(path) as out:
                digest = np.array(_digest(batches, base))
                np.savez(out, values=table, digest=digest, before=np.array(before))
        return table

    def _rows(self, batch: Batch, items: int) -> np.ndarray:
        """Return the log-probability of each row's targets, fp32 ``[R]``, of all ranks' rows."""
        rows = len(batch["input_ids"])
        ranks = self.ranks
        places = {"places": torch.arange(rows)}
        named = {name: batch[name] for name in ("input_ids", "labels", "position_ids", PADDING)}
        part = ranks.part(named | places, items)
        rows_here = part.pop("places")
        numbers: dict[str, Any] = dict(part)
        out = self.engine.tokens(**numbers)
        sums = torch.zeros(rows)
        sums[rows_here] = (out["log_probs"] * out.mask).sum(1)
        return np.array(ranks.sum(sums.tolist()), dtype=np.float32)


def _sum_of(batches: PackedBatches, table: np.ndarray, steps: int) -> str:
    digest = hashlib.sha256()
    for step in range(min(steps, batches.steps_per_epoch)):
        digest.update(np.ascontiguousarray(table[batches.row_numbers(step)], dtype=np.float32).tobytes())
    return digest.hexdigest()[:32]


def reference_identity(job: Job, base: str) -> str:
    """Return what tells the model before training: the hash of its weights, ``base``, and those of adapters, unless
    these begin as no change."""
    if job.model.adapters is None or isinstance(job.engine.weights.adapters, AdapterOptions):
        return base
    adapters = [job.fixed.get(name) for name in ("--adapter", "--peft-config", "--seed")]
    return f"{base} {adapters}"


def is_reference_short(job: Job, base: str) -> bool:
    """Return whether there are references, of the data and of a model with the hash ``base``, for fewer steps."""
    return any(True for _ in _short(job, base))


def _short(job: Job, base: str) -> Iterator[tuple[PackedBatches, int, Path, np.ndarray]]:
    for batches, steps, path in _compared(job):
        table = _stored(path, batches, base)
        if table is not None and not _has_all(table, batches, steps):
            yield batches, steps, path, table


def _compared(job: Job) -> Iterator[tuple[PackedBatches, int, Path]]:
    """Yield the batches that are compared with a reference, in how many steps, and the file that keeps it."""
    for name, batches in (("reference", job.batches), ("reference-held-out", job.held_out)):
        if isinstance(batches, PackedBatches):
            steps = job.steps if batches is job.batches else batches.steps_per_epoch
            yield batches, steps, job.output / RUN / f"{name}.npz"


def _digest(batches: PackedBatches, base: str) -> str:
    """Return a hash of what the numbers depend on: the data, and the model before training if that is known."""
    return f"{batches.digest} {base}".rstrip()


def _stored(path: Path, batches: PackedBatches, base: str) -> np.ndarray | None:
    """Return what a file has, NaN for rows that no step has needed; None if it is of other data, or there is none."""
    try:
        with np.load(path) as content:
            values = content["values"]
            digest = str(content["digest"])
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    if digest != _digest(batches, base) or len(values) < batches.rows * batches.rows_per_item:
        return None
    return values


def _has_all(table: np.ndarray, batches: PackedBatches, steps: int) -> bool:
    needed = [table[batches.row_numbers(step)] for step in range(min(steps, batches.steps_per_epoch))]
    return not any(np.isnan(row).any() for row in needed)
