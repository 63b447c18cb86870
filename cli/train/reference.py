"""The reference of a preference run: log-probabilities under the model as the run found it, written to a file."""

import zipfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cli.job.job import Job
from cli.options.settings import RUN
from cli.train.objectives import Batch, Ranks
from common.activity import activity
from common.data.batches import ItemBatches
from common.data.rows import PADDING
from common.errors import UserError
from common.files import file_when_complete
from fuyou import Engine


@dataclass(frozen=True)
class ReferencePass:
    """One forward pass over the data before the first step: a number for each row.

    As ``precompute_ref_log_probs`` of TRL: nothing of the reference is computed, read or kept in training.

    Args:
        engine: of the run.
        ranks: that share the work.
        writes: whether this rank writes the file of its node.
    """

    engine: Engine
    ranks: Ranks
    writes: bool

    def attach_all(self, job: Job) -> None:
        """Give the batches of a job the reference's log-probabilities: from files once the model has been trained.

        Raises:
            UserError: if a step has been committed, and a file is missing, damaged, or of other data.
        """
        lacking = []
        for name, batches in (("reference", job.batches), ("reference-held-out", job.held_out)):
            if isinstance(batches, ItemBatches):
                steps = job.steps if batches is job.batches else batches.steps_per_epoch
                path = job.output / RUN / f"{name}.npz"
                batches.reference = self._read_on_all_ranks(batches, steps, path)
                if batches.reference is None:
                    lacking.append((batches, steps, path))
        if not lacking:
            return
        # Once trained, a model is no longer its reference; without new adapters, which began as no change, it still is.
        begun = self.engine.step_count > 0
        if begun and job.settings.lora_rank is None:
            raise UserError(
                f"{lacking[0][2]} is missing, damaged or of fewer steps: it had the log-probabilities of the data "
                "under the model before training, which is trained by now. Begin a new run with --overwrite."
            )
        with self.engine.disable_adapters() if begun else nullcontext():
            for batches, steps, path in lacking:
                batches.reference = self._computed(batches, job.settings.batch_size, steps, path)

    def _read_on_all_ranks(self, batches: ItemBatches, steps: int, path: Path) -> np.ndarray | None:
        values = self._read(path, batches, steps) if self.engine.step_count else None
        all_have = self.ranks.sum([float(values is not None)])[0] == self.ranks.world_size
        return values if all_have else None

    @torch.no_grad()
    def _computed(self, batches: ItemBatches, items: int, steps: int, path: Path) -> np.ndarray:
        table = np.full(batches.row_count(steps), np.nan, dtype=np.float32)
        number = batches.steps_of_new_rows(steps)
        with activity("computing the reference") as doing:
            for step in range(number):
                doing.what = f"computing the reference: batch {step + 1:,} of {number:,}"
                table[batches.row_numbers(step)] = self._rows(batches.batch(step), items)
        if self.writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            with file_when_complete(path) as out:
                np.savez(out, values=table, digest=np.array(batches.digest))
        return table

    def _rows(self, batch: Batch, items: int) -> np.ndarray:
        """Return the log-probability of each row's targets, fp32 ``[R]``, of all ranks' rows."""
        rows, ranks = len(batch["input_ids"]), self.ranks
        places = {"places": torch.arange(rows)}
        named = {name: batch[name] for name in ("input_ids", "labels", "position_ids", PADDING)}
        part, _ = ranks.part(named | places, items)
        own = part.pop("places")
        numbers: dict[str, Any] = dict(part)
        out = self.engine.tokens(**numbers)
        sums = torch.zeros(rows)
        sums[own] = (out["log_probs"] * out.mask).sum(1)
        return np.array(ranks.sum(sums.tolist()), dtype=np.float32)

    def _read(self, path: Path, batches: ItemBatches, steps: int) -> np.ndarray | None:
        try:
            with np.load(path) as content:
                values, digest = content["values"], str(content["digest"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None
        if digest != batches.digest or len(values) < batches.row_count(steps):
            return None
        needed = [values[batches.row_numbers(step)] for step in range(batches.steps_of_new_rows(steps))]
        return None if any(np.isnan(row).any() for row in needed) else values
