"""The objectives of ``--objective``, one entry each: what computes the loss, and what it needs of data and model."""

from dataclasses import dataclass
from enum import Enum, auto


class Items(Enum):
    """What an objective learns from."""

    TOKENS = auto()  # Rows of tokens
    PAIRS = auto()  # Pairs of answers
    TEXTS = auto()  # Texts with a class


@dataclass(frozen=True)
class ObjectiveTraits:
    """An objective, described without importing what computes it."""

    learns: str  # What it learns, as the rest of a sentence that begins with its name
    data: str  # Columns that it needs
    text: str  # The same for the help of ``--objective``
    loss: str | None = None
    """Module and class of the :class:`~fuyou.objectives.losses.Objective`, whose arguments are :attr:`options`.
    None: the engine's own loss."""
    options: tuple[str, ...] = ()  # Options that are for some objectives only, and that it reads
    items: Items = Items.TOKENS
    outputs: int = 0  # Numbers that the head returns for each token; 0: the loss is the engine's own
    rows: int = 1  # Rows of a batch for each of ``--batch-size``
    counts: str = ""  # What ``--batch-size`` counts, if it is not rows
    needs_reference: bool = False  # Whether it compares with the model as the run found it
    classifies: bool = False  # Whether its model is a sequence classifier

    @property
    def compares(self) -> bool:
        """Whether its loss compares answers, where dropout is noise and TRL turns it off."""
        return self.items is Items.PAIRS


_PAIRS = "learns from pairs of answers", "prompt, chosen and rejected"

OBJECTIVES = {
    "sft": ObjectiveTraits(
        "learns the next token", "text", "the next token, of answers where there are prompts"
    ),
    "pretrain": ObjectiveTraits("learns the next token of all text", "text", "of prompts as well"),
    "dpo": ObjectiveTraits(
        *_PAIRS,
        "prefer one answer to another (columns prompt, chosen, rejected)",
        loss="fuyou.objectives.losses.PairObjective",
        options=("beta",),
        items=Items.PAIRS,
        outputs=1,
        rows=2,
        counts="pairs",
        needs_reference=True,
    ),
    "reward": ObjectiveTraits(
        *_PAIRS,
        "score answers, from pairs",
        loss="fuyou.objectives.losses.RewardObjective",
        items=Items.PAIRS,
        outputs=1,
        rows=2,
        counts="pairs",
        classifies=True,
    ),
    "classify": ObjectiveTraits(
        "learns classes of texts",
        "text and label",
        "classes of texts (text, label)",
        loss="fuyou.objectives.losses.ClassObjective",
        items=Items.TEXTS,
        outputs=2,
        classifies=True,
    ),
}
"""Objectives by name."""

HELP = "; ".join(f"{name}: {traits.text}" for name, traits in OBJECTIVES.items())
