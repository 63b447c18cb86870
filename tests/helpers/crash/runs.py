"""Training runs of a tiny model in separate processes, on drives that may fail.

Processes are forked from one that has imported everything, the optimizer process included, so that a run takes a
fraction of a second: hundreds of crashes can be tried.
"""

import contextlib
import gc
import hashlib
import json
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.models.llama import modeling_llama  # noqa: F401 - so that no run has to import it
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401 - also

import fuyou
import fuyou.engine.opening
import fuyou.optimizer.process.main  # so that no run has to import it
import fuyou.optimizer.process.start
from common.data import RandomBatches
from common.errors import FinetuneError
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.memory_planner import MemoryPlanner
from tests.helpers import kvikio
from tests.helpers.crash.drives import Fault, FaultyDrives
from tests.helpers.processes.forked import Child, as_subprocess

#: ``start`` asks after all children, and two threads that ask after one take its exit status from each other.
_looking_after_children = threading.Lock()

ROWS, SEQ_LEN, VOCABULARY = 2, 16, 64
STEPS = 3


SCARCE = {
    "device_blocks": 1, "host_blocks": 1, "device_activations": 4, "host_activations": 2, "ssd_activations": 40,
    "host_block_gradients": 1, "host_non_block_gradients": 1,
}  # fmt: skip
"""Buffers with which parameters pass host memory, and activations and deferred gradients overflow it."""


