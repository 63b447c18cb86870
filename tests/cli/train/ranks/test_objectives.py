"""``finetune --nodes --ssd`` with an objective: two ranks share what one machine computes."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Finetune, alone_and_on_two_ranks

PLACE = ("--gpu", "cpu", "--host-memory", "2GiB", "--dtype", "fp32", "--schedule", "constant", "--lr", "1e-3")


@pytest.mark.slow
def test_two_ranks_learn_what_one_machine_learns(checkpoint: Path, finetune: Finetune, tmp_path: Path) -> None:
    """KTO with a reference that was computed before training, whose distance is that of all ranks' answers."""
    answers = [
        {"prompt": f"{i} plus {i} is", "completion": f" surely {2 * i + i % 3}.", "label": i % 3 == 0} for i in range(9)
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in answers))
    common = ("--model", checkpoint, "--data", file, "--eval-data", file, "--objective", "kto", *PLACE)
    common = (*common, "--batch-size", "4", "--steps", "3", "--micro-batch", "2", "--seq-len", "64")
    reports = []
    for output in alone_and_on_two_ranks(finetune, common, tmp_path):
        lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
        held_out = [
            {key: value for key, value in json.loads(line).items() if key.startswith("validation_metrics/")}
            for line in lines
        ]
        reports.append((json.loads(output.with_suffix(".json").read_text()), [one for one in held_out if one]))
    (alone, alone_held_out), (ranks, ranks_held_out) = reports
    assert ranks["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for name, values in alone["watched"].items():
        assert ranks["watched"][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    for mine, theirs in zip(ranks_held_out, alone_held_out, strict=True):
        for name, value in theirs.items():
            if "per_second" not in name and "tps" not in name:
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


PAIRS = [
    {"prompt": f"{i} plus {i} is", "chosen": f" surely {2 * i}.", "rejected": f" maybe {i * i + 1}, who knows."}
    for i in range(9)
]
TEXTS = [{"text": f"{i} and {i * i} are numbers", "label": ("odd", "even", "odder")[i % 3]} for i in range(9)]


@pytest.mark.parametrize(
    ("objective", "records", "options"),
    [("dpo", PAIRS, ()), ("dpo", PAIRS, ("--lora-rank", "2")), ("reward", PAIRS, ()), ("classify", TEXTS, ())],
)
@pytest.mark.slow
def test_losses_of_all_ranks_are_one_loss(
    objective: str, records: list[dict[str, str]], options: tuple[str, ...], checkpoint: Path, finetune: Finetune,
    tmp_path: Path,
) -> None:  # fmt: skip
    """With an ``eps`` next to which rounding is no step of Adam's."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    common = ("--model", checkpoint, "--data", file, "--objective", objective, *options, *PLACE, "--eps", "1e-4")
    common = (*common, "--batch-size", "4", "--steps", "3", "--micro-batch", "1", "--seq-len", "64")
    alone, ranks = (
        json.loads(output.with_suffix(".json").read_text())
        for output in alone_and_on_two_ranks(finetune, common, tmp_path)
    )
    assert len(alone["losses"]) == 3 and ranks["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert alone["watched"].keys() == ranks["watched"].keys()
    for name, values in alone["watched"].items():
        assert ranks["watched"][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
