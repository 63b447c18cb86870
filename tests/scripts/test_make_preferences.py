"""The run of docs/objectives.md, in small: pairs of docstrings, learned from."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from cli.main import main

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_preferences.py"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_preferences", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_pairs_are_the_same_sentence_twice_and_can_be_learned_from(maker: ModuleType, tmp_path: Path) -> None:
    maker.main(tmp_path)
    pairs, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("pairs", "held-out")
    )
    assert len(pairs) > 1000 and len(held_out) > 200
    assert not {pair["prompt"] + pair["chosen"] for pair in pairs} & {
        pair["prompt"] + pair["chosen"] for pair in held_out
    }
    for pair in pairs + held_out:
        (good, rest), (bad, same) = (pair[side].split(" ", 1) for side in ("chosen", "rejected"))
        assert rest == same and bad == maker.third_person(good) != good
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(pair) + "\n" for pair in pairs[:40]))
    words = [
        "--model",
        tmp_path / "checkpoint",
        "--data",
        few,
        "--objective",
        "dpo",
        "--lora-rank",
        "4",
        "--gpu",
        "cpu",
    ]
    words += ["--host-memory", "500MiB", "--batch-size", "8", "--steps", "4", "--seq-len", "64", "--lr", "5e-3"]
    words += ["--output", tmp_path / "out", "--report", tmp_path / "report.json", "--schedule", "constant", "--no-save"]
    assert main([str(word) for word in words]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["losses"][-1] < report["losses"][0] == 0.6931471824645996
    assert report["watched"]["rewards/accuracies"][-1] > 0.5
