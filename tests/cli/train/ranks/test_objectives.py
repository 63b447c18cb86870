"""``finetune --nodes --ssd`` with an objective: two ranks share what one machine computes."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Finetune, alone_and_on_two_ranks

PLACE = ("--gpu", "cpu", "--host-memory", "2GiB", "--dtype", "fp32", "--schedule", "constant", "--lr", "1e-3")


PAIRS = [
    {"prompt": f"{i} plus {i} is", "chosen": f" surely {2 * i}.", "rejected": f" maybe {i * i + 1}, who knows."}
    for i in range(9)
]
TEXTS = [{"text": f"{i} and {i * i} are numbers", "label": ("odd", "even", "odder")[i % 3]} for i in range(9)]


def held_out(output: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (output / "run" / "metrics.jsonl").read_text().splitlines())
    seen = [{name: line[name] for name in line if name.startswith("validation_metrics/")} for line in lines]
    return [
        {name: line[name] for name in line if "per_second" not in name and "tps" not in name} for line in seen if line
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
    common = ("--model", checkpoint, "--data", file, "--eval-data", file, "--objective", objective, *options, *PLACE)
    common = (*common, "--eps", "1e-4", "--batch-size", "4", "--steps", "3", "--micro-batch", "1", "--seq-len", "64")
    outputs = alone_and_on_two_ranks(finetune, common, tmp_path)
    alone, ranks = (json.loads((output / "run/summary.json").read_text()) for output in outputs)
    assert len(alone["losses"]) == 3 and ranks["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert alone["watched"].keys() == ranks["watched"].keys()
    for name, values in alone["watched"].items():
        assert ranks["watched"][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    expected, found = map(held_out, outputs)
    assert found == [pytest.approx(line, rel=1e-4, abs=1e-5) for line in expected] and found
