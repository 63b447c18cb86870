"""Training state and commits: what each step does to the parameters, and what ``--resume`` starts from."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from common.errors import FinetuneError, UserError
from common.store import Extent, Store, commit_manifest
from common.store.checksums import ChecksummedExtent, PartSums
from fuyou.layout.record import FROZEN_FILE, SLOTS, Precision, weights_file
from fuyou.layout.record_parts import ADAMW, ADAMW_8BIT
from fuyou.layout.record_sums import RecordSums
from fuyou.layout.share import Share
from fuyou.optimizer.absent_gradients import MissedUpdates
from fuyou.optimizer.adam import Update
from fuyou.runtime.ranks import Agreement, host, rank_name
from fuyou.schedule.tasks import Op, Task, known

FORMAT = 4  # Version of the files in a store; raised whenever their meaning changes


@dataclass
class TrainingState:
    """Everything that ``--resume`` needs to continue bit for bit, and to detect that it cannot."""

    step: int  # Last completed step; 0 before the first
    slot: int  # Slot that holds every record as it was after that step
    store: str  # Identity of the store that this state belongs to
    model: str  # Fingerprint of the records: names, shapes, layout
    dtype: str
    optimizer_dtype: str  # Dtype of moments
    optimizer: str = ADAMW  # Name of the optimizer
    random: dict[str, str] = field(default_factory=dict)  # States of the random generators, base64, by device
    user: dict[str, Any] = field(default_factory=dict)  # The caller's data
    # Loss, gradient norm, and the like of the last step, for a loop that was killed before it noted them.
    report: dict[str, Any] = field(default_factory=dict)
    clipped: int = 0  # Steps up to this one whose gradients were clipped
    # Number of steps up to this one in which a parameter (by name) had no gradient; 0 for those not listed. Each of
    # several ranks knows it for the parameters that it updates a part of.
    missed: dict[str, int] = field(default_factory=dict)
    # Checksums of everything in `slot`, as dictionaries of :class:`common.store.store.ChecksummedExtent`.
    checksums: list[dict[str, Any]] = field(default_factory=list)
    piece_bytes: int | None = None  # Most bytes of a piece of a block; None: blocks are whole
    # Sequences of the newest step's batch, tokens of each, and how many sequences were computed at once: sums are
    # rounded in that order. Empty before the first step.
    micro_batch: list[int] = field(default_factory=list)
    base: str = ""  # Identity of the weights that training began with; empty if that is not known
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "TrainingState":
        """Rebuild a state from JSON.

        Raises:
            UserError: if the state was written by a version with another format, or for what this one cannot do.
        """
        if content.get("format") != FORMAT:
            raise UserError(
                f"This run was written in format {content.get('format')}; this version reads format {FORMAT}. "
                "Finish it with the version that began it."
            )
        for name, usual, what in (
            ("experts", None, "trains selected experts"),
            ("slots", SLOTS, "keeps a single slot"),
            ("skipped", 0, "skipped steps that were not finite"),
        ):
            if content.get(name, usual) != usual:
                raise UserError(
                    f"This run {what}, as earlier versions could. Finish it with the version that began it."
                )
        # Earlier versions wrote more fields. The manifest has a checksum, but may have been edited and sealed again.
        values = {item.name: content[item.name] for item in fields(TrainingState) if item.name in content}
        for name, is_valid in _VALID.items():
            if name in values and not is_valid(values[name]):
                raise _edited(f"{name} = {values[name]!r:.80}")
        try:
            return TrainingState(**values)
        except TypeError as error:
            raise _edited("no complete state") from error


def _edited(what: str) -> FinetuneError:
    return FinetuneError(
        f"The run's manifest has {what}, which this program does not write: it was edited. Take a copy of the run, or "
        "begin again with --overwrite."
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _maps_to(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_valid, value.values()))


def _lists(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


_VALID: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "slot": lambda value: _is_count(value) and value < SLOTS,
    **dict.fromkeys(("store", "model", "dtype", "optimizer_dtype", "optimizer", "base"), _is_text),
    "random": _maps_to(_is_text),
    "user": lambda value: isinstance(value, dict),
    "report": _maps_to(_is_number),
    "clipped": _is_count,
    "missed": _maps_to(_is_count),
    "checksums": _lists(lambda value: isinstance(value, dict)),
    "piece_bytes": lambda value: value is None or (_is_count(value) and value > 0),
    "micro_batch": _lists(_is_count),
}
"""Whether a value of a field is one that this program writes."""


def random_states(device: torch.device) -> dict[str, str]:
    """Return the states of the random generators that computation on ``device`` draws from, base64."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def restore_random_states(states: dict[str, str], device: torch.device) -> None:
    """Set the random generators to what :func:`random_states` returned."""
    for name, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(state)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(state, device)


