"""The engine on the device against a plain in-memory loop on the same device: losses, gradient norms, masters.

The aim is equality to the bit, with PyTorch's deterministic algorithms. Where a case falls short, the largest
difference is kept, and that between two runs of the plain loop itself.
"""

import dataclasses
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig, logging

import fuyou
from common.models.miniature import VOCABULARY
from families.configurations import small_config
from fuyou.layout.record import DTYPES
from fuyou.schedule.memory_planner import MemoryPlanner
from gpu.journal import DATA_PREFIX, Check, describe
from gpu.twin import DeviceTwin

OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
FAMILIES = ("llama", "gpt2", "qwen3", "gemma3_text", "opt", "gpt_neox", "mixtral", "qwen3_moe")
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-4}
"""Largest relative difference of a loss that still counts as rounding, where a case is not equal to the bit."""
WORKERS = 3


@dataclass(frozen=True)
class Case:
    """One training run to compare."""

    name: str
    family: str
    dtype: str = "bf16"
    micro_batch: int = 1
    clip: float | None = None
    clip_by: str = "deferral"
    packed: bool = True  # Two or three documents a row, cut elsewhere in every batch
    counts: dict[str, int] = field(default_factory=dict)
    """Buffer counts to force: where activations live, how deep prefetching goes."""
    break_after: int | None = None  # Close and resume after this step
    rows: int = 4
    tokens: int = 32
    steps: int = 5


SCARCE = {"device_activations": 4, "host_activations": 2, "ssd_activations": 40}
ONE_OF_EACH = {"device_blocks": 1, "device_block_gradients": 1, "host_blocks": 1, "host_block_gradients": 1}


def cases(quick: bool) -> list[Case]:
    """What matters most first: the time may run out."""
    if quick:
        return [Case("gpt2 micro-batch 3", "gpt2", micro_batch=3, clip=0.5, steps=2)]
    larger: dict[str, Any] = {"rows": 4, "tokens": 256, "packed": False}
    first = [
        Case("llama", "llama"),
        Case("gpt2 (tied), micro-batch 3", "gpt2", micro_batch=3),
        Case("llama, hidden 512, micro-batch 2", "llama-512", micro_batch=2, **larger),
        Case("gpt2, hidden 512, clipped", "gpt2-512", micro_batch=3, clip=0.5, **larger),
        Case("activations on the device", "llama-tied", counts={"device_activations": 30, "host_activations": 0}),
        Case("activations on the host", "llama-tied", counts={"device_activations": 4, "host_activations": 30}),
        Case("activations on SSD", "llama-tied", counts=SCARCE),
        Case("one buffer of each kind", "llama-tied", counts={**SCARCE, **ONE_OF_EACH}, clip=0.5),
        Case("deep prefetch", "llama-tied", counts={**SCARCE, "device_blocks": 3, "host_activations": 5}),
        Case("resumed", "gpt2", micro_batch=3, break_after=3),
        Case("clipped, resumed", "llama", micro_batch=3, clip=0.5, break_after=3),
        Case("speculation, resumed", "llama", micro_batch=3, clip=1.2, clip_by="speculation", break_after=3),
        Case(
            "speculation, one buffer of each kind", "llama-tied", counts={**SCARCE, **ONE_OF_EACH}, clip=0.5,
            clip_by="speculation",
        ),
        Case("hidden 512, resumed", "llama-512", micro_batch=3, break_after=3, **larger),
    ]  # fmt: skip
    families = [
        Case(f"{family} {dtype}", family, dtype=dtype, micro_batch=micro)
        for dtype, micro in (("fp32", 3), ("bf16", 1))
        for family in FAMILIES
        if (family, dtype) != ("llama", "bf16")
    ]
    return first + families


def run(check: Check) -> None:
    todo = cases(check.settings.quick)
    check.note(
        options="torch.use_deterministic_algorithms(True), CUBLAS_WORKSPACE_CONFIG=:4096:8",
        tolerance=TOLERANCE, planned=len(todo),
    )  # fmt: skip
    arguments = (check.settings.device, check.settings.ssd)
    if check.settings.quick:
        for case in todo:
            check.add("cases", **compare(case, *arguments))
        return
    unfinished = list(todo)
    with suppress(BrokenProcessPool), _workers(WORKERS) as pool:
        begun = {pool.submit(compare, case, *arguments, check.settings.deadline): case for case in todo}
        for future in as_completed(begun):
            check.add("cases", **future.result())
            unfinished.remove(begun[future])

    def alone(case: Case) -> dict[str, Any]:
        with _workers(1) as fresh:
            return fresh.submit(compare, case, *arguments, check.settings.deadline, alone=True).result()

    # After a worker has died, those that had not ended have a process each: one that dies again costs no other.
    with ThreadPoolExecutor(WORKERS) as threads:
        again = {threads.submit(alone, case): case for case in unfinished}
        for rerun in as_completed(again):
            try:
                check.add("cases", **rerun.result())
            except BrokenProcessPool as error:
                check.add("cases", name=again[rerun].name, verdict="failed", why=describe(error))


