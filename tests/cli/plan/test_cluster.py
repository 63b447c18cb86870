"""``finetune --plan`` for clusters: what it prints, as a table and as JSON, and what it refuses."""

import json
import re

import pytest

from cli.main import main
from common.models.presets import load_config
from common.units import format_seconds
from fcdp.planner import Workload, estimate, load_cluster
from fcdp.strategy.mesh import Levels
from fcdp.strategy.strategy import PRESETS, parse_strategy
from tests.helpers.processes.pairs import with_data

A800 = ["--plan", "--cluster", "a800-hdr", "--model", "llama-7b"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_what_is_promised_and_is_what_the_planner_says(capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(capsys, *A800, "--nodes", "128", "--gpus-per-node", "8")
    promised = {
        "name", "p", "g", "os", "cache", "device_bytes", "host_bytes", "inter_node_bytes_per_step",
        "intra_node_bytes_per_step", "step_seconds", "fits",
    }  # fmt: skip
    assert all(promised <= strategy.keys() for strategy in result["strategies"])
    assert result["choice"] in result["strategies"]
    assert result["choice"]["fits"]
    by_name = {strategy["name"]: strategy for strategy in result["strategies"]}
    assert {
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "mics",
        "zero++",
        "fcdp",
        "paro-iig",
        "amsp-7b",
    } <= by_name.keys()
    workload = Workload.of_model(load_config("llama-7b")[0], seq_len=1024)
    cluster = load_cluster("a800-hdr")
    for name in ("zero3", "fcdp", "4x1/4x1/I"):
        layout = parse_strategy(name).on(Levels((8, 128)))
        expected = estimate(layout, workload, cluster, checkpointing=by_name[name]["checkpointing"])
        assert by_name[name] == json.loads(json.dumps(expected.as_dict()))
    assert by_name["zero3"]["p"] == [8, 128]


def test_table_has_the_fastest_strategies_all_names_and_the_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*A800, "--nodes", "2", "--batch-size", "64", "--seq-len", "2048", "--lora-rank", "16"]
    result = planned(capsys, *words)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "4 micro-batches of 1 x 2048 tokens" in out
    fitting = [strategy["name"] for strategy in result["strategies"] if strategy["fits"]]
    shown = [name for rank, name in enumerate(fitting) if rank < 20 or name in PRESETS]
    assert [
        line.split()[0] for line in out.split("strategy ")[1].split("\n\n")[0].splitlines()[1:-1]
    ] == shown
    assert f"\nand {len(fitting) - len(shown)} more without a name, which --json lists\n" in out
    assert f"choice: {result['choice']['name']}, " in out
    zero3 = next(strategy for strategy in result["strategies"] if strategy["name"] == "zero3")
    gain = zero3["step_seconds"] / result["choice"]["step_seconds"]
    assert f"  {gain:.2f} times as fast as zero3, plain FSDP2" in out


def test_a_single_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*A800, "--nodes", "128", "--gpus-per-node", "8"]) == 0
    assert "; 1 micro-batch of 1 x 1024 tokens" in capsys.readouterr().out


def test_order_of_nodes_under_leaf_switches(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    preset = (
        "name = 'x'\ndevice_memory = '80GB'\nhost_memory = '1TB'\nbf16_tflops = 300\nreached = 0.5\n"
        "memory_gb_per_s = 2000\nhost_link_gb_per_s = 25\nstart_us = 8\nleaf_of_node = [0, 1, 0, 1]\n"
        "[[level]]\nsize = 8\ngb_per_s = 200\nlatency_us = 3\n"
        "[[level]]\nsize = 4\ngb_per_s_per_node = 100\nlatency_us = 10\n"
    )
    (tmp_path / "mine.toml").write_text(preset)
    words = [
        "--plan",
        "--cluster",
        str(tmp_path / "mine.toml"),
        "--model",
        "llama-7b",
        "--strategy",
        "8x1/8x1/8x2",
    ]
    assert planned(capsys, *words)["node_order"] == [0, 2, 1, 3]
    assert main(words) == 0
    assert "2 of 2 groups of 2 stay under one leaf switch: 0 2 1 3" in capsys.readouterr().out


@pytest.mark.parametrize("size", [["--nodes", "2"], ["--levels", "2,2,2"]])
def test_says_that_one_node_is_faster(capsys: pytest.CaptureFixture[str], size: list[str]) -> None:
    words = ["--plan", "--cluster", "a40-1gbe", "--model", "gpt3-1.3b"]
    several = planned(capsys, *words, *size)
    assert main([*words, *size]) == 0
    said = re.search(
        r"^one node is faster: (\S+), (.*) per step instead of (.*) \((.*)\)$", capsys.readouterr().out, re.M
    )
    assert said is not None
    alone = planned(capsys, *words, *said[4].split())
    assert alone["choice"] == several["one_node"] and said[1] == alone["choice"]["name"]
    assert said[2] == format_seconds(alone["choice"]["step_seconds"])
    assert said[3] == format_seconds(several["choice"]["step_seconds"])
    assert alone["choice"]["step_seconds"] < several["choice"]["step_seconds"]


def test_does_not_say_that_where_several_nodes_are_faster(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*A800, "--nodes", "2", "--batch-size", "256"]
    assert planned(capsys, *words)["one_node"] is None
    assert main(words) == 0 and "one node" not in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    (["--plan", "--nodes", "2", "--model", "llama-7b"], "--cluster PRESET"),
    ([*A800, "--cluster", "a800"], "Did you mean 'a800-hdr'"),
    ([*A800, "--batch-size", "1000"], "not a multiple of 1024"),
    ([*A800, "--levels", "8,4", "--nodes", "8"], "--levels 8,4 has 4 where --nodes says 8"),
    ([*A800, "--strategy", "zero4"], "Did you mean 'zero"),
    (["--plan", "--cluster", "a40-edr", "--model", "llama-7b", "--gpus-per-node", "3"], "fastest level"),
    (["--model", "llama-10m", "--nodes", "1", "--gpus-per-node", "2", "--strategy", "GGN"], "sharded less finely"),
    (["--model", "llama-10m", "--nodes", "1", "--gpus-per-node", "3", "--strategy", "2x1/2x1/2x1"], "does not divide"),
    (["--model", "llama-10m", "--nodes", "1", "--gpus-per-node", "2", "--strategy", "zero-topo"], "there is no pair"),
    (["--model", "llama-10m", "--nodes", "1", "--gpus-per-node", "2", "--levels", "2,2,2"], "--levels 2,2,2 has 2"),
    (["--model", "llama-10m", "--levels", "2,2,2"], "add --nodes"),
    ([*A800, "--ssd", "/tmp"], "--ssd is for plans out of core"),
    ([*A800, "--trace", "x.json"], "--trace is for plans out of core"),
    ([*A800, "--host-memory", "64GiB"], "--host-memory is for plans out of core"),
])  # fmt: skip
def test_rejects_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(with_data(words)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_what_does_not_fit_has_the_same_status_as_on_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*A800, "--nodes", "1", "--model", "gpt3-805b"]) == 1
    assert "more nodes, or name a --strategy to try it" in capsys.readouterr().err
    assert main([*A800, "--nodes", "1", "--model", "gpt3-805b", "--strategy", "ddp"]) == 1
    err = capsys.readouterr().err
    assert "No strategy fits" in err and "or another --strategy." in err and "name a" not in err