@dataclass(frozen=True)
class Run:
    """One process: a run is begun, or continued, and may be cut short."""

    root: Path
    """Directory with the drives: ``ssd0``, ``ssd1``, ... in it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    leaves: tuple[int, ...] = ()
    """Drives that it may be on and is to leave."""
    fault: Fault | None = None
    journal: bool = False
    drives: tuple[int, ...] = (0, 1)
    """Numbers of those that it is on, or is to be on."""
    steps: int = STEPS
    model: str = "dense"
    """What :func:`tiny_config` makes."""

    @property
    def patience(self) -> float:
        """Seconds for which something of it may outlive its first process."""
        return 60.0

    @property
    def notes(self) -> Path:
        """Where counters and journal of the drives are."""
        return self.root.with_name(self.root.name + ".notes")

    @property
    def ssd(self) -> list[Path]:
        return [self.root / f"ssd{number}" for number in self.drives]

    @property
    def leaving(self) -> list[Path]:
        return [self.root / f"ssd{number}" for number in self.leaves]

    def train(self, say: Callable[..., None]) -> None:
        """What the process does, and tells."""
        _steps(self, say)


@dataclass(frozen=True)
class Outcome:
    """How a run has ended."""

    status: int
    """Exit status, or minus the signal."""
    losses: dict[int, list[str]]
    """By step: loss, gradient norm and a digest of the batch, exactly, once for every time it was taken."""
    committed: int
    """The last step that it has reported as committed."""
    final: dict[str, str] | None
    """Digest of each record, weights and moments; None if it did not come to its end."""
    error: str
    """What it failed with."""
    expected_error: bool
    """Whether that is a message for users."""


def tiny_config(model: str = "dense") -> PreTrainedConfig:
    """Small enough that a step's writes can be tried one by one.

    Args:
        model: ``"dense"`` has two blocks, ``"block"`` has one such block, ``"mixture"`` has one with four experts.
    """
    common = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "num_hidden_layers": 2 if model == "dense" else 1,
    }  # fmt: skip
    if model == "mixture":
        common |= {"head_dim": 16, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        return Qwen3MoeConfig(**common)
    return LlamaConfig(**common)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.helpers.crash.runs", "tests.helpers.crash.cluster", "tests.helpers.crash.ranks"]
    )
    return context


def start_server() -> None:
    """Start the process that all others are forked from, with the surroundings that this thread has now."""
    _context()
    multiprocessing.forkserver.ensure_running()


def execute(run: Run, timeout: float = 300.0, disturb: Callable[[int], None] | None = None) -> Outcome:
    """Run it to any kind of end, and make sure that nothing of it is left running.

    Args:
        disturb: called with the engine's process as soon as that is there.

    Raises:
        AssertionError: it hangs, or leaves a process behind.
    """
    results = run.root.with_name(run.root.name + ".results")
    results.unlink(missing_ok=True)
    shutil.rmtree(run.notes, ignore_errors=True)
    process = _context().Process(target=_train, args=(run, results))
    with _looking_after_children:
        process.start()
    assert process.pid is not None
    if disturb is not None:
        disturb(process.pid)
    hung = not multiprocessing.connection.wait([process.sentinel], timeout)
    if hung:
        os.killpg(process.pid, signal.SIGKILL)
    with _looking_after_children:
        process.join()
        status = process.exitcode
    assert not hung, f"{run} hung: {results.read_text() if results.exists() else 'nothing said'}"
    _assert_gone(process.pid, run.patience)
    assert status is not None
    return _outcome(status, results)


def _assert_gone(group: int, patience: float) -> None:
    """Nobody of the process group lives on."""
    deadline = time.monotonic() + patience
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            raise AssertionError(f"a process of the run (group {group}) outlived it by {patience:.0f} s")
        time.sleep(0.005)


def _outcome(status: int, results: Path) -> Outcome:
    losses: dict[int, list[str]] = {}
    committed, final, error, expected = 0, None, "", False
    for line in results.read_text().splitlines() if results.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # killed while it was written
        if "step" in entry:
            losses.setdefault(entry["step"], []).append(entry["took"])
        committed = max(committed, entry.get("committed", 0))
        final, error = entry.get("final", final), entry.get("error", error)
        expected = entry.get("expected", expected)
    return Outcome(status, losses, committed, final, error, expected)


# -- in the child ------------------------------------------------------------------------------------------------------


def _train(run: Run, results: Path) -> None:
    os.setpgid(0, 0)
    gc.freeze()
    out = os.open(results, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(AttributeError):
        sys.stdin.close()
    setattr(fuyou.optimizer.process.start, "subprocess", as_subprocess(Child))  # noqa: B010 - for mypy it is a module
    torch.set_num_threads(1)
    for path in (*run.ssd, *run.leaving):
        path.mkdir(parents=True, exist_ok=True)
    FaultyDrives(run.root, run.notes, run.fault, run.journal).install()

    def say(**entry: Any) -> None:
        os.write(out, json.dumps(entry).encode() + b"\n")

    try:
        run.train(say)
    except BaseException as error:
        text = str(error) if isinstance(error, FinetuneError) else traceback.format_exc()
        say(error=text, expected=isinstance(error, FinetuneError))
        os._exit(1)
    os._exit(0)


def _steps(run: Run, say: Any) -> None:
    batches = RandomBatches(VOCABULARY, SEQ_LEN, ROWS, seed=5)
    with open_engine(run) as engine:
        while engine.step_count < run.steps:
            batch = batches.batch(engine.step_count)
            loss = engine(**batch).loss
            loss.backward()
            report = engine.step()
            digest = hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest()[:12]
            took = f"{report.loss.hex()} {report.grad_norm.hex()} {digest}"
            say(step=report.step, took=took, committed=engine.committed_step)
        engine.flush()
        say(final=digests(engine))


def open_engine(run: Run) -> fuyou.Engine:
    """The engine of ``run``, on this process's drives."""
    options = {
        "lr": 1e-2, "host_memory": "600MiB", "micro_batch": 1, "batch_shape": (ROWS, SEQ_LEN), "dtype": "bf16",
        **run.options,
    }  # fmt: skip
    if options.get("io") == "kvikio":
        play_device()
    return fuyou.Engine(tiny_config(run.model), ssd=run.ssd, leave_ssd=run.leaving, **options)


def play_device() -> None:
    """Let the CPU be a device whose memory drives read and write, with the fewest buffers; for this process's life."""
    kvikio.install(pytest.MonkeyPatch())
    fuyou.engine.opening.check_io = lambda *_: None  # type: ignore[assignment]
    original = MemoryPlanner.plan

    def plan(*arguments: Any, **keywords: Any) -> MemoryPlan:
        made = original(*arguments, **keywords)
        return replace(made, counts=replace(made.counts, **SCARCE))

    MemoryPlanner.plan = plan  # type: ignore[method-assign]


def digests(engine: fuyou.Engine) -> dict[str, str]:
    """Of every record that counts, each byte of it: weights, their low parts, moments."""
    assert engine._run.files is not None
    result, store = {}, engine._run.files.store
    for sealed in engine._run.commits.sums.sealed(engine._run.commits.state.slot):
        data = bytearray(sealed.extent.nbytes)
        store.read_unchecked(sealed.extent, data).result()
        result[sealed.what] = hashlib.sha256(data).hexdigest()
    return result
