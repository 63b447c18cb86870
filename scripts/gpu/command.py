"""The command as users run it, on packed chats whose cuts change from row to row: on the device and on the CPU, killed
and resumed, and with all that has separate kernels. The CPU's losses are those that tests compare with plain loops.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cli.report.page import read_metrics
from common.data.demo_text import demo_documents, train_demo_tokenizer
from gpu.journal import ROOT, Check, describe

STEPS, KILLED_AFTER = 6, 3
# Relative difference from the CPU's losses that still counts as rounding
TOLERANCE = {"bf16": 2e-2, "fp32": 5e-3}
RUN_S = 120.0  # Seconds after which a run hangs
LORA = "--lora-rank", "8"
LOSS = "loss_metrics/global_avg_loss"
MEMORY = "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"
RUN = f"""
import atexit, json, sys, torch
from common.models.attention import varlen
from cli.main import main
attend, calls = varlen.attend, []
def counted(*arguments):
    calls.append(1)
    return attend(*arguments)
varlen.attend = counted
def end():
    figures = {{"flash_calls": len(calls)}}
    if torch.cuda.is_initialized():
        figures |= {{name: torch.cuda.memory_stats().get(name) for name in {MEMORY}}}
    print("FIGURES", json.dumps(figures), flush=True)
atexit.register(end)
sys.exit(main())
"""


@dataclass(frozen=True)
class Case:
    """One way to run the command."""

    name: str
    words: tuple[str, ...] = ()
    model: str = "plain"
    resumed: bool = False  # Whether it is also killed and resumed, to equal itself to the bit
    cuda: bool = False  # Whether it needs a GPU
    dtype: str = "bf16"
    deterministic: bool = True
    environment: dict[str, str] = field(default_factory=dict)


# What matters most first
CASES = (
    Case("LoRA", LORA, resumed=True), Case("all weights", resumed=True),
    Case("LoRA as by default", LORA, deterministic=False), Case("nf4", (*LORA, "--frozen-dtype", "nf4")),
    Case("blocks in pieces", ("--piece-size", "256KiB")), Case("FP8", LORA, "fp8"),
    Case("int8", (*LORA, "--frozen-dtype", "int8")), Case("all weights in fp32", dtype="fp32"),
    Case("kvikio", ("--io", "kvikio", "--host-cache", "0"), cuda=True),
    Case("device memory at its limit", ("--device-memory", "320MiB", "--batch-size", "64"), cuda=True),
    Case("LoRA with dropout", (*LORA, "--lora-dropout", "0.2"), resumed=True),
    Case("cuDNN deprioritized, as on a 4090", environment={"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}, cuda=True),
)  # fmt: skip


def run(check: Check) -> None:
    root = check.directory("command")
    make_models(root)
    chosen = [case for case in CASES if check.cuda or not case.cuda]
    check.note(planned=len(chosen), steps=STEPS, tolerance=TOLERANCE)
    device = check.settings.device
    ended: dict[str, dict[str, Outcome | Exception]] = {case.name: {} for case in chosen}
    with ThreadPoolExecutor(max(3, min(6, (os.cpu_count() or 1) // 3))) as pool:
        begun = {}
        for case in chosen:
            begun[pool.submit(finetune, case, root, check, device, "device")] = case, "device"
            if device != "cpu":
                begun[pool.submit(finetune, on_cpu(case), root, check, "cpu", "cpu")] = case, "cpu"
            if case.resumed:
                begun[pool.submit(finetune, case, root, check, device, "resumed", KILLED_AFTER)] = (
                    case,
                    "resumed",
                )
        for future in as_completed(begun):
            case, where = begun[future]
            try:
                ended[case.name][where] = future.result()
            except Exception as error:
                ended[case.name][where] = error
            if "device" in ended[case.name]:
                check.add("cases", **row_of(case, ended[case.name], check))


def on_cpu(case: Case) -> Case:
    """Return what a case is compared with."""
    plain = tuple(word for word in case.words if word not in ("--io", "kvikio"))
    if "--device-memory" in plain:  # on a CPU, a part of the host's
        index = plain.index("--device-memory")
        plain = plain[:index] + plain[index + 2 :]
    return replace(case, words=plain, environment={})


def row_of(case: Case, ended: "dict[str, Outcome | Exception]", check: Check) -> dict[str, Any]:
    """Return a case's row, of the runs that have ended so far: that on the device, and perhaps others."""
    row: dict[str, Any] = {"name": case.name, "dtype": case.dtype}
    failed = {where: describe(outcome) for where, outcome in ended.items() if isinstance(outcome, Exception)}
    on_device = ended["device"]
    if isinstance(on_device, Exception):
        return {**row, "verdict": "failed", "why": failed["device"]}
    row |= {"losses": on_device.losses, "seconds": on_device.seconds, **on_device.figures}
    if failed:
        row["why"] = "; ".join(f"{where}: {why}" for where, why in failed.items())
    problems = []
    expected = ended.get("cpu", on_device if check.settings.device == "cpu" else None)
    if isinstance(expected, Outcome):
        pairs = zip(on_device.losses, expected.losses, strict=True)
        row["largest_difference"] = max(abs(loss - other) / abs(other) for loss, other in pairs)
        problems += ["wrong"] if row["largest_difference"] > TOLERANCE[case.dtype] else []
    again = ended.get("resumed")
    if isinstance(again, Outcome):
        row["resumed_equal"] = again.losses == on_device.losses
        problems += [] if row["resumed_equal"] else ["wrong"]
    if takes_flash(case, check) and not on_device.figures.get("flash_calls"):
        problems.append("not by flash attention")
    row["verdict"] = ", ".join(dict.fromkeys(problems)) or (
        "right" if isinstance(expected, Outcome) else "ran"
    )
    if "resumed" in failed:
        row["verdict"] = "failed"
    return row


