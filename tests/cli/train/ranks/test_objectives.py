"""``finetune --nodes --ssd`` with an objective: two ranks share what one machine computes."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Finetune, alone_and_on_two_ranks
from tests.helpers.command.histories import losses, metrics

PLACE = ("--gpu", "cpu", "--host-memory", "2GiB", "--dtype", "fp32", "--schedule", "constant", "--lr", "1e-3")


PAIRS = [
    {
        "prompt": f"{i} plus {i} is",
        "chosen": f" surely {2 * i}.",
        "rejected": f" maybe {i * i + 1}, who knows.",
    }
    for i in range(9)
]
TEXTS = [{"text": f"{i} and {i * i} are numbers", "label": ("odd", "even", "odder")[i % 3]} for i in range(9)]


def held_out(output: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (output / "run" / "metrics.jsonl").read_text().splitlines())
    seen = [{name: line[name] for name in line if name.startswith("validation_metrics/")} for line in lines]
    return [
        {name: line[name] for name in line if "per_second" not in name and "tps" not in name}
        for line in seen
        if line
    ]


@pytest.mark.parametrize(
    ("objective", "records", "options"),
    [("dpo", PAIRS, ("--lora-rank", "2")), ("reward", PAIRS, ()), ("classify", TEXTS, ())],
)
@pytest.mark.slow
def test_losses_of_all_ranks_are_one_loss(
    objective: str, records: list[dict[str, str]], options: tuple[str, ...], checkpoint: Path, finetune: Finetune,
    tmp_path: Path,
) -> None:  # fmt: skip
    """With an ``eps`` next to which rounding is no step of Adam's."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    common = (
        "--model",
        checkpoint,
        "--data",
        file,
        "--eval-data",
        file,
        "--objective",
        objective,
        *options,
        *PLACE,
    )
    common = (
        *common,
        "--eps",
        "1e-4",
        "--batch-size",
        "4",
        "--steps",
        "3",
        "--micro-batch",
        "1",
        "--seq-len",
        "64",
    )
    outputs = alone_and_on_two_ranks(finetune, common, tmp_path)
    alone, ranks = map(losses, outputs)
    assert len(alone) == 3 and ranks == pytest.approx(alone, rel=1e-5)
    expected, found = map(metrics, outputs)
    assert {"rewards/margins", "accuracy"} & expected.keys()
    for name in (
        name for name in expected if name.startswith(("rewards", "logps", "accuracy", "margin", "mean"))
    ):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    lines, others = map(held_out, outputs)
    assert others == [pytest.approx(line, rel=1e-4, abs=1e-5) for line in lines] and others