def _workers(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def compare(
    case: Case, device: str, ssd: str, deadline: float = float("inf"), alone: bool = False
) -> dict[str, Any]:
    """Run one case; return a row of the table in any case. End the process if the device can do nothing more, unless it
    is ``alone`` for this case: all later calls would fail, too."""
    row: dict[str, Any] = {"name": case.name, "dtype": case.dtype, "micro_batch": case.micro_batch}
    if time.time() > deadline - 15:
        return {**row, "verdict": "not run", "why": "out of time"}
    logging.set_verbosity_error()
    root = Path(tempfile.mkdtemp(prefix=f"{DATA_PREFIX}exact-", dir=ssd))
    began = time.monotonic()
    try:
        for strict in (True, False):
            torch.use_deterministic_algorithms(True, warn_only=not strict)
            shutil.rmtree(root)
            root.mkdir()
            try:
                return {
                    **row,
                    "strict": strict,
                    **_run(case, device, root),
                    "seconds": time.monotonic() - began,
                }
            except RuntimeError as error:
                if not strict or "determinis" not in str(error):
                    raise
                row["why"] = describe(error)  # an operation without a deterministic form
        raise AssertionError
    except Exception as error:
        print(case.name, traceback.format_exc(), flush=True)
        if not alone and device.startswith("cuda") and _is_lost(device):
            os._exit(1)
        return {**row, "verdict": "failed", "why": describe(error), "seconds": time.monotonic() - began}
    finally:
        torch.use_deterministic_algorithms(False)
        shutil.rmtree(root, ignore_errors=True)


def _is_lost(device: str) -> bool:
    """Return whether an error of a kernel stays with this process."""
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


def _run(case: Case, device: str, root: Path) -> dict[str, Any]:
    torch.manual_seed(1)
    model = root / "model"
    AutoModelForCausalLM.from_config(_config(case.family)).save_pretrained(model)
    feed = batches(case)
    plain = _plain(case, device, model, feed)
    trained = _engine(case, device, model, root, feed)
    result = _differences(trained, plain)
    result["verdict"] = "equal" if result["equal"] else "wrong"
    if not result["equal"]:
        if result["loss"] <= TOLERANCE[case.dtype]:
            result["verdict"] = "close"
        again = _differences(_plain(case, device, model, feed), plain)
        result["plain_against_itself"] = (
            "equal" if again["equal"] else f"{again['loss']:.1e}, {again['master']:.1e}"
        )
    return result


@dataclass
class Outcome:
    """What a run came to."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, torch.Tensor]


def _plain(case: Case, device: str, model: Path, feed: list[dict[str, torch.Tensor]]) -> Outcome:
    plain = DeviceTwin(model, DTYPES[case.dtype], device, case.clip, OPTIONS)
    losses, norms = [], []
    for batch in feed:
        losses.append(plain.step(batch, case.micro_batch))
        norms.append(plain.grad_norm)
    return Outcome(losses, norms, plain.masters)


def _engine(case: Case, device: str, model: Path, root: Path, feed: list[dict[str, torch.Tensor]]) -> Outcome:
    outcome = Outcome([], [], {})
    ssd = root / "ssd"
    ssd.mkdir()
    original = MemoryPlanner.plan

    def plan(planner: MemoryPlanner, *arguments: Any, **keywords: Any) -> Any:
        plan = original(planner, *arguments, **keywords)
        return dataclasses.replace(plan, counts=dataclasses.replace(plan.counts, **case.counts))

    parts = [feed] if case.break_after is None else [feed[: case.break_after], feed[case.break_after :]]
    MemoryPlanner.plan = plan  # type: ignore[assignment, method-assign]
    try:
        for number, part in enumerate(parts):
            with fuyou.Engine(
                model, ssd=[ssd], device=device, dtype=case.dtype, host_memory="1GiB", host_cache=0,
                device_memory="3GiB" if device.startswith("cuda") else None, micro_batch=case.micro_batch,
                max_grad_norm=case.clip, clip_by=case.clip_by, batch_shape=(case.rows, case.tokens),
                resume=number > 0, io="posix", **OPTIONS,
            ) as engine:  # fmt: skip
                for batch in part:
                    out = engine(**batch)
                    out.loss.backward()
                    outcome.norms.append(engine.step().grad_norm)
                    outcome.losses.append(out.loss.item())
                outcome.masters = {name: value.clone() for name, value in engine.named_parameters()}
    finally:
        MemoryPlanner.plan = original  # type: ignore[method-assign]
    return outcome


def _differences(one: Outcome, other: Outcome) -> dict[str, Any]:
    masters = [float((one.masters[name] - other.masters[name]).abs().max()) for name in other.masters]
    return {
        "equal": one.losses == other.losses and not any(masters) and one.masters.keys() == other.masters.keys(),
        "losses_equal": sum(a == b for a, b in zip(one.losses, other.losses, strict=True)), "steps": len(other.losses),
        "loss": max(abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(one.norms, other.norms, strict=True)), "master": max(masters),
        "last_loss": one.losses[-1],
    }  # fmt: skip


def batches(case: Case) -> list[dict[str, torch.Tensor]]:
    """Random tokens, some without a label."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for step in range(case.steps):
        tokens = torch.randint(0, VOCABULARY, (case.rows, case.tokens), generator=generator)
        labels = tokens.clone()
        labels[:, :3] = -100
        batch = {"input_ids": tokens, "labels": labels}
        if case.packed:
            # Others in every batch
            cuts = [case.tokens * (3 + (step + row) % 4) // 8 for row in range(case.rows)]
            batch["position_ids"] = torch.stack([torch.arange(case.tokens).remainder(cut) for cut in cuts])
        result.append(batch)
    return result


def _config(family: str) -> PreTrainedConfig:
    if family == "llama-512":
        return LlamaConfig(
            vocab_size=4096, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=512,
        )  # fmt: skip
    if family == "gpt2-512":
        return GPT2Config(
            vocab_size=4096, n_embd=512, n_layer=4, n_head=8, n_positions=512, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        )  # fmt: skip
    config = small_config(family.removesuffix("-tied"), dropout=False)
    config.tie_word_embeddings = config.tie_word_embeddings or family.endswith("-tied")
    return config
