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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cli.report.page import read_metrics
from common.data.demo_text import demo_documents, train_demo_tokenizer
from gpu.journal import ROOT, Check, describe

STEPS, KILLED_AFTER = 6, 3
TOLERANCE = 5e-3  # Relative difference from the CPU's losses, in fp32, that still counts as rounding
LORA = "--lora-rank", "8"
LOSS = "loss_metrics/global_avg_loss"
MEMORY = "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"
RUN = f"""
import atexit, json, sys, torch
def tell():
    if torch.cuda.is_initialized():
        print("MEMORY", json.dumps({{name: torch.cuda.memory_stats().get(name) for name in {MEMORY}}}), flush=True)
atexit.register(tell)
from cli.main import main
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
    environment: dict[str, str] = field(default_factory=dict)


CASES = (
    Case("packed chats", resumed=True), Case("LoRA with dropout", (*LORA, "--lora-dropout", "0.2"), resumed=True),
    Case("cuDNN deprioritized, as on a 4090", environment={"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}, cuda=True),
    Case("blocks in pieces", ("--piece-size", "256KiB")), Case("int8", (*LORA, "--frozen-dtype", "int8")),
    Case("nf4", (*LORA, "--frozen-dtype", "nf4")), Case("FP8", LORA, "fp8"),
    Case("kvikio", ("--io", "kvikio", "--host-cache", "0"), cuda=True),
    Case("device memory at its limit", ("--device-memory", "320MiB", "--batch-size", "64"), cuda=True),
)  # fmt: skip


def run(check: Check) -> None:
    root = check.directory("command")
    make_models(root)
    chosen = [case for case in CASES if check.cuda or not case.cuda]
    check.note(planned=len(chosen), steps=STEPS, tolerance=TOLERANCE)
    with ThreadPoolExecutor(3) as pool:
        begun = {pool.submit(compare, case, root, check): case for case in chosen}
        for future in as_completed(begun):
            try:
                check.add("cases", name=begun[future].name, **future.result())
            except Exception as error:
                check.add("cases", name=begun[future].name, verdict="failed", why=describe(error))


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


def compare(case: Case, root: Path, check: Check) -> dict[str, Any]:
    """Run a case on the device and on the CPU; return a row of the table."""
    begun, device = time.monotonic(), check.settings.device
    on_device = finetune(case, root, check, device, "device")
    result: dict[str, Any] = {"losses": on_device.losses, "memory": on_device.memory}
    plain = tuple(word for word in case.words if word not in ("--io", "kvikio"))
    same = Case(case.name, plain, case.model)
    expected = finetune(same, root, check, "cpu", "cpu") if device != "cpu" else on_device
    pairs = list(zip(on_device.losses, expected.losses, strict=True))
    if len(pairs) != STEPS:
        raise RuntimeError(f"{len(pairs)} of {STEPS} losses were written")
    result["largest_difference"] = max(abs(loss - other) / abs(other) for loss, other in pairs)
    good = result["largest_difference"] <= TOLERANCE
    if case.resumed:
        again = finetune(case, root, check, device, "resumed", KILLED_AFTER)
        result["resumed_equal"] = again.losses == on_device.losses
        good &= result["resumed_equal"]
    return {**result, "verdict": "right" if good else "wrong", "seconds": time.monotonic() - begun}


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    losses: list[float]
    memory: dict[str, int]


def finetune(case: Case, root: Path, check: Check, device: str, where: str, killed_after: int | None = None) -> Outcome:
    """Run the command, once more from where it was killed if it is to be; return its losses."""
    output = root / f"{case.name}-{where}".replace(" ", "-")
    length = 64 if check.settings.quick else 128
    words = [
        "--model", root / case.model, "--data", root / "chats.jsonl", "--seq-len", length, "--dtype", "fp32",
        "--steps", STEPS, "--lr", "1e-3", "--deterministic", "--no-save", "--host-memory", "1GiB",
        "--gpu", device.rpartition(":")[2], "--output", output, *case.words,
    ]  # fmt: skip
    log = check.output / f"command-{output.name}.log"
    with log.open("w") as file:
        process = _start(words, case, file)
        if killed_after is not None:
            while process.poll() is None and len(_losses(output)) < killed_after:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = _start([*words, "--resume"], case, file)
        status = process.wait()
    text = log.read_text()
    if status:
        raise RuntimeError(f"exit status {status}, {log.name} ends with: {text[-300:]}")
    told = [line.removeprefix("MEMORY ") for line in text.splitlines() if line.startswith("MEMORY ")]
    return Outcome(list(_losses(output).values()), json.loads(told[-1]) if told else {})


def _start(words: list[Any], case: Case, log: Any) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONPATH=str(ROOT), **case.environment)
    command = [sys.executable, "-c", RUN, *map(str, words)]
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _losses(output: Path) -> dict[int, float]:
    lines = read_metrics(output / "run" / "metrics.jsonl")
    return {line["step"]: line[LOSS] for line in lines if LOSS in line}
