"""The state of training beside its records, as the manifest of every committed step has it."""

import base64
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from common.errors import FinetuneError, UserError
from fuyou.layout.optimizer_state import ADAMW

FORMAT = 3  # Version of the files in a store; raised whenever their meaning changes


@dataclass
class TrainingState:
    """Everything that ``--resume`` needs to go on bit for bit, and to notice that it would not."""

    step: int  # Last completed step; 0 before the first
    slot: int  # Slot that holds every record as it was after that step
    store: str  # Identity of the store that this state belongs to
    model: str  # Fingerprint of the records: names, shapes, layout
    dtype: str
    optimizer_dtype: str
    slots: int
    optimizer: str = ADAMW  # Name of the optimizer
    random: dict[str, str] = field(default_factory=dict)  # States of the random generators, base64, by device
    user: dict[str, Any] = field(default_factory=dict)  # Whatever the caller keeps with the state
    clipped: int = 0  # Steps up to this one whose gradients were clipped
    skipped: int = 0  # Steps up to this one that were skipped, because their gradients were not finite
    # Number of steps up to this one in which a parameter (by name) had no gradient; 0 for those not listed. Each of
    # several ranks knows it for the parameters that it updates a part of.
    missed: dict[str, int] = field(default_factory=dict)
    # Whether a later step has begun to overwrite this state and is not committed; only with a single slot.
    torn: bool = False
    # Checksums of everything in `slot`, as dictionaries of :class:`common.store.verify.ChecksummedExtent`.
    checksums: list[dict[str, Any]] = field(default_factory=list)
    piece_bytes: int | None = None  # Most bytes of a piece of a block; None: blocks are whole
    # Sequences of the newest step's batch, tokens of each, and how many sequences were computed at once: sums are
    # rounded in that order. Empty before the first step.
    micro_batch: list[int] = field(default_factory=list)
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "TrainingState":
        """Rebuild a state from JSON.

        Raises:
            UserError: the state was written by a version with another format.
            FinetuneError: it is of this format, and makes no sense.
        """
        if content.get("format") != FORMAT:
            raise UserError(
                f"This run was written in format {content.get('format')}; this version reads format {FORMAT}. "
                "Finish it with the version that began it."
            )
        # Of earlier versions, which could train selected experts, and time accelerators that were not there.
        if content.get("emulated"):
            raise UserError("This run was made on an emulated device, so it trained nothing: begin with --overwrite.")
        if content.get("experts") is not None:
            raise UserError(
                "This run trains selected experts (--train-experts), and this version trains adapters of them instead "
                "(--lora-rank). Finish it with the version that began it."
            )
        try:
            state = TrainingState(
                **{name: value for name, value in content.items() if name not in ("experts", "emulated")}
            )
            integers = (state.step, state.slot, state.slots, state.clipped, state.skipped)
            good = (
                all(isinstance(value, int) for value in integers)
                and isinstance(state.torn, bool)
                and all(isinstance(value, dict) for value in (state.random, state.user, state.missed))
                and all(isinstance(value, list) for value in (state.checksums, state.micro_batch))
                and 0 <= state.slot < state.slots <= 2
                and 0 <= state.skipped <= state.step
            )
        except TypeError:
            good = False
        if not good:
            raise FinetuneError(
                "The manifest is intact and says what no version of this program writes: was it edited? Begin again "
                "with --overwrite."
            )
        return state


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
