"""Data and adapters for trainers of TRL."""

from typing import Any

import datasets
from peft import LoraConfig

from tests.helpers.rounding import fp32_sum_rounding

ANSWER_TOKENS = 32  # Tokens of the longest answer, at most


def records(kind: str) -> datasets.Dataset:
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i} plus {i} is", "chosen": f" surely {2 * i}.", "rejected": f" maybe {i * i + 1}, no."}
        for i in range(20)
    ]
    if kind.startswith("sft"):
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    if kind == "kto":
        sides = ("chosen", "rejected")
        rows = [
            {"prompt": row["prompt"], "completion": row[sides[i % 2]], "label": i % 2 == 0}
            for i, row in enumerate(rows)
        ]
    return datasets.Dataset.from_list(rows)


def adapters() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def decided_by_rounding(logged: dict[str, float], beta: float = 0.3) -> set[str]:
    """Return the names of logged figures that are ties but for rounding.

    Before the first step the policy is the reference: then a margin is ``beta`` times the difference of four equal sums
    of log-probabilities, and its sign decides which answer is preferred.
    """
    if "rewards/margins" not in logged:
        return set()
    largest = max(abs(logged["logps/chosen"]), abs(logged["logps/rejected"]))
    tie = 4 * beta * fp32_sum_rounding(largest, ANSWER_TOKENS)
    return {"rewards/accuracies"} if abs(logged["rewards/margins"]) <= tie else set()