def checked_user_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state`` as a resumed run will find it.

    Raises:
        UserError: it is no dictionary, or holds what JSON cannot carry.
    """
    try:
        copied = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"user_state cannot be committed: {error}. Keep strings, finite numbers and lists in it."
        ) from error
    if not isinstance(state, dict) or copied != state:
        raise UserError(
            f"user_state would come back different, as {copied!r}: it must be a dictionary, and JSON turns tuples into "
            "lists and keys into strings."
        )
    return copied


# Key in a manifest under which a run of several ranks says which of them the store belongs to
CLUSTER = "cluster"


class Commits:
    """The committed state of a store, and the steps on their way to it.

    Among several ranks, a step counts once the manifest of every rank lists it. Later writes overwrite the commit
    before it, and wait until *all* ranks have committed it. So the newest step of any two ranks differ by one commit
    at most, and ranks that are ahead still have the previous one, whole, in the other slot; its manifest describes
    both. On resume all ranks take the newest step that all of them have.

    Args:
        state: what the store holds (or will hold when it is filled).
        run: random name of the run, equal on every rank.
        checksum: returns a checksum of the parameters that this rank stores, as they are after a step.
    """

    def __init__(
        self,
        store: Store,
        state: TrainingState,
        sums: RecordSums,
        missed: MissedUpdates,
        agreement: Agreement,
        run: str,
        checksum: Callable[[int], int],
    ):
        self.state = state
        self.sums = sums
        self.missed = missed
        self.committed_step = state.step
        self.clipped_steps = state.clipped
        self._store = store
        self._agreement = agreement
        self._run = run
        self._checksum = checksum
        self._previous: TrainingState | None = None  # The commit before, of several ranks
        self._updates: dict[int, Update] = {}
        self._states: dict[int, TrainingState] = {}  # Of ended steps that are not committed
        self._submitted: list[Task] = []

    def begin(self, update: Update) -> None:
        """Note that a step starts, with its update; the clipping coefficient is still to come."""
        self._updates[update.step] = update

    def scale_gradients(self, step: int, factor: float) -> None:
        """Clip ``step``: its updates multiply gradients by ``factor`` from now on."""
        self.clipped_steps += 1
        self._updates[step] = replace(self._updates[step], gradient_scale=factor)

    def end(
        self,
        step: int,
        device: torch.device,
        user: dict[str, Any],
        report: dict[str, Any],
        micro_batch: Sequence[int] = (),
    ) -> None:
        """Note, when the caller ends ``step``, the state that its commit will write.

        Args:
            device: where the model computes, whose random state is kept.
            report: :attr:`TrainingState.report`.
        """
        self._states[step] = replace(
            self.state,
            step=step,
            clipped=self.clipped_steps,
            random=random_states(device),
            user=dict(user),
            report=report,
            micro_batch=list(micro_batch),
        )
        self._updates.pop(step - 2, None)

    def update_of(self, step: int) -> Update:
        """Return what ``step`` does to a record. Call it right before that is done, after all earlier commits."""
        return self._updates[step]

    def commit(self, task: Task) -> None:
        """Make a step durable that is written completely, then make it count."""
        alone = self._agreement.is_alone
        slot = known(task.target)
        if not alone:
            self._compare(task.step)
            self._previous = self.state
        self._store.sync([weights_file(slot)])
        # Updates of later steps wait for this commit: none of them is counted yet.
        self.state = replace(self._states[task.step], slot=slot, missed=self.missed.counts())
        self.seal()
        if not alone:
            self._agreement.all_gather_at_commit(task.step)
        self.committed_step = task.step
        for old in [step for step in list(self._states) if step <= task.step]:
            # The caller adds to it meanwhile
            del self._states[old]

    def seal(self) -> None:
        """Commit the state together with the checksums of its slot."""
        self.state.checksums = [record.to_dict() for record in self.sums.sealed(self.state.slot)]
        self.write_manifest()

    def write_manifest(self) -> None:
        """Write the state to the manifest, durably and atomically."""
        content = self.state.to_dict()
        if not self._agreement.is_alone:
            previous = None if self._previous is None else self._previous.to_dict()
            content[CLUSTER] = cluster_content(self._run, self._agreement.share, previous)
        commit_manifest(self._store.directories[0], content)

    def submitted(self, tasks: Sequence[Task]) -> None:
        """Note the commits among ``tasks``, which the executor has been given."""
        self._submitted = [task for task in self._submitted if not task.done]
        self._submitted += [task for task in tasks if task.op is Op.COMMIT]

    def unfinished(self, before: int) -> list[Task]:
        """Return the unfinished commits of steps before ``before`` that the executor has been given."""
        return [task for task in self._submitted if task.step < before and not task.done]

    def _compare(self, step: int) -> None:
        """Check that all nodes, which hold copies of the same parameters, hold the same after ``step``."""
        share = self._agreement.share
        checksums: list[tuple[str, int]] = self._agreement.all_gather_at_commit(
            (host(), self._checksum(step))
        )
        for rank, (name, checksum) in enumerate(checksums):
            first = rank % share.ranks_per_node  # the rank in the same place of node 0
            if checksum != checksums[first][1]:
                raise FinetuneError(
                    f"After step {step}, {rank_name(share, rank, name)} and "
                    f"{rank_name(share, first, checksums[first][0])} hold different parameters (their checksums "
                    "differ): memory or network of one of them has failed. "
                    f"The step is not committed; step {self.committed_step} is, on all nodes."
                )


def cluster_content(run: str, share: Share, previous: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a rank's manifest says of the others, as JSON.

    Args:
        run: random name of the run.
        previous: the committed state before; None if that is not whole any more.
    """
    return {
        "run": run,
        "nodes": share.nodes,
        "ranks_per_node": share.ranks_per_node,
        "rank": share.rank,
        "previous": previous,
    }


