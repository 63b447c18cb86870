"""Plain PyTorch with everything in the GPU's own memory: what the engine gives away by streaming.

bf16 computation, fp32 masters, fused AdamW on the GPU, activation checkpointing per block: what the engine computes,
without tiers. It may use the whole card.
"""

import gc
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, logging

from common.models.flops import hardware_flops_per_token, model_flops_per_token
from gpu.journal import Check, Skip, describe
from gpu.limits import synchronize
from gpu.presets import model_config, random_batch

BYTES_PER_PARAMETER = 20
"""bf16 weights and gradients, fp32 masters, gradients and two moments."""
MICRO_BATCHES = (16, 8, 4, 2, 1)


def run(check: Check) -> None:
    logging.set_verbosity_error()
    preset = check.name.partition(":")[2]
    device = torch.device(check.settings.device)
    model = _build(preset, device)
    parameters = sum(p.numel() for p in model.parameters())
    if check.cuda:
        free, total = torch.cuda.mem_get_info(device)
        if free < (BYTES_PER_PARAMETER - 2) * parameters * 1.1:
            raise Skip(f"{preset} needs {BYTES_PER_PARAMETER * parameters / 2**30:.0f} GiB of device memory")
        check.note(device_memory_bytes=total)
    check.note(preset=preset, parameters=parameters, seq_len=check.settings.seq_len)
    loop = InMemory(model)
    micro = MICRO_BATCHES[0]
    seconds_per_row = 0.0
    for rows in check.settings.batches:
        if 3 * rows * seconds_per_row > check.left():
            check.add("rows", batch=rows, why=f"not run: {check.left():.0f} s left")
            continue
        row, micro = _measure(check, loop, rows, micro)
        seconds_per_row = row.get("seconds", 0.0) / rows
        engine = check.earlier(f"engine:{preset}").get("rows", [])
        same = next((other for other in engine if other["batch"] == rows and "seconds" in other), None)
        if same is not None and "seconds" in row:
            row["engine_over_in_memory"] = same["seconds"] / row["seconds"]
        check.add("rows", **row)


def _build(preset: str, device: torch.device) -> Any:
    """Random weights, made where they are used."""
    config = model_config(preset)
    config.use_cache = False
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class InMemory:
    """The loop: gradients of micro-batches are summed in fp32, as in the engine."""

    def __init__(self, model: Any):
        self.model = model
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        cuda = self.weights[0].is_cuda
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5, weight_decay=0.01, fused=cuda)

    def step(self, batch: dict[str, torch.Tensor], micro: int) -> float:
        device, items = self.weights[0].device, batch["labels"][:, 1:].numel()
        total = torch.zeros((), device=device)
        for start in range(0, batch["labels"].shape[0], micro):
            part = {name: value[start : start + micro].to(device) for name, value in batch.items()}
            loss = self.model(**part, num_items_in_batch=items).loss
            loss.backward()
            total += loss.detach()
            for weight, master in zip(self.weights, self.masters, strict=True):
                assert master.grad is not None
                if weight.grad is not None:
                    master.grad.add_(weight.grad)
                    weight.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
        return float(total)


def _measure(check: Check, loop: InMemory, rows: int, micro: int) -> tuple[dict[str, Any], int]:
    """A row of the table, and the micro-batch that fitted (smaller ones are tried after running out of memory)."""
    device, seq_len = torch.device(check.settings.device), check.settings.seq_len
    batch = random_batch(loop.model.config, rows, seq_len)
    why = ""
    for size in (size for size in MICRO_BATCHES if size <= micro):
        try:
            loop.step(batch, size)
            synchronize(device)
            began, steps = time.monotonic(), 0
            while steps < 3 and (not steps or check.left() > 5):
                loop.step(batch, size)
                steps += 1
            synchronize(device)
            seconds = (time.monotonic() - began) / steps
        except torch.OutOfMemoryError as error:
            why = describe(error)
            for weight, master in zip(loop.weights, loop.masters, strict=True):
                weight.grad = None
                assert master.grad is not None
                master.grad.zero_()
            gc.collect()
            torch.cuda.empty_cache()
            continue
        per_second = rows * seq_len / seconds
        row = {
            "batch": rows, "micro_batch": min(rows, size), "steps": steps, "seconds": seconds,
            "tokens_per_second": per_second,
            "model_flops_per_second": model_flops_per_token(loop.model, seq_len) * per_second,
            "hardware_flops_per_second": hardware_flops_per_token(loop.model, seq_len) * per_second,
            "device_peak_bytes": torch.cuda.max_memory_reserved(device) if check.cuda else None,
        }  # fmt: skip
        return row, size
    return {"batch": rows, "why": f"failed: {why}"}, 1
