"""The objectives of ``--objective``: what each reads, and what it asks of data, model and memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ObjectiveTraits:
    """What is known about an objective without importing what computes it."""

    learns: str
    """What it learns, as the rest of a sentence that begins with its name."""
    data: str
    """Columns that it needs."""
    options: frozenset[str] = frozenset()
    """Options that are for some objectives alone, and that it reads."""
    outputs: int = 1
    """Numbers that the head makes for each token; 0: the loss is the engine's own."""
    rows: int = 1
    """Rows of a batch for each of ``--batch-size``."""
    counts: str = ""
    """What ``--batch-size`` counts, if it is not rows."""
    needs_reference: bool = False
    """Whether it compares with the model as it was."""
    classifies: bool = False
    """Whether its model is a sequence classifier."""
    beta: float = 0.1
    """Default of ``--beta``."""
    needs_teacher: bool = False
    """Whether it learns from another model's distributions."""


_PAIRS = "learns from pairs of answers", "prompt, chosen and rejected"

OBJECTIVES = {
    "sft": ObjectiveTraits("learns the next token", "text", outputs=0),
    "pretrain": ObjectiveTraits("learns the next token of all text", "text", outputs=0),
    "dpo": ObjectiveTraits(*_PAIRS, frozenset({"beta", "reference"}), rows=2, counts="pairs", needs_reference=True),
    "kto": ObjectiveTraits(
        "learns from answers that are known to be desirable or not",
        "prompt, completion and label",
        frozenset({"beta", "desirable_weight", "undesirable_weight", "reference"}),
        rows=2,
        counts="answers",
        needs_reference=True,
    ),
    "reward": ObjectiveTraits(*_PAIRS, frozenset({"center_rewards"}), rows=2, counts="pairs", classifies=True),
    "classify": ObjectiveTraits("learns classes of texts", "text and label", outputs=2, classifies=True),
    "distil": ObjectiveTraits(
        "learns a teacher's distributions over the next token",
        "text",
        frozenset({"teacher", "teacher_tokens", "teacher_temperature", "distil_alpha", "beta"}),
        outputs=2,
        beta=0.0,
        needs_teacher=True,
    ),
}
"""Objectives by name."""

SPECIFIC = frozenset().union(*(traits.options for traits in OBJECTIVES.values()))
"""Options that are for some objectives alone."""


def readers(option: str) -> list[str]:
    """Return the names of the objectives that read an option."""
    return [name for name, traits in OBJECTIVES.items() if option in traits.options]
