"""Another model that passes over the data before training, forward only: a teacher, or a reference of its own.

It is streamed as the trained model is, by an engine of its own with all the memory, from a store that is removed when
the pass is over. The run itself starts afterwards, and reads from a file what was found.
"""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cli.job.consulted import identity_of
from cli.job.job import Job
from cli.options.settings import RUN
from cli.train.objectives import Ranks
from cli.train.reference import ReferencePass
from cli.train.row_table import RowTable, Shapes
from common.activity import activity
from common.models.adapters.options import AdapterOptions
from common.store import remove
from fcdp.strategy.topology import Topology
from fuyou import Engine
from fuyou.checkpoint.run_files import rank_folder
from fuyou.config import OPTION_NAMES
from fuyou.objectives.distillation import TEACHER, teacher_head

_SUFFIX = "-consulted"
"""End of the name of the store's folder."""
_OPTIONS = ("io", "device_memory", "host_memory", "dtype", "prove")
"""Options of the run that its engine has, too."""


@dataclass(frozen=True)
class Consultation:
    """A pass of the other model over the data.

    Args:
        job: the run.
        ranks: that share the work.
        topology: of these ranks; None: there is one.
    """

    job: Job
    ranks: Ranks
    topology: Topology | None = None

    @property
    def _is_first(self) -> bool:
        """Whether this rank writes what its node has one of."""
        return self.topology is None or self.topology.local_rank == 0

    def run(self) -> RowTable | None:
        """Let the model pass over what it has not seen yet; return what a teacher has found.

        Raises:
            UserError: the model does not fit this machine.
        """
        settings = self.job.settings
        if settings.consulted is None:
            return None
        self._remove_stores()  # of a pass that was killed
        if settings.traits.needs_teacher:
            return self._teach()
        reference = ReferencePass(self._opened, self.ranks, self._is_first, identity_of(settings.consulted[1]))
        reference.attach_all(self.job)
        return None

    # -- a teacher --------------------------------------------------------------------------------------------------

    def _teach(self) -> RowTable:
        job, settings = self.job, self.job.settings
        folder, rows = job.output / RUN / "teacher", job.batches.row_count(job.steps)
        shapes = teacher_shapes(job)
        assert settings.teacher is not None
        known = job.data_key, job.seq_len, job.settings.seed, settings.teacher_temperature, settings.dtype
        identity = hashlib.sha256(repr((*known, identity_of(settings.teacher))).encode()).hexdigest()[:16]
        if self._is_first:
            RowTable.create(folder, shapes, rows, identity)
        self.ranks.sum([0.0])  # a barrier
        table = RowTable(folder, shapes, rows)
        steps = range(job.batches.steps_of_new_rows(job.steps))
        lacking = np.array([not table.has(self._own(job.batches.row_numbers(step))) for step in steps], dtype=float)
        todo = [step for step, ranks in zip(steps, self.ranks.sum(lacking.tolist()), strict=True) if ranks]
        if todo:
            with self._opened() as engine, activity("asking the teacher") as doing:
                for number, step in enumerate(todo):
                    doing.what = f"asking the teacher: batch {number + 1:,} of {len(todo):,}"
                    self._ask(engine, table, step)
        return table

    @torch.no_grad()
    def _ask(self, engine: Engine, table: RowTable, step: int) -> None:
        settings, batches = self.job.settings, self.job.batches
        rows = torch.from_numpy(batches.row_numbers(step))
        part, _ = self.ranks.part({**batches.batch(step), "rows": rows}, settings.batch_size)
        rows = part.pop("rows")
        named: dict[str, Any] = dict(part)
        head = teacher_head(settings.teacher_tokens, settings.teacher_temperature)
        out = engine.tokens(**named, outputs=(), head=head)
        table.put(rows.numpy(), {name: out[name].numpy() for name in TEACHER})

    def _own(self, rows: np.ndarray) -> np.ndarray:
        """Return this rank's rows of a batch."""
        part, _ = self.ranks.part({"rows": torch.from_numpy(rows)}, self.job.settings.batch_size)
        return np.asarray(part["rows"])

    # -- its engine -------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[Engine]:
        """Open the other model, frozen, and remove its store behind it."""
        settings, ranks = self.job.settings, self.ranks.world_size
        assert settings.consulted is not None
        drives = self._folders
        for folder in drives:
            folder.mkdir(exist_ok=True)
        words = settings.named(OPTION_NAMES)
        with (
            activity(f"writing the weights of {settings.consulted[1]}"),
            Engine(
                settings.consulted[1],
                ssd=drives,
                run_name=self._name,
                overwrite=True,
                device=self.job.device if self.topology is None else self.topology.device,
                topology=self.topology,
                adapters=AdapterOptions(1),  # which freeze the weights, and are off
                batch_shape=(-(-self.job.rows // ranks), self.job.seq_len),
                token_outputs=2 * settings.teacher_tokens if settings.traits.needs_teacher else 1,
                packed=self.job.batches.packed,
                **{name: words[name] for name in _OPTIONS},
            ) as engine,
            engine.disable_adapters(),
        ):
            yield engine
        self._remove_stores()

    @property
    def _folders(self) -> list[Path]:
        return [path / f"{self.job.run_name}{_SUFFIX}" for path in self.job.ssd]

    @property
    def _name(self) -> str:
        return "store" if self.topology is None else rank_folder(self.topology.local_rank)

    def _remove_stores(self) -> None:
        """Remove the stores of all of this node's ranks, which may have been more in a pass that was killed."""
        self.ranks.sum([0.0])  # all have closed theirs
        if self._is_first:
            for folder in filter(Path.is_dir, self._folders):
                remove(folder.iterdir())
                shutil.rmtree(folder, ignore_errors=True)
        self.ranks.sum([0.0])  # nobody opens one before they are gone


def teacher_shapes(job: Job) -> Shapes:
    """Return what each row of the data has of the teacher."""
    shape = job.seq_len, min(job.settings.teacher_tokens, job.vocab_size)
    return {"teacher_ids": (shape, "i4"), "teacher_log_probs": (shape, "f4")}