def stored_sums(
    store: Store, state: TrainingState, ends: Mapping[Extent, Sequence[int]]
) -> dict[Extent, PartSums]:
    """Return the checksums of everything in a committed state, with which all that is read will be compared.

    Args:
        ends: end of each part of every extent, in bytes.

    Raises:
        FinetuneError: the manifest lists other parts.
    """
    sums = {entry.extent: entry.sums for entry in sealed_records(store, state)}
    for extent, listed in sums.items():
        if len(listed) != len(ends[extent]):
            raise _edited(f"{len(listed)} checksums of {len(ends[extent])} parts of a record")
    return sums


def sealed_records(store: Store, state: TrainingState) -> list[ChecksummedExtent]:
    """Return the checksums of a committed state.

    Raises:
        FinetuneError: if they do not cover everything in this store.
    """
    there = {
        extent for file in (weights_file(state.slot), FROZEN_FILE) for extent in store.layout.extents(file)
    }
    try:
        sealed = [ChecksummedExtent.from_dict(record) for record in state.checksums]
        listed = {record.extent for record in sealed if record.sums.shape[1] == len(store.directories)}
    except (TypeError, ValueError, KeyError):
        sealed = []
        listed = set()
    if listed != there or len(sealed) != len(there):
        raise FinetuneError(
            f"The manifest in {store.directories[0]} lists checksums of {len(listed & there)} of the {len(there)} "
            f"parts of records that the store holds, and {len(sealed) - len(listed & there)} others: this program did "
            "not write it so. Begin again with --overwrite, or from a copy."
        )
    return sealed


def state_of(store: Store, content: dict[str, Any]) -> TrainingState:
    """Return the state that a manifest's ``content`` describes; a FinetuneError if it is another store's."""
    state = TrainingState.from_dict(content)
    if state.store != store.id:
        raise FinetuneError(
            f"The manifest in {store.directories[0]} belongs to another store: copy back what was there, all files of "
            "one time."
        )
    return state


def check_state(store: Store, content: dict[str, Any] | None, expected: TrainingState) -> TrainingState:
    """Return the state that a manifest's ``content`` describes, if it can be continued as ``expected``.

    Raises:
        UserError: if the store holds nothing that can be continued as ``expected``.
        FinetuneError: if its state is damaged.
    """
    directory = store.directories[0]
    if content is None:
        raise UserError(
            f"The run in {directory} ended before its weights were written, or has moved: name the drives that it has "
            "moved to with --ssd, or begin it again with --overwrite."
        )
    state = state_of(store, content)
    moment_dtypes = {name: str(Precision(torch.float32, name).moment_dtype) for name in (ADAMW, ADAMW_8BIT)}
    if moment_dtypes.get(state.optimizer) != state.optimizer_dtype:
        raise UserError(
            f"The run in {directory} keeps moments of {state.optimizer} in {state.optimizer_dtype}, as an earlier "
            "version did: finish it with the version that began it, or --overwrite it."
        )
    for field_name, option in (
        # The model's fingerprint comes last: dtypes are a part of it.
        ("dtype", "--dtype"),
        ("optimizer", "--optimizer"),
        ("model", "--model, --frozen-dtype, or other adapters"),
    ):
        if getattr(state, field_name) != getattr(expected, field_name):
            raise UserError(
                f"The run to continue was made with another {option} ({getattr(state, field_name)}, now "
                f"{getattr(expected, field_name)}). Give what it was made with, or --overwrite it."
            )
    if state.base and expected.base and state.base != expected.base:
        raise UserError(
            f"The weights or the configuration of --model are not those that the run in {directory} began with: they "
            "have changed, or are another version of them. Give --model as it was then, or --overwrite the run."
        )
    return state
