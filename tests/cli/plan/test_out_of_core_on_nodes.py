"""``finetune --plan --nodes`` for hardware with SSDs: bytes by the formulas, and a network that can be the bound."""

import json
from typing import Any

import pytest

from cli.main import main
from common.units import format_count, format_seconds

COMMAND = (
    "--plan", "--model", "gpt2-350m", "--gpu", "4090", "--drive", "samsung-980-pro-1tb", "--ssds", "1",
    "--host-memory", "6GiB", "--host-cache", "0", "--batch-size", "16", "--seq-len", "256", "--micro-batch", "1",
)  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*COMMAND, *words, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_bytes_and_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    alone = plan(capsys)
    for nodes, ranks in ((2, 1), (4, 2)):
        words = ("--nodes", str(nodes), "--gpus-per-node", str(ranks))
        fast = plan(capsys, *words, "--network", "100Gbit/s")
        assert (fast["nodes"], fast["ranks_per_node"], fast["batch_size"]) == (nodes, ranks, 16)
        parameters = fast["parameters"]
        written = (2 + 10 / nodes) / ranks * parameters
        assert fast["ssd_written_bytes_per_step"] == pytest.approx(written, rel=0.02)
        assert fast["network_sent_bytes_per_step"] == pytest.approx(
            4 * parameters * (nodes - 1) / (nodes * ranks), rel=0.02
        )
        assert fast["step_seconds"] < alone["step_seconds"]
        slow = plan(capsys, *words, "--network", "1Gbit/s")
        assert slow["bound"] == "inter_node"
        sent = slow["network_sent_bytes_per_step"] * ranks  # of a node
        assert slow["step_seconds"] >= 0.99 * sent / 125e6
        assert slow["gpu_bound_tokens"] > fast["gpu_bound_tokens"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_says_that_one_node_is_faster(capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    node = ("--gpus-per-node", str(ranks))
    alone = plan(capsys, *(("--nodes", "1", *node) if ranks > 1 else ()))
    slow = ("--nodes", "2", *node, "--network", "100Mbit/s")
    several = plan(capsys, *slow)
    (other,) = several["alternatives"]
    assert other["tokens_per_second"] == pytest.approx(alone["tokens_per_second"])
    assert other["tokens_per_second"] > several["tokens_per_second"]
    assert main([*COMMAND, *slow]) == 0
    rates = [f"{format_count(each['tokens_per_second'])} tokens/s" for each in (alone, several)]
    steps = [format_seconds(each["step_seconds"]) for each in (alone, several)]
    how = "no --nodes" if ranks == 1 else "--nodes 1 --gpus-per-node 2"
    assert (
        f"one node is faster: {rates[0]}, {steps[0]} per step instead of {rates[1]} and {steps[1]}, bound by the "
        f"network ({how})"
    ) in " ".join(capsys.readouterr().out.split())


def test_does_not_say_that_where_several_nodes_are_faster(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, "--nodes", "2", "--network", "100Gbit/s")["alternatives"] == []


@pytest.mark.parametrize(("words", "message"), [
    ((), "--network 25Gbit/s"),
    (("--network", "fast"), "--network fast is not a rate"),
    (("--network", "10Gbit/s", "--strategy", "zero3"), "--strategy is for training in memory"),
])  # fmt: skip
def test_mistakes(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--nodes", "2", *words]) == 2
    assert message in capsys.readouterr().err
