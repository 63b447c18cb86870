"""Commits: what each step does to the parameters, when it has become durable, what ``--resume`` starts from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from common.errors import FinetuneError, UserError
from common.store import Store, StoreError, commit_manifest, load_manifest
from common.store.verify import ChecksummedExtent, verify
from fuyou.checkpoint.state import TrainingState, random_states
from fuyou.layout.checksums import RecordSums
from fuyou.layout.record import FROZEN_FILE, weights_file
from fuyou.optimizer.absent_gradients import MissedUpdates
from fuyou.optimizer.adam import Update
from fuyou.optimizer.clipping import ClipStatistics
from fuyou.schedule.tasks import Op, Task, known

CLUSTER = "cluster"  # Key in a manifest under which a run of several ranks says which of them the store belongs to


class Commits:
    """The committed state of a store, and the steps on their way to it.

    Args:
        store: the training store, open.
        state: what the store holds (or will hold when it is filled).
        single_slot: whether updates overwrite the only copy.
        sums: checksums of everything that has been written; they are committed, too.
        missed: in how many steps each parameter had no gradient; committed, too.
    """

    def __init__(self, store: Store, state: TrainingState, single_slot: bool, sums: RecordSums, missed: MissedUpdates):
        self.state = state
        self.sums, self.missed = sums, missed
        self.committed_step = state.step
        self.clipped_steps = state.clipped
        self._store = store
        self._single_slot = single_slot
        self._updates: dict[int, Update] = {}
        self._states: dict[int, TrainingState] = {}
        self._submitted: list[Task] = []

    def begin(self, update: Update) -> None:
        """Note that a step starts, with its update; the clipping coefficient is still to come."""
        self._updates[update.step] = update

    def scale_gradients(self, step: int, factor: float) -> None:
        """Clip ``step``: its updates multiply gradients by ``factor`` from now on."""
        self.clipped_steps += 1
        self._updates[step] = replace(self._updates[step], gradient_scale=factor)

    def skip_step(self, step: int) -> None:
        """Let the updates of ``step``, all of which are still to come, change nothing."""
        self._updates[step] = replace(self._updates[step], skip=True)

    def clip_statistics(self, steps: int) -> ClipStatistics:
        """Return how many of the run's first ``steps``, all of which have ended, were clipped."""
        return ClipStatistics(self.clipped_steps, steps)

    def end(
        self, step: int, skipped: int, device: torch.device, user: dict[str, Any], micro_batch: Sequence[int] = ()
    ) -> None:
        """Note, when the caller ends ``step``, the state that its commit will write.

        Args:
            step: its number.
            skipped: steps up to this one that were skipped.
            device: where the model computes, whose random state is kept.
            user: whatever the caller keeps with the state.
            micro_batch: :attr:`TrainingState.micro_batch`.
        """
        self._states[step] = replace(
            self.state,
            step=step,
            clipped=self.clipped_steps,
            skipped=skipped,
            random=random_states(device),
            user=dict(user),
            micro_batch=list(micro_batch),
            torn=False,
        )
        self._updates.pop(step - 2, None)

    def update_of(self, step: int) -> Update:
        """Return what ``step`` does to a record. Call it right before that is done, after all earlier commits."""
        if self._single_slot and not self.state.torn:
            self.state.torn = True  # from here on the only copy is a mixture, until the step is committed
            self.write_manifest()
        return self._updates[step]

    def commit(self, task: Task) -> None:
        """Make a step durable that is written completely, then make it count."""
        self._make_durable(task)
        self.committed_step = task.step
        for old in [step for step in list(self._states) if step <= task.step]:  # the caller adds to it meanwhile
            del self._states[old]

    def _make_durable(self, task: Task) -> None:
        slot = known(task.target)
        self._store.sync([weights_file(slot)])
        # Updates of later steps wait for this commit: none of them is counted yet.
        self.state = replace(self._states[task.step], slot=slot, missed=self.missed.counts())
        self.seal()

    def seal(self) -> None:
        """Commit the state together with the checksums of its slot."""
        self.state.checksums = [one.to_dict() for one in self.sums.sealed(self.state.slot)]
        self.write_manifest()

    def write_manifest(self) -> None:
        """Write the state to the manifest, durably and atomically."""
        commit_manifest(self._store.directories[0], self._content())

    def _content(self) -> dict[str, Any]:
        return self.state.to_dict()

    def submitted(self, tasks: Sequence[Task]) -> None:
        """Note the commits among ``tasks``, which the executor has been given."""
        self._submitted = [task for task in self._submitted if not task.done]
        self._submitted += [task for task in tasks if task.op is Op.COMMIT]

    def under_way(self, before: int) -> list[Task]:
        """Return the unfinished commits of steps before ``before`` that the executor has been given."""
        return [task for task in self._submitted if task.step < before and not task.done]


