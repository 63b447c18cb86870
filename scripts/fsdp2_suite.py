"""Run FSDP2's own tests with ours in its place: how many of those that pass with FSDP2 pass with ``fcdp``?

The tests are PyTorch's, ``test/distributed/_composable/fsdp`` of the release that is installed; they are not a part of
the wheel, so give the directory of a checkout. They also need ``pip install expecttest``::

    git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch
    python scripts/fsdp2_suite.py pytorch/test/distributed/_composable/fsdp

Each runs twice, with PyTorch's ``fully_shard`` and with ours, on gloo: most ask for several GPUs, which this program
lets CPU processes stand for. Those that then fail with FSDP2 itself (streams, memory of a GPU, NCCL) say nothing, and
are not counted. With ours two ranks share a node, so that four ranks are two nodes. Ranks are forked.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

RANKS = 8  # GPUs that the tests believe in


class Recorder:
    """A plugin of pytest that notes how each test ended, and writes it down at once: the last of a name counts.

    Args:
        file: to which a line is added for each test; None: none is.
    """

    def __init__(self, file: Path | None) -> None:
        self.ended: dict[str, tuple[str, str]] = {}
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note ``passed``, ``failed`` or ``skipped``, and the last line of what was raised."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.split("/")[-1]
        if report.when == "call" or name not in self.ended:
            lines = [line for line in str(report.longrepr or "").splitlines() if "Error" in line]
            self.ended[name] = report.outcome, lines[-1].strip() if lines else ""
            if self._file is not None:
                with self._file.open("a") as file:
                    print(json.dumps([name, *self.ended[name]]), file=file)


def pretend_gpus() -> None:
    """Have PyTorch's test helpers run on the CPU what asks for several GPUs, with gloo and forked ranks."""
    from torch.testing._internal import common_distributed, common_fsdp

    def unconditional(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        return lambda test: test

    def fork(case: Any) -> None:
        case._start_processes(multiprocessing.get_context("fork").Process)

    shared = common_distributed.MultiProcContinuousTest
    start_once = shared.__dict__["_ensure_processes_spawned"].__func__

    def start_again(case: Any) -> None:
        """Restart ranks that several tests share after one has failed, instead of skipping the others."""
        if case.poison_pill:
            case.poison_pill = case._processes_spawned = False
            for process in case.processes:
                process.kill()
        start_once(case)

    def on_cpu(model: Any, *args: Any, **options: Any) -> None:
        make_replicas(model, *args, **{**options, "device_ids": None})

    replicas = torch.nn.parallel.DistributedDataParallel
    make_replicas = replicas.__init__
    changes: list[tuple[Any, str, Any]] = [
        (torch.accelerator, "device_count", lambda: RANKS),
        (torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu")),
        (torch.cpu, "device_count", lambda: RANKS),
        (replicas, "__init__", on_cpu),
        (common_distributed, "skip_if_lt_x_gpu", unconditional),
        (common_distributed.MultiProcessTestCase, "_spawn_processes", fork),
        (shared, "_ensure_processes_spawned", classmethod(start_again)),
        (torch.multiprocessing, "set_start_method", lambda *_, **__: None),  # forked, too
        (common_fsdp, "DEVICE_COUNT", RANKS),
        (common_fsdp, "DEVICE_TYPE", "cpu"),
        (common_fsdp, "DISTRIBUTED_BACKEND", "gloo"),
    ]
    for target, name, value in changes:
        mock.patch.object(target, name, value).start()


def run_tests(tests: list[str], ours: bool, file: Path | None) -> None:
    """Run the files in this process, and write how each test ended to ``file``."""
    torch.set_num_threads(1)
    pretend_gpus()
    if ours:
        import fcdp

        os.environ["LOCAL_WORLD_SIZE"] = "2"
        fcdp.replace_fsdp2()
    pytest.main(
        [
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "--continue-on-collection-errors",
            *tests,
        ],
        plugins=[Recorder(file)],
    )


def in_a_process(tests: list[str], ours: bool, timeout_s: float) -> dict[str, tuple[str, str]]:
    """Return how each test ended in a separate process; those that it had no time for are missing."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "ended.jsonl", Path(folder) / "log"
        command = [
            sys.executable,
            __file__,
            *tests,
            "--only",
            "ours" if ours else "fsdp2",
            "--to",
            str(result),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120"}
        with log.open("w") as output, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=env, stdout=output, stderr=output, timeout=timeout_s, check=False)
        if not result.exists():
            raise SystemExit(f"The tests did not begin in order:\n{log.read_text()[-4000:]}")
        return read(result)


def read(file: Path) -> dict[str, tuple[str, str]]:
    """Return what :class:`Recorder` has written."""
    return {name: (ended, why) for name, ended, why in map(json.loads, file.read_text().splitlines())}


def report(plain: dict[str, tuple[str, str]], ours: dict[str, tuple[str, str]]) -> None:
    """Print each test that FSDP2 passes and ours does not, and the sums."""
    counts = Counter(ended for ended, _ in plain.values())
    passed = [name for name, (ended, _) in plain.items() if ended == "passed"]
    with_ours = [name for name in passed if ours.get(name, ("missing", ""))[0] == "passed"]
    for name in sorted(plain):
        here, there = plain[name][0], ours.get(name, ("missing", ""))
        print(f"{here:8} {there[0]:8} {name}" + (f"\n    {there[1]}" if here == "passed" != there[0] else ""))
    print(
        "\n| file | passed with FSDP2 | of these with ours | failed with FSDP2 | skipped |\n|---|---|---|---|---|"
    )
    for file in sorted({name.split("::")[0] for name in plain}):
        ended = Counter(how for name, (how, _) in plain.items() if name.startswith(f"{file}::"))
        ours_too = sum(name.startswith(f"{file}::") for name in with_ours)
        print(f"| `{file}` | {ended['passed']} | {ours_too} | {ended['failed']} | {ended['skipped']} |")
    share = len(with_ours) / max(len(passed), 1)
    print(f"With FSDP2 {counts['passed']} pass, {counts['failed']} fail and {counts['skipped']} are skipped.")
    print(f"Of those that pass with FSDP2, {len(with_ours)} of {len(passed)} pass with ours ({share:.1%}).")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "tests", nargs="+", help="directory of the tests, files, or tests as pytest names them"
    )
    parser.add_argument("--only", choices=("fsdp2", "ours"), help="run with one of the two, in this process")
    parser.add_argument("--to", type=Path, help="with --only: file for how each test ended")
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="of either run")
    args = parser.parse_args()
    if args.only:
        run_tests(args.tests, args.only == "ours", args.to)
        return
    plain, ours = (in_a_process(args.tests, which, args.timeout) for which in (False, True))
    report(plain, ours)


if __name__ == "__main__":
    main()