def takes_flash(case: Case, check: Check) -> bool:
    """Return whether packed rows have to take flash attention: in 16 bits, from Ampere on."""
    return (
        check.cuda
        and case.dtype == "bf16"
        and torch.cuda.get_device_capability(check.settings.device) >= (8, 0)
    )


def make_models(root: Path) -> None:
    """Make a small Llama whose heads share keys, the same in FP8, and conversations of many lengths."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    for name in ("plain", "fp8"):
        model: Any = LlamaForCausalLM(config)
        model.to(torch.bfloat16).save_pretrained(root / name)
        train_demo_tokenizer(1024, root / name)
    weights = load_file(root / "fp8" / "model.safetensors")
    for name in [name for name in weights if "_proj" in name]:
        value = weights[name].float()
        blocks = value.view(value.shape[0] // 128, 128, value.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        weights[name] = (blocks / scale).view_as(value).to(torch.float8_e4m3fn)
        weights[name.replace("weight", "weight_scale_inv")] = scale[:, 0, :, 0].contiguous()
    save_file(weights, root / "fp8" / "model.safetensors", {"format": "pt"})
    settings = json.loads((root / "fp8" / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (root / "fp8" / "config.json").write_text(json.dumps(settings))
    words = " ".join(demo_documents()).split()
    with (root / "chats.jsonl").open("w") as file:
        for number in range(800):
            length = 3 + number * 37 % 60
            start = number * 101 % (len(words) - 2 * length)
            answer = " ".join(words[start + length : start + 2 * length])
            chat = [{"role": "user", "content": " ".join(words[start : start + length])}]
            file.write(json.dumps({"messages": [*chat, {"role": "assistant", "content": answer}]}) + "\n")


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    losses: list[float]
    figures: dict[str, Any]
    seconds: float


def finetune(
    case: Case, root: Path, check: Check, device: str, where: str, killed_after: int | None = None
) -> Outcome:
    """Run the command, once more from where it was killed if it is to be; return its losses."""
    began = time.monotonic()
    limit = min(RUN_S if check.cuda else check.left(), check.left())
    if limit < 5:
        raise TimeoutError("no time was left for it")
    output = root / f"{case.name}-{where}".replace(" ", "-")
    length = 64 if check.settings.quick else 128
    words = [
        "--model", root / case.model, "--data", root / "chats.jsonl", "--seq-len", length, "--dtype", case.dtype,
        "--steps", STEPS, "--lr", "1e-3", *(["--deterministic"] if case.deterministic else []), "--no-save",
        "--host-memory", "1GiB", "--gpu", device.rpartition(":")[2], "--output", output, *case.words,
    ]  # fmt: skip
    log = check.output / f"command-{output.name}.log"
    with log.open("w") as file:
        process = _start(words, case, file)
        try:
            if killed_after is not None:
                while process.poll() is None and len(_losses(output)) < killed_after:
                    if time.monotonic() > began + limit:
                        raise subprocess.TimeoutExpired("finetune", limit)
                    time.sleep(0.02)
                process.send_signal(signal.SIGKILL)
                process.wait()
                process = _start([*words, "--resume"], case, file)
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"stopped after {limit:.0f} s, {log.name} ends with: {log.read_text()[-200:]}"
            ) from None
        finally:
            process.kill()
            process.wait()
    text = log.read_text()
    if status:
        raise RuntimeError(f"exit status {status}, {log.name} ends with: {text[-300:]}")
    figures = [line.removeprefix("FIGURES ") for line in text.splitlines() if line.startswith("FIGURES ")]
    losses = list(_losses(output).values())
    if len(losses) != STEPS:
        raise RuntimeError(f"{len(losses)} of {STEPS} losses were written")
    return Outcome(losses, json.loads(figures[-1]) if figures else {}, time.monotonic() - began)


def _start(words: list[Any], case: Case, log: Any) -> "subprocess.Popen[bytes]":
    environment = dict(
        os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONPATH=str(ROOT), **case.environment
    )
    command = [sys.executable, "-c", RUN, *map(str, words)]
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _losses(output: Path) -> dict[int, float]:
    lines = read_metrics(output / "run" / "metrics.jsonl")
    return {line["step"]: line[LOSS] for line in lines if LOSS in line}
