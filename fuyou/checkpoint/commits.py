"""Which step counts: what each update is, when a step has become durable, what ``resume`` starts from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from common.errors import FinetuneError, UserError
from common.store import Store, StoreError, commit_manifest, load_manifest
from common.store.verify import Sealed, verify
from fuyou.checkpoint.state import TrainingState, random_states
from fuyou.layout.checksums import RecordSums
from fuyou.layout.record import FROZEN_FILE, weights_file
from fuyou.optimizer.absent_gradients import MissedUpdates
from fuyou.optimizer.adam import Update
from fuyou.optimizer.clipping import ClipStatistics
from fuyou.schedule.tasks import Op, Task, known

CLUSTER = "cluster"
"""Key of what a manifest says beside the state where several ranks have made it together."""


class Commits:
    """The committed state of a store, and the steps on their way to it.

    Args:
        store: the training store, open.
        state: what the store holds (or will hold when it is filled).
        single_slot: whether updates overwrite the only copy.
        sums: of everything that has been written, which becomes a part of what is committed.
        missed: in how many steps parameters had no gradient, likewise.
    """

    def __init__(
        self, store: Store, state: TrainingState, single_slot: bool, sums: RecordSums, missed: MissedUpdates
    ):  # fmt: skip
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
        """A step starts; its update is known but for the clipping coefficient."""
        self._updates[update.step] = update

    def scale_gradients(self, step: int, factor: float) -> None:
        """``step`` is clipped: its updates multiply gradients by ``factor`` from now on."""
        self.clipped_steps += 1
        self._updates[step] = replace(self._updates[step], gradient_scale=factor)

    def leave_out(self, step: int) -> None:
        """The updates of ``step``, all of them still to come, change nothing."""
        self._updates[step] = replace(self._updates[step], left_out=True)

    def clip_statistics(self, steps: int) -> ClipStatistics:
        """How often clipping has struck in the run's first ``steps``, which have all ended."""
        return ClipStatistics(self.clipped_steps, steps)

    def end(self, step: int, skipped: int, device: torch.device, user: dict[str, Any]) -> None:
        """The caller has ended ``step``, and left out so many up to it: note what its commit will say."""
        self._states[step] = replace(
            self.state, step=step, clipped=self.clipped_steps, skipped=skipped, random=random_states(device),
            user=dict(user), torn=False,
        )  # fmt: skip
        self._updates.pop(step - 2, None)

    def update_of(self, step: int) -> Update:
        """What ``step`` does to a record; asked for right before it is done, after all earlier commits."""
        if self._single_slot and not self.state.torn:
            self.state.torn = True  # from here on the only copy is a mixture, until the step is committed
            self.write_manifest()
        return self._updates[step]

    def commit(self, task: Task) -> None:
        """Everything of the step is written: make it durable, then make it count."""
        self._make_durable(task)
        self.committed_step = task.step
        for old in [step for step in list(self._states) if step <= task.step]:  # the caller adds to it meanwhile
            del self._states[old]

    def _make_durable(self, task: Task) -> None:
        """Sync what is written, then say so in the manifest."""
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
        """Make the state durable; atomic."""
        commit_manifest(self._store.directories[0], self._content())

    def _content(self) -> dict[str, Any]:
        """Of the manifest."""
        return self.state.to_dict()

    def submitted(self, tasks: Sequence[Task]) -> None:
        """Note the commits among tasks that the executor has been given."""
        self._submitted = [task for task in self._submitted if not task.done]
        self._submitted += [task for task in tasks if task.op is Op.COMMIT]

    def under_way(self, before: int) -> list[Task]:
        """Commits of steps before ``before`` that the executor has been given and has not finished."""
        return [task for task in self._submitted if task.step < before and not task.done]


def check_records(store: Store, state: TrainingState) -> None:
    """Read all records of a committed state, and compare them with its checksums.

    Raises:
        StoreError: names what is damaged, and where.
    """
    _, damage = verify(store, sealed_records(store, state))
    if damage:
        raise StoreError(
            f"The run in {store.directories[0]} is damaged and cannot be continued. {' '.join(damage[:3])}"
            f"{f' And {len(damage) - 3} more (see --verify).' if len(damage) > 3 else ''} Look at the drive's health "
            "(smartctl, dmesg), then begin again with --overwrite."
        )


def sealed_records(store: Store, state: TrainingState) -> list[Sealed]:
    """The checksums of a state.

    Raises:
        FinetuneError: they are not of this store.
    """
    there = {extent for file in (weights_file(state.slot), FROZEN_FILE) for extent in store.layout.extents(file)}
    try:
        sealed = [Sealed.from_dict(one) for one in state.checksums]
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
    """The committed state of an existing store.

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
    """The state that a manifest's ``content`` describes, if it can be continued as ``wanted``.

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
    if state.emulated:
        raise UserError(
            f"The run in {place} was made on an emulated device: its weights are meaningless. Begin again with "
            "--overwrite."
        )
    if state.torn:
        raise FinetuneError(
            f"This run keeps a single slot and was interrupted in the middle of step {state.step + 1}: its state "
            "is a mixture of two steps. Begin again with --overwrite (and without --single-slot)."
        )
    for field_name, option in (
        # The model's fingerprint comes last: dtypes are a part of it.
        ("dtype", "--dtype"), ("optimizer_dtype", "--optimizer-dtype"), ("slots", "--single-slot"),
        ("model", "--model"),
    ):  # fmt: skip
        if getattr(state, field_name) != getattr(wanted, field_name):
            raise UserError(
                f"The run to continue was made with another {option} ({getattr(state, field_name)}, now "
                f"{getattr(wanted, field_name)}). Give what it was made with, or --overwrite it."
            )
    return state
