"""What a committed step is, beside its records: the content of the manifest."""

import base64
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from common.errors import FinetuneError, UserError

#: Raised whenever the meaning of files in a store changes.
FORMAT = 3


@dataclass
class TrainingState:
    """Everything that ``--resume`` needs to go on bit for bit, and to notice that it would not."""

    step: int
    """Last completed step; 0 before the first."""
    slot: int
    """Slot that holds every record as it was after that step."""
    store: str
    """Identity of the store that this state belongs to."""
    model: str
    """Fingerprint of the records: names, shapes, layout."""
    dtype: str
    optimizer_dtype: str
    slots: int
    random: dict[str, str] = field(default_factory=dict)
    """States of the random generators, base64, by device."""
    user: dict[str, Any] = field(default_factory=dict)
    """Whatever the caller keeps with it."""
    emulated: bool = False
    """Made on an emulated device: there is nothing to continue."""
    clipped: int = 0
    """Steps up to this one whose gradients were clipped."""
    skipped: int = 0
    """Steps up to this one whose updates were left out, because their gradients were not finite."""
    missed: dict[str, int] = field(default_factory=dict)
    """By the name of a parameter, in how many steps up to this one it had no gradient; 0 for those not listed. Of
    several ranks, each knows it of those that it updates a part of."""
    torn: bool = False
    """Only with one slot: a step was begun over this state and has not been committed."""
    checksums: list[dict[str, Any]] = field(default_factory=list)
    """Of everything in ``slot``, as :class:`common.store.verify.ChecksummedExtent` says it."""
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "TrainingState":
        """Rebuild.

        Raises:
            UserError: the state was written by a version with another format.
            FinetuneError: it is of this format, and makes no sense.
        """
        if content.get("format") != FORMAT:
            raise UserError(
                f"This run was written in format {content.get('format')}; this version reads format {FORMAT}. "
                "Finish it with the version that began it."
            )
        try:
            state = TrainingState(**content)
            good = all(isinstance(value, type_of) for value, type_of in (
                (state.step, int), (state.slot, int), (state.slots, int), (state.random, dict), (state.user, dict),
                (state.checksums, list), (state.clipped, int), (state.skipped, int), (state.torn, bool),
                (state.emulated, bool), (state.missed, dict),
            )) and 0 <= state.slot < state.slots <= 2 and 0 <= state.skipped <= state.step  # fmt: skip
        except TypeError:
            good = False
        if not good:
            raise FinetuneError(
                "The manifest is intact and says what no version of this program writes: was it edited? Begin again "
                "with --overwrite."
            )
        return state


def random_states(device: torch.device) -> dict[str, str]:
    """States of the generators that computation on ``device`` draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def restore_random_states(states: dict[str, str], device: torch.device) -> None:
    """Undo :func:`random_states`."""
    for name, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(state)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
