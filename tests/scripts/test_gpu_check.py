"""``scripts/gpu_check.py``: the whole of it on tiny models without a GPU, and what it makes of a GPU's trace."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.attention_calls import AttentionCalls, takes_math
from tests.helpers.cuda_branch import cuda_branch
from tests.helpers.processes import forked

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Exit status, results.json and results.md of one call, whose sections are forked.

    It may take ever so long on a slow machine: the time allowed only ends one that hangs.
    """
    monkeypatch.syspath_prepend(SCRIPTS)
    import gpu_check

    monkeypatch.setattr(gpu_check, "subprocess", forked.as_subprocess())
    ssd, output = tmp_path / "ssd", tmp_path / "out"
    ssd.mkdir()

    def run(*words: str) -> tuple[int, dict[str, Any], str]:
        given = ["--device", "cpu", "--quick", "--minutes", "40", "--ssd", str(ssd), "--output", str(output)]
        with pytest.raises(SystemExit) as ended:
            gpu_check.main([*given, *words], standalone_mode=False)
        assert list(ssd.iterdir()) == []
        results = json.loads((output / "results.json").read_text())
        return int(str(ended.value)), results["sections"], (output / "results.md").read_text()

    return run


@pytest.mark.slow
def test_the_script_starts_on_its_own(tmp_path: Path) -> None:
    """From any directory, and without our packages on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, SCRIPTS / "gpu_check.py", "--device", "cpu", "--quick", "--ssd", tmp_path]
    done = subprocess.run(
        [*command, "--output", tmp_path / "out", "--sections", "machine"], capture_output=True, text=True, cwd="/",
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        json.loads((tmp_path / "out" / "results.json").read_text())["sections"]["machine"]["status"] == "done"
    )


@pytest.mark.slow
def test_everything_runs_without_a_gpu(check: Callable[..., tuple[int, dict[str, Any], str]]) -> None:
    status, sections, report = check("--sections", "exactness,command,ranks,nccl,speed,engine")
    assert status == 0, sections
    assert {name: entry["status"] for name, entry in sections.items()} == {
        "command": "done", "exactness": "done", "speed": "done", "ranks": "done", "nccl": "skipped",
        "engine:tiny": "done",
    }  # fmt: skip
    assert sections["engine:tiny"]["data"]["timeline"] == "skipped: no CUDA"
    assert [case["verdict"] for case in sections["exactness"]["data"]["cases"]] == ["equal"]
    commands = sections["command"]["data"]["cases"]
    assert {case["name"]: case["verdict"] for case in commands} == {
        "LoRA": "right", "all weights": "right", "LoRA as by default": "right", "nf4": "right", "FP8": "right",
        "blocks in pieces": "right", "int8": "right", "all weights in fp32": "right", "LoRA with dropout": "right",
    }  # fmt: skip
    assert [case["resumed_equal"] for case in commands if "resumed_equal" in case] == [True, True, True]
    (rates,) = sections["speed"]["data"]["rates"]
    assert rates["tokens_per_second"] > 0 and rates["planned"] > 0
    ranks = sections["ranks"]["data"]
    assert [case["verdict"] for case in ranks["cases"]] == ["equal", "equal"]
    assert all(case["hits"] > 0 for case in ranks["cases"]) and ranks["load"]["load"] > 0
    row = sections["engine:tiny"]["data"]["rows"][0]
    assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"])
    assert 0 < row["overlap_efficiency"] <= 1.5
    assert "| all weights | " in report and "could not be drawn" not in report


@pytest.mark.parametrize("minutes", [2, 4, 7, 9, 30])
@pytest.mark.parametrize("used", [0.3, 1.0])
def test_each_section_has_its_least_time(minutes: int, used: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of what matters, as far as there is time, however much those before it take."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import gpu_check

    names = [*list(gpu_check.LEAST_S)[:7], "engine:larger", *list(gpu_check.LEAST_S)[7:]]
    left = 60.0 * minutes - gpu_check.RESERVE_S
    for position, name in enumerate(names):
        seconds = gpu_check.seconds_of(names[position:], left)
        least = gpu_check.LEAST_S[name.partition(":")[0]]
        assert least <= seconds <= left or seconds == left < least
        left -= used * seconds
    assert left >= 0 and (minutes < 9 or least <= seconds)


def test_a_row_says_what_has_ended_so_far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run on the device counts before the one that it is compared with has ended, and if that fails."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from gpu import command
    from gpu.command import Case, Outcome, row_of
    from gpu.journal import Check, Settings

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    settings = Settings(str(tmp_path), str(tmp_path), "cuda:0", False, None, None, (), (), 32)
    check, case = Check("command", settings), Case("LoRA", resumed=True)
    device: dict[str, Any] = {"device": Outcome([7.0, 6.0], {"flash_calls": 12}, 3.0)}
    assert row_of(case, device, check)["verdict"] == "ran"
    close = device | {"cpu": Outcome([7.01, 6.0], {}, 3.0)}
    assert row_of(case, close, check)["verdict"] == "right"
    assert row_of(case, device | {"cpu": Outcome([7.5, 6.0], {}, 3.0)}, check)["verdict"] == "wrong"
    assert row_of(case, close | {"resumed": Outcome([7.0, 6.1], {}, 3.0)}, check)["verdict"] == "wrong"
    late = row_of(case, device | {"cpu": TimeoutError("late")}, check)
    assert late["verdict"] == "ran" and "cpu: TimeoutError: late" in late["why"]
    assert row_of(case, {"device": ValueError("bad")}, check)["verdict"] == "failed"
    by_others = {"device": Outcome([7.0, 6.0], {"flash_calls": 0}, 3.0)}
    assert row_of(case, by_others, check)["verdict"] == "not by flash attention"
    assert command.on_cpu(Case("limit", ("--device-memory", "1MiB", "--batch-size", "64"))).words == (
        "--batch-size", "64",
    )  # fmt: skip
    check.add("cases", **row_of(case, device, check))
    check.add("cases", **row_of(case, close, check))
    (row,) = json.loads((tmp_path / "results.json").read_text())["sections"]["command"]["data"]["cases"]
    assert row["verdict"] == "right"


@pytest.mark.slow
def test_a_worker_that_dies_costs_no_other_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU, each worker finds its device lost, and ends."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from gpu import exactness
    from gpu.journal import Check, Settings

    settings = Settings(str(tmp_path), str(tmp_path), "cuda:0", False, None, None, (), (), 32).until(1e18)
    check = Check("exactness", settings)
    monkeypatch.setattr(exactness, "WORKERS", 1)
    monkeypatch.setattr(
        exactness, "cases", lambda quick: [exactness.Case(name, "llama", steps=1) for name in "ab"]
    )
    exactness.run(check)
    rows = check.data["cases"]
    assert sorted(row["name"] for row in rows) == ["a", "b"]
    assert all(row["verdict"] == "failed" and "BrokenProcessPool" not in row["why"] for row in rows)


def test_what_a_command_printed_is_kept_if_it_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from gpu.journal import Check, Settings

    settings = Settings(str(tmp_path), str(tmp_path), "cpu", True, None, None, (), (), 32).until(0.0)
    check = Check("machine", settings)
    monkeypatch.setattr("builtins.max", lambda *_: 1.0)
    with pytest.raises(subprocess.TimeoutExpired):
        check.command("text", (), start=("-c", "import time; print('a card', flush=True); time.sleep(60)"))
    assert check.data["text"] == "a card\n"


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 0), (torch.float32, 4), (torch.bfloat16, 4)])
def test_the_twin_of_packed_rows_takes_no_math_kernel(dtype: torch.dtype, window: int) -> None:
    """Neither in fp32 nor with a window, where heads share keys."""
    from gpu.twin import _attend

    module = types.SimpleNamespace(documents=[[*range(7), *range(9)]])
    query, key = torch.randn(1, 4, 16, 8, dtype=dtype), torch.randn(1, 2, 16, 8, dtype=dtype)
    expected, _ = _attend(module, query, key, key, sliding_window=window)
    with cuda_branch(), AttentionCalls() as attention:
        attended, _ = _attend(module, query, key, key, sliding_window=window)
    assert len(attention.calls) == 2 and not any(
        takes_math(*args, **kwargs) for args, kwargs in attention.calls
    )
    torch.testing.assert_close(attended, expected)


def test_a_step_that_runs_out_of_memory_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the next batch is measured on an engine that was opened again."""
    monkeypatch.syspath_prepend(SCRIPTS)
    from gpu import presets
    from gpu.journal import Check, Settings

    from fuyou.runtime.device import explain_out_of_memory

    settings = Settings(
        str(tmp_path), str(tmp_path), "cpu", True, None, "600MiB", ("tiny",), (2, 4), 32
    ).until(1e18)
    train, calls = presets.train_step, []

    def train_step(engine: Any, batch: dict[str, Any]) -> Any:
        calls.append(len(batch["input_ids"]))
        if calls == [2]:
            with explain_out_of_memory():
                engine(**batch)
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return train(engine, batch)

    monkeypatch.setattr(presets, "train_step", train_step)
    check = Check("engine:tiny", settings)
    presets.run(check)
    assert [row.get("why", "")[:6] for row in check.data["rows"]] == ["failed", "", ""]