def check_records(store: Store, state: TrainingState) -> None:
    """Read all records of a committed state, and compare them with its checksums.

    Raises:
        StoreError: some are damaged; the message names them and the drive.
    """
    _, damage = verify(store, sealed_records(store, state))
    if damage:
        raise StoreError(
            f"The run in {store.directories[0]} is damaged and cannot be continued. {' '.join(damage[:3])}"
            f"{f' And {len(damage) - 3} more (see --verify).' if len(damage) > 3 else ''} Look at the drive's health "
            "(smartctl, dmesg), then begin again with --overwrite."
        )


def sealed_records(store: Store, state: TrainingState) -> list[ChecksummedExtent]:
    """Return the checksums of a committed state.

    Raises:
        FinetuneError: they are not those of everything in this store.
    """
    there = {extent for file in (weights_file(state.slot), FROZEN_FILE) for extent in store.layout.extents(file)}
    try:
        sealed = [ChecksummedExtent.from_dict(one) for one in state.checksums]
        listed = {one.extent for one in sealed if len(one.sums) == len(store.directories)}
    except (TypeError, ValueError, KeyError):
        sealed, listed = [], set()
    if listed != there or len(sealed) != len(there):
        raise FinetuneError(
            f"The manifest in {store.directories[0]} lists checksums of {len(listed & there)} of the {len(there)} "
            f"parts of records that the store holds, and {len(sealed) - len(listed & there)} others: this program did "
            "not write it so. Begin again with --overwrite, or from a copy."
        )
    return sealed


def load_state(store: Store, wanted: TrainingState) -> TrainingState:
    """Return the committed state of an existing store.

    Raises:
        UserError: the store holds nothing that could be continued as ``wanted``.
        FinetuneError: its state is damaged.
    """
    content = load_manifest(store.directories[0])
    if content is not None and CLUSTER in content:
        raise UserError(
            f"The run in {store.directories[0]} was made by several ranks ({content[CLUSTER]['nodes']} nodes with "
            f"{content[CLUSTER]['ranks_per_node']} each): continue it with as many, or --overwrite it."
        )
    return check_state(store, content, wanted)


def check_state(store: Store, content: dict[str, Any] | None, wanted: TrainingState) -> TrainingState:
    """Return the state that a manifest's ``content`` describes, if it can be continued as ``wanted``.

    Raises:
        UserError, FinetuneError: as :func:`load_state`.
    """
    place = store.directories[0]
    if content is None:
        raise UserError(
            f"The run in {place} was ended before its weights were written. Begin it again with --overwrite."
        )
    state = TrainingState.from_dict(content)
    if state.store != store.id:
        raise FinetuneError(f"The manifest in {place} belongs to another store.")
    if state.torn:
        raise FinetuneError(
            f"This run keeps a single slot and was interrupted in the middle of step {state.step + 1}: its state "
            "is a mixture of two steps. Begin again with --overwrite (and without --single-slot)."
        )
    for field_name, option in (
        # The model's fingerprint comes last: dtypes are a part of it.
        ("dtype", "--dtype"),
        ("optimizer", "--optimizer"),
        ("optimizer_dtype", "--optimizer-dtype"),
        ("slots", "--single-slot"),
        ("model", "--model"),
    ):
        if getattr(state, field_name) != getattr(wanted, field_name):
            raise UserError(
                f"The run to continue was made with another {option} ({getattr(state, field_name)}, now "
                f"{getattr(wanted, field_name)}). Give what it was made with, or --overwrite it."
            )
    return state
