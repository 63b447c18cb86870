"""The reference of a model that is trained whole: its log-probabilities before the first step, written to a file."""

import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cli.job.job import Job
from cli.options.settings import RUN
from cli.train.objectives import Batch, Ranks
from common.activity import activity
from common.data.items.batches import ItemBatches
from common.errors import UserError
from common.files.atomic import file_when_complete
from fuyou import Engine


@dataclass(frozen=True)
class ReferencePass:
    """One forward pass over data with the model as it is before training, or another one: a number for each row.

    As ``precompute_ref_log_probs`` of TRL: nothing of the reference is computed, read or kept in training.

    Args:
        opened: opens the reference, if it is needed.
        ranks: that share the work.
        writes: whether this rank writes the file of its node.
        identity: differs between references; empty for the model as it is before training.
        begun: whether that is trained by now.
    """

    opened: Callable[[], AbstractContextManager[Engine]]
    ranks: Ranks
    writes: bool
    identity: str = ""
    begun: bool = False

    def attach_all(self, job: Job) -> None:
        """Give the batches of a job the reference's log-probabilities, from files if these are there and the run goes
        on.

        Raises:
            UserError: the run has begun, and a file is missing, damaged, or of other data.
        """
        lacking = []
        for name, batches in (("reference", job.batches), ("reference-held-out", job.held_out)):
            if isinstance(batches, ItemBatches):
                steps = job.steps if batches is job.batches else batches.steps_per_epoch
                path = job.output / RUN / f"{name}.npz"
                if not self._found(batches, steps, path):
                    lacking.append((batches, steps, path))
        if lacking:
            with self.opened() as engine:
                for batches, steps, path in lacking:
                    batches.reference = self._computed(engine, batches, job.settings.batch_size, steps, path)

    def _found(self, batches: ItemBatches, steps: int, path: Path) -> bool:
        """Take the log-probabilities from the file, if all ranks have it; return whether they do."""
        found = self._read(path, batches, steps) if self.begun or self.identity else None
        have = self.ranks.sum([float(found is not None)])[0] == self.ranks.world_size
        if self.begun and not have:
            raise UserError(
                f"{path} is missing, damaged or of fewer steps: it had the log-probabilities of the data under the "
                "model before training, which is trained by now. Begin anew with --overwrite, or train adapters "
                "(--lora-rank), whose reference is the model without them."
            )
        batches.reference = found if have else None
        return have

    @torch.no_grad()
    def _computed(self, engine: Engine, batches: ItemBatches, items: int, steps: int, path: Path) -> np.ndarray:
        table = np.full(batches.row_count(steps), np.nan, dtype=np.float32)
        number = batches.steps_of_new_rows(steps)
        with activity("computing the reference") as doing:
            for step in range(number):
                doing.what = f"computing the reference: batch {step + 1:,} of {number:,}"
                table[batches.row_numbers(step)] = self._rows(engine, batches.batch(step), items)
        if self.writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            with file_when_complete(path) as out:
                np.savez(out, values=table, digest=np.array(batches.digest + self.identity))
        return table

    def _rows(self, engine: Engine, batch: Batch, items: int) -> np.ndarray:
        """Return the log-probability of each row's targets, fp32 ``[R]``, of all ranks' rows."""
        rows, ranks = len(batch["input_ids"]), self.ranks
        places = {"places": torch.arange(rows)}
        part, _ = ranks.part({name: batch[name] for name in ("input_ids", "labels", "position_ids")} | places, items)
        own = part.pop("places")
        named: dict[str, Any] = dict(part)
        out = engine.tokens(**named)
        sums = torch.zeros(rows)
        sums[own] = (out["log_probs"] * out.mask).sum(1)
        return np.array(ranks.sum(sums.tolist()), dtype=np.float32)

    def _read(self, path: Path, batches: ItemBatches, steps: int) -> np.ndarray | None:
        """Return what is in the file, if it has all rows of so many steps of these data."""
        try:
            with np.load(path) as content:
                values, digest = content["values"], str(content["digest"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None
        if digest != batches.digest + self.identity or len(values) < batches.row_count(steps):
            return None
        needed = [values[batches.row_numbers(step)] for step in range(batches.steps_of_new_rows(steps))]
        return None if any(np.isnan(one).any() for one in needed) else values