def test_a_section_that_fails_says_why(
    check: Callable[..., tuple[int, dict[str, Any], str]], tmp_path: Path
) -> None:
    """And the next one runs; a later call with chosen sections joins their results to what is there."""
    (tmp_path / "out").mkdir()
    earlier = {"sections": {"machine": {"status": "done", "data": {}}}}
    (tmp_path / "out" / "results.json").write_text(json.dumps(earlier))
    status, sections, report = check("--sections", "engine", "--host-memory", "1MiB")
    assert status == 1
    assert sections["engine:tiny"]["status"] == "failed"
    assert "host_memory of at least" in sections["engine:tiny"]["why"]
    assert sections["engine:tiny"]["why"] in report
    assert sections["machine"]["status"] == "done"  # of the earlier call, kept


def event(category: str, stream: int, begin: float, duration: float, name: str = "kernel") -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "ts": begin, "dur": duration, "name": name, "args": {"stream": stream}, "pid": 0,
    }  # fmt: skip


def test_gaps_of_the_compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from gpu.trace import analyse, slim

    events = [
        event("kernel", 7, 100, 50, "first"),
        event("kernel", 7, 155, 45, "second"),  # after a launch gap of 5
        event("kernel", 7, 500, 100, "third"),  # after 300, in which the host waits and a copy runs for 150
        event("gpu_memset", 7, 520, 10),  # inside it
        event("kernel", 20, 90, 20, "of another stream"),
        event("gpu_memcpy", 20, 200, 100),
        event("gpu_memcpy", 21, 250, 100),
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "ts": 190,
            "dur": 250,
            "name": "cudaStreamSynchronize",
            "args": {},
        },
        {"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 600, "name": "aten::mm", "args": {}},
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    slimmed = slim(events)
    assert [e["name"] for e in events if e not in slimmed] == ["aten::mm"]
    found = analyse(slimmed, largest=1)
    assert (found["stream"], found["kernels"], found["gaps"]) == (7, 3, 2)
    assert (found["span_us"], found["busy_us"], found["idle_us"]) == (500, 195, 305)
    assert found["idle_in_launches_us"] == 5
    assert found["copying_us"] == 150
    assert found["largest"] == [
        {"at_us": 100, "length_us": 300, "after": "second", "before": "third", "copying": 0.5,
         "host": "cudaStreamSynchronize (80%)"},
    ]  # fmt: skip
    assert found["longest_kernels"][0] == {"name": "third", "calls": 1, "us": 100}
    with pytest.raises(ValueError, match="no kernels"):
        analyse(event for event in slimmed if event.get("cat") != "kernel")
