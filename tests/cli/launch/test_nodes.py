"""``finetune --nodes``: how nodes find each other, runs of several ranks, and what becomes of them when things fail.

Two launchers on loopback stand for two nodes. Starting ranks takes seconds, so a start serves several checks.
"""

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import cli.launch
from cli.launch import find_rendezvous, first_host
from cli.main import main
from cli.options.settings import Settings
from common.errors import UserError
from fcdp.checkpoint import ShardedCheckpoints
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import history, metrics
from tests.helpers.processes import forked
from tests.helpers.processes.pairs import COMMON, ROOT, UNMEASURED, Node, Pair, same, with_data

_ENDS_WITHIN = (
    "import sys, cli.train.process as one; one.STOP_SECONDS = {}; from cli.main import main; sys.exit(main())"
)
PATIENT = ("-c", _ENDS_WITHIN.format(200))
"""The command, which gives a step that is in progress time to end on the slowest machine."""
HURRIED = ("-c", _ENDS_WITHIN.format(2))
"""A launcher that has little time to end after SIGTERM."""


@pytest.fixture(scope="module")
def reference(
    checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    """Eight steps on one machine: the history, and the output."""
    output = tmp_path_factory.mktemp("reference") / "out"
    words = ["--model", checkpoint, "--data", data, *COMMON, "--eval-data", data, "--eval-every", 5, "--steps", 8,
             "--output", output]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    return history(output), output


def held_out(output: Path) -> list[tuple[int, float]]:
    """Steps and losses of all evaluations."""
    seen = [json.loads(line) for line in (output / "run/metrics.jsonl").read_text().splitlines()]
    return [
        (line["step"], line["validation_metrics/loss"]) for line in seen if "validation_metrics/loss" in line
    ]


@pytest.mark.slow
def test_two_ranks_train_as_the_engine_does_and_three_continue(
    finetune: Finetune,
    checkpoint: Path,
    data: Path,
    tmp_path: Path,
    reference: tuple[list[dict[str, Any]], Path],
) -> None:
    output = tmp_path / "out"
    command = (
        "--model",
        checkpoint,
        "--data",
        data,
        *COMMON,
        "--eval-data",
        data,
        "--output",
        output,
        "--nodes",
        1,
    )
    first = ("--gpus-per-node", 2, "--micro-batch", 1, "--steps", 5, "--no-save")
    done = finetune(*command, *first)
    assert done.status == 0, done.err
    assert re.search(
        r"^measuring (.*\n)+strategy \S+; the planner expects .* per step$", done.out, re.MULTILINE
    )
    assert "2 ranks on the CPU in fp32" in done.out and "step 5/5: loss " in done.out
    assert set(metrics(output)["network/sent(GiB)"]) == {0.0}
    phases = (" ...", " so far)")  # of which rank 0 says that they take long
    assert all(line.endswith(phases) for line in done.err.splitlines()), done.err
    again = finetune(*command, "--gpus-per-node", 2, "--steps", 8)
    assert again.status == 2 and "--resume to continue it" in again.err
    done = finetune(
        *command,
        "--gpus-per-node",
        3,
        "--steps",
        8,
        "--resume",
        "--save",
        "--strategy",
        "N/I/G",
        "--levels",
        "3,1",
    )
    assert done.status == 0, done.err
    assert "resume   after step 5 of 8" in done.out
    same(history(output), reference[0])
    assert held_out(output) == [
        (step, pytest.approx(loss, rel=1e-5)) for step, loss in held_out(reference[1])
    ]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path) for path in (output, reference[1]))
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=name)
    whole = finetune("--verify", output)
    assert whole.status == 0, whole.err
    assert re.search(r"commits: step 8, \d+ parts of tensors, .*: all as written$", whole.out, re.MULTILINE)
    file = next((output / "commits").glob("*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    damaged = finetune("--verify", output)
    assert damaged.status == 1 and f"bytes of {file}" not in damaged.out and str(file) in damaged.err
    files = {path.name for path in output.iterdir()} - {"commits", "data", "cluster.json"}
    assert files == {path.name for path in reference[1].iterdir()} - {"store"}


@pytest.mark.slow
def test_a_run_that_began_without_a_measured_cluster_continues_as_it_was(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    command = (
        "--model",
        checkpoint,
        "--data",
        data,
        *COMMON,
        "--output",
        tmp_path,
        "--nodes",
        1,
        "--gpus-per-node",
        2,
    )
    assert finetune(*command, *UNMEASURED, "--steps", 1, "--no-save").status == 0
    done = finetune(*command, "--steps", 2, "--no-save", "--resume")
    assert done.status == 0, done.err
    assert "measuring" not in done.out and not (tmp_path / "cluster.json").exists()


@pytest.mark.real_start  # of ranks: elsewhere here they are forked
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_adapters_are_trained_and_written(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    words = ("--model", checkpoint, "--data", data, *COMMON, "--output", output, "--nodes", 1, "--gpus-per-node", 2,
             "--steps", 2, "--lora-rank", 3, "--lora-targets", "q_proj", "down_proj")  # fmt: skip
    done = finetune(*words)
    assert done.status == 0, done.err
    adapters = 3 * 3 * (32 + 32 + 48 + 32)  # in each of three layers, rank 3 between inputs and outputs
    assert f"adapters LoRA of rank 3: {adapters / 1000:.1f} K parameters" in done.out
    assert f"saved    {output}, for PeftModel.from_pretrained" in done.out
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    tuned = PeftModel.from_pretrained(base, output).merge_and_unload()
    before = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    changed = {name for name, value in tuned.state_dict().items() if not torch.equal(value, before[name])}
    assert len(changed) == 6 and all("q_proj" in name or "down_proj" in name for name in changed)
    again = finetune(*words)
    assert again.status == 2 and "holds adapters already" in again.err


def test_a_killed_rank_a_restart_from_the_last_commit_and_ctrl_c(
    pair: Pair, checkpoint: Path, data: Path, tmp_path: Path, reference: tuple[list[dict[str, Any]], Path]
) -> None:
    output = tmp_path / "out"
    command = ("--model", checkpoint, "--data", data, *COMMON, *UNMEASURED, "--output", output)
    pair.start(*command, "--steps", 100_000, "--commit-every", 3)
    pair.wait_for(r"^step 5/")
    ranks = {number: process for node in pair.nodes for number, process in node.ranks().items()}
    assert sorted(ranks) == [0, 1]
    ranks[1].send_signal(signal.SIGKILL)
    pair.wait_for(r"^resume   after step \d+ of 100,000 \(restarted: a rank was lost\)")
    steps = r"^resume (.*\n)+?(step .*\n){9}"  # what takes long is reported in between
    pair.wait_for(steps)
    pair.nodes[1].process.send_signal(signal.SIGINT)
    assert pair.statuses(120) == [130, 130]
    said = "".join(node.said for node in pair.nodes)
    for noise in ("terminate called", "Traceback", "torch/distributed"):
        assert noise not in said
    after = [re.search(r"^stopped after step (\d+), which is committed. To continue: finetune .* --resume$", node.said,
                       re.MULTILINE) for node in pair.nodes]  # fmt: skip
    assert after[0] is not None and after[1] is not None and after[0][1] == after[1][1]
    got = history(output)
    assert len(got) == int(after[0][1])
    same(got[:8], reference[0])
    metrics = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    sent = max(one.get("network/sent(GiB)", 0.0) for one in metrics) * (1 << 20)
    assert sent > 100  # KiB: each node sends half of 51 K parameters and of as many gradients
    assert [path.name for path in (output / "commits").glob("step-*")] == [f"step-{after[0][1]}"]


def listener(endpoint: str) -> int:
    """The process in which nodes meet."""
    port = int(endpoint.rpartition(":")[2])
    (pid,) = {one.pid for one in psutil.net_connections("tcp")
              if one.status == psutil.CONN_LISTEN and one.laddr.port == port}  # fmt: skip
    return int(pid or 0)


def still_there(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended within some seconds."""
    _, alive = psutil.wait_procs(processes, timeout=60)
    return alive


def one_ends_by_its_deadline(pair: Pair, host: bool) -> Node:
    """One of two hurried nodes gets a signal to end in an endless step, and the other one ends with an error.

    Args:
        host: whether it is the one where they meet.

    Returns:
        The other one. No process is left of either.
    """
    family = [
        child for node in pair.nodes for child in psutil.Process(node.process.pid).children(recursive=True)
    ]
    meets = [node.process.pid for node in pair.nodes].index(listener(pair.endpoint))
    stays, leaves = pair.nodes[meets], pair.nodes[1 - meets]
    if host:
        stays, leaves = leaves, stays
    for rank in leaves.ranks().values():
        rank.suspend()
    leaves.process.terminate()
    assert leaves.process.wait(120) == 143  # of SIGTERM
    assert stays.process.wait(180) == 1
    assert not still_there(family)
    told = r"^stopped at once, after 2 s\. .*To continue: finetune .* --resume$"
    assert re.search(told, leaves.said, re.MULTILINE), leaves.said
    return stays


@pytest.mark.slow
def test_a_terminal_that_goes_away_and_a_node_that_ends_alone_by_its_deadline(
    pair: Pair, checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left: no rank, no folder of a launcher; and what was committed is whole."""
    output, temporary, master, terminal = tmp_path / "out", tmp_path / "tmp", *os.openpty()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    termios.tcsetwinsize(terminal, (24, 120))  # in none, no bar is drawn
    words = ["--model", checkpoint, "--data", data, *COMMON, *UNMEASURED, "--output", output, "--steps", 100_000,
             "--commit-every", 1]  # fmt: skip
    launcher = forked.Popen(
        [sys.executable, *PATIENT, *map(str, words), "--nodes", "1", "--gpus-per-node", "2"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True, own_terminal=True,
    )  # fmt: skip
    os.close(terminal)
    try:
        said = b""
        while not re.search(rb"step ([4-9]|\d{2,})/", said):  # the bar is not drawn at every step
            assert select.select([master], [], [], 240)[0], said.decode()
            said += os.read(master, 1 << 16)
        family = psutil.Process(launcher.pid).children(recursive=True)
        os.close(master)
        assert launcher.wait(240) == 129
    finally:
        launcher.kill()  # and with it, its ranks
    assert not still_there(family) and not list(temporary.iterdir())
    (commit,) = (output / "commits").glob("step-*")
    step = ShardedCheckpoints(output / "commits").newest()
    assert commit.name == f"step-{step}" and step is not None and len(history(output)) == step

    pair.start(*words, "--resume", "--node-timeout", 20, begin=HURRIED)
    pair.wait_for(f"^step {step + 3}/")
    stays = one_ends_by_its_deadline(pair, host=False)  # it would start again, and waits for the other one
    assert not list(temporary.iterdir())
    told = r"^finetune: error: Not all 2 nodes have come to .*To continue: finetune .* --resume$"
    assert re.search(told, stays.said, re.MULTILINE), stays.said
    checked = ShardedCheckpoints(output / "commits").verify()
    assert not checked.damage and checked.step > step


@pytest.mark.slow
def test_the_node_where_all_meet_ends_alone_by_its_deadline(
    pair: Pair, checkpoint: Path, data: Path, tmp_path: Path
) -> None:
    """The other one gives up, rather than wait for ever, and says how to continue."""
    output = tmp_path / "out"
    words = ["--model", checkpoint, "--data", data, *COMMON, *UNMEASURED, "--output", output, "--steps", 100_000,
             "--commit-every", 1, "--node-timeout", 20]  # fmt: skip
    pair.start(*words, begin=HURRIED)
    pair.wait_for("^step 3/")
    stays = one_ends_by_its_deadline(pair, host=True)
    gives_up = rf"^finetune: error: \S.*{re.escape(pair.endpoint)}.* To continue: finetune .* --resume$"
    assert re.search(gives_up, stays.said, re.MULTILINE), stays.said
    step = ShardedCheckpoints(output / "commits").newest()
    assert step is not None and step >= 2 and not ShardedCheckpoints(output / "commits").verify().damage


def refusal(
    pair: Pair, capfd: pytest.CaptureFixture[str], words: tuple[object, ...], *more: object, code: Path = ROOT
) -> str:
    """The one message with which two nodes end: a separate process, with the code in ``code``, and this one, with
    ``more`` words."""
    pair.start(*words, names=("first",), code=code)
    assert main(with_data([str(word) for word in (*words, *pair.meet, "--node-timeout", 120, *more)])) == 2
    assert pair.statuses(240) == [2]
    waiting = f"nodes    waiting for 2 of them at {pair.endpoint}"
    errors = []
    for said in ("".join(capfd.readouterr()), pair.nodes[0].said):
        *_, error = said.splitlines()
        assert waiting in said
        errors.append(error)
    assert errors[0] == errors[1]
    return errors[0]


def test_nodes_that_differ_are_reported(
    pair: Pair, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", checkpoint, *COMMON, "--steps", 2, "--output", tmp_path / "out")
    error = refusal(pair, capfd, words, "--eps", "1e-6")
    assert (
        error.startswith("finetune: error: Rank ")
        and ": The nodes were not started alike: --eps is 1e-0" in error
    )


@pytest.mark.slow
def test_nodes_with_different_code_are_reported(
    pair: Pair, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for package in ("cli", "common", "configs", "fcdp", "fuyou"):
        shutil.copytree(ROOT / package, tmp_path / "code" / package)
    with (tmp_path / "code" / "fcdp" / "traffic.py").open("a") as file:
        file.write("# a change that does nothing\n")
    words = ("--model", checkpoint, *COMMON, "--steps", 2, "--output", tmp_path / "out")
    error = refusal(pair, capfd, words, code=tmp_path / "code")
    assert ": The nodes were not started alike: finetune's code is " in error
    assert len(set(re.findall(r"(?:is|and) ([0-9a-f]{12}) on ", error))) == 2


def test_unequal_ranks_per_node_are_rejected(
    pair: Pair, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", checkpoint, *COMMON, "--steps", 2, "--output", tmp_path / "out", "--gpus-per-node", 1)
    error = refusal(pair, capfd, words, "--gpus-per-node", 2)
    assert "Every node needs the same number of ranks" in error


def test_a_node_that_never_comes(finetune: Finetune, checkpoint: Path, pair: Pair) -> None:
    command = (
        "--model",
        checkpoint,
        *COMMON,
        "--nodes",
        2,
        "--rdzv-endpoint",
        pair.endpoint,
        "--node-timeout",
        1,
    )
    outcome = finetune(*command)
    assert outcome.status == 1
    assert outcome.err.startswith(
        f"finetune: error: Not all 2 nodes have come to {pair.endpoint} within 1.0 s"
    )
    assert outcome.err.count("\n") == 1 and "To continue" not in outcome.err


@pytest.mark.slow
def test_ranks_that_torchrun_starts(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """The second run would overwrite the first, which every rank refuses as a launcher does."""
    words = [
        "--model",
        checkpoint,
        "--data",
        data,
        *COMMON,
        *UNMEASURED,
        "--output",
        tmp_path / "out",
        "--no-save",
    ]
    for ranks, nodes, status, message in (
        (2, 1, 0, "step 2/2: loss "), (2, 1, 1, "holds a run already"), (1, 2, 1, "give --nodes 1."),
    ):  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m",
                   "cli.main", *map(str, words), "--steps", "2", "--nodes", str(nodes)]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == status and message in done.stdout + done.stderr, done.stderr


def slurm(**more: str) -> dict[str, str]:
    step = {
        "STEP_NODELIST": "127.0.0.[1-2]", "STEP_NUM_NODES": "2", "STEP_NUM_TASKS": "2", "JOB_ID": "7", "STEP_ID": "1",
    }  # fmt: skip
    return {f"SLURM_{name}": value for name, value in (step | more).items()}


def test_nodes_under_one_leaf_switch_come_in_a_row(
    pair: Pair, checkpoint: Path, data: Path, tmp_path: Path, reference: tuple[list[dict[str, Any]], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    output = tmp_path / "out"
    words = ("--model", checkpoint, "--data", data, *COMMON, "--output", output, "--no-save", "--steps", 2)
    pair.meet = ("--nodes", 4, "--rdzv-endpoint", pair.endpoint)
    for number, leaf in enumerate(("red", "blue", "red", "blue")):
        monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.node")
        monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", f"{leaf}.node{number}")
        pair.start(*words, "--strategy", "switch/switch/cluster", names=(f"node{number}",))
    assert pair.statuses(240) == [0] * 4, [node.said for node in pair.nodes]
    same(history(output), reference[0][:2])
    assert any("4 nodes under 2 leaf switches" in node.said for node in pair.nodes)
    numbers = [re.search(r"this is node (\d) of 4", node.said) for node in pair.nodes]
    found = [1 if number is None else int(number[1]) for number in numbers]
    assert {(found[0] + 1) // 2, (found[2] + 1) // 2} != {(found[1] + 1) // 2, (found[3] + 1) // 2}
    assert sorted(found) == [1, 2, 3, 4] and abs(found[0] - found[2]) == abs(found[1] - found[3]) == 1


def test_where_nodes_meet() -> None:
    two = Settings(model="m", nodes=2)
    given = find_rendezvous(Settings(model="m", nodes=2, rdzv_endpoint="127.0.0.1"), slurm())
    assert str(given) == "127.0.0.1:29400" and given.locate() == ("127.0.0.1", True)
    from_environment = find_rendezvous(two, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"})
    assert str(from_environment) == "127.0.0.1:29777"
    from_slurm = find_rendezvous(two, slurm())
    assert from_slurm.host == "127.0.0.1" and 20_000 <= from_slurm.port < 30_000
    other_step = find_rendezvous(two, slurm(STEP_ID="2"))
    assert from_slurm.run_id != other_step.run_id and from_slurm.port != other_step.port
    assert find_rendezvous(Settings(model="m", nodes=1), {}).port == 0


def test_a_name_that_is_loopback_here_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts has such a line for the machine's own name."""
    here = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 29400))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [here])
    monkeypatch.setattr(cli.launch, "_OUTSIDE", "127.0.0.3")  # has a route everywhere
    monkeypatch.setattr(socket.socket, "getsockname", lambda probe: probe.getpeername())
    assert find_rendezvous(Settings(model="m", nodes=2, rdzv_endpoint="node0")).locate() == (
        "127.0.0.3",
        True,
    )
    assert find_rendezvous(Settings(model="m", nodes=2, rdzv_endpoint="127.0.1.1")).locate() == (
        "127.0.1.1",
        True,
    )


@pytest.mark.parametrize(("options", "environment", "message"), [
    ({}, {}, "--rdzv-endpoint"),
    ({}, {"SLURM_JOB_ID": "7"}, "srun --nodes 2 --ntasks-per-node 1"),
    ({}, slurm(STEP_NUM_NODES="3", STEP_NUM_TASKS="3"), "started finetune 3 times on 3 nodes"),
    ({}, slurm(STEP_NUM_TASKS="16"), "started finetune 16 times on 2 nodes"),
    ({"rdzv_endpoint": "node0:port"}, {}, "'node0:port' is not HOST:PORT"),
    ({"rdzv_endpoint": "no-such-node.invalid:1"}, {}, "cannot be reached"),
])  # fmt: skip
def test_no_way_to_meet(options: dict[str, Any], environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        find_rendezvous(Settings(model="m", nodes=2, **options), environment).locate()


@pytest.mark.parametrize(("nodes", "first"), [
    ("login", "login"), ("gpu[08-10,3],login", "gpu08"), ("a[1-2]b[3-4],login", "a1b3"), ("login,gpu[1-2]", "login"),
])  # fmt: skip
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(("words", "message"), [
    (["--nodes", "2", "--optimizer", "adamw8bit"], "--optimizer is for training out of core"),
    (["--strategy", "zero3"], "--strategy is for several nodes or ranks: add --nodes"),
    (["--nodes", "1", "--gpu", "4090"], "every rank has its own GPU"),
    (["--nodes", "4", "--gpu", "cpu", "--gpus-per-node", "4"], "less than one sequence for each of 16 ranks (4 x 4)"),
])  # fmt: skip
def test_options_that_do_not_go_together(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "llama-10m", "--data", "random", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
