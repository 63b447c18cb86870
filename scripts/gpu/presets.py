"""Training speed of one preset at several batch sizes, and which resource bounds each."""

import gc
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, logging

import fuyou
import fuyou.model.open_model
from common.errors import FinetuneError
from common.models.checkpoint.random_source import RandomSource
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.units import format_bytes
from gpu.journal import DATA_PREFIX, STORE_BYTES, Check, Settings, Skip, describe
from gpu.profiling import profile_step

RUN_NAME = f"{DATA_PREFIX}store"
RESERVE_BYTES = 6 << 30  # Left free on the drive, for block inputs and for everything else
MEASURED_STEPS = 2


def run(check: Check) -> None:
    logging.set_verbosity_error()
    preset = check.name.partition(":")[2]
    config = model_config(preset)
    parameters = sum(p.numel() for p in build_meta_model(config).parameters())
    clear_stores(check.ssd)
    free = shutil.disk_usage(check.ssd).free - (0 if check.settings.quick else RESERVE_BYTES)
    if free < STORE_BYTES * parameters:
        raise Skip(f"{preset} needs {format_bytes(int(STORE_BYTES * parameters))} on the drive")
    check.note(
        largest_parameters=free / STORE_BYTES,
        preset=preset, parameters=parameters, seq_len=check.settings.seq_len,
        device_memory=check.settings.device_memory or "all", host_memory=check.settings.host_memory or "available",
    )  # fmt: skip
    measured = MeasuredRates(check, config)
    try:
        measured.sweep()
    finally:
        measured.close()


def model_config(preset: str) -> PreTrainedConfig:
    """A preset's configuration; ``tiny`` is one of our own."""
    if preset == "tiny":
        return LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=128,
        )  # fmt: skip
    return load_config(preset)[0]


def clear_stores(ssd: Path) -> None:
    """Remove what an earlier section, or an earlier call that was killed, has left on the drive."""
    for path in ssd.glob(f"{DATA_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


class TiledSource(RandomSource):
    """Random weights, one small tile over and over: a family's own initialisation makes 40 M parameters a second."""

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self.read_rows(name, 0, self.model.get_parameter(name).shape[0])

    def reads_rows(self, name: str) -> bool:
        return True

    def read_rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        shape = torch.Size([stop - first, *self.model.get_parameter(name).shape[1:]])
        if len(shape) < 2:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        start = first * shape[1:].numel() % self._tile.numel()
        return (
            self._tile.roll(-start)
            .repeat(-(-shape.numel() // self._tile.numel()))[: shape.numel()]
            .view(shape)
        )

    @cached_property
    def _tile(self) -> torch.Tensor:
        return torch.randn(1 << 20, generator=torch.Generator().manual_seed(self.seed)) * 0.02


def open_engine(settings: Settings, config: PreTrainedConfig, **options: Any) -> fuyou.Engine:
    fuyou.model.open_model.RandomSource = TiledSource  # type: ignore[misc]
    return fuyou.Engine(
        config, ssd=[settings.ssd], run_name=RUN_NAME, device=settings.device, host_memory=settings.host_memory,
        device_memory=settings.device_memory, io="posix", **options,
    )  # fmt: skip


def random_batch(config: PreTrainedConfig, rows: int, seq_len: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, config.get_text_config().vocab_size, (rows, seq_len))
    return {"input_ids": tokens, "labels": tokens}


def memory_stats(check: Check) -> dict[str, int]:
    """How often the allocator gave everything back and tried again, and failed, so far."""
    stats = torch.cuda.memory_stats() if check.cuda else {}
    return {name: stats[name] for name in ("num_alloc_retries", "num_ooms") if name in stats}


def train_step(engine: fuyou.Engine, batch: dict[str, torch.Tensor]) -> fuyou.StepReport:
    engine(**batch).loss.backward()
    return engine.step()


class MeasuredRates:
    """One preset's engine, and what is measured with it."""

    def __init__(self, check: Check, config: PreTrainedConfig):
        self.check, self.config = check, config
        began = time.monotonic()
        self.engine: fuyou.Engine | None = open_engine(
            check.settings, config, overwrite=True, micro_batch=None,
            batch_shape=(check.settings.batches[0], check.settings.seq_len),
        )  # fmt: skip
        seconds = time.monotonic() - began
        check.note(fill={"seconds": seconds, "bytes": self.engine.created_bytes})

    def sweep(self) -> None:
        """Every batch size that there is time for, then a profile of the largest."""
        seconds_per_token = seconds = 0.0
        reached = 0
        for rows in self.check.settings.batches:
            tokens = rows * self.check.settings.seq_len
            # A warm-up and one measured step
            expected = 2 * max(seconds, seconds_per_token * tokens * 0.7) + 5
            if reached and expected > self.check.left():
                self.check.add("rows", batch=rows, why=f"not run: {self.check.left():.0f} s left")
                continue
            try:
                seconds = self._measure(rows)
            except FinetuneError as error:  # the budgets, or the device, do not hold this batch
                self.check.add("rows", batch=rows, why=f"failed: {describe(error)}")
                if not self._open.in_step:
                    continue  # the engine is as it was
                self._reopen()
                seconds = self._measure(rows)
            seconds_per_token, reached = seconds / tokens, rows
        if reached and self.check.left() > 2 * seconds + 15:
            batch = random_batch(self.config, reached, self.check.settings.seq_len)
            name = self.check.name.replace(":", "-")
            self.check.attempt("timeline", lambda: profile_step(self._open, batch, self.check.settings, name))

    @property
    def _open(self) -> fuyou.Engine:
        assert self.engine is not None
        return self.engine

    def _measure(self, rows: int) -> float:
        engine, check, seq_len = self._open, self.check, self.check.settings.seq_len
        batch = random_batch(self.config, rows, seq_len)
        if check.cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        # Plans, allocates, loads kernels; its write-back continues in the next step
        train_step(engine, batch)
        warm_up = time.monotonic() - began
        before, began = engine.io_bytes(), time.monotonic()
        reports: list[fuyou.StepReport] = []
        while len(reports) < MEASURED_STEPS:
            reports.append(train_step(engine, batch))
            if check.left() < 1.3 * reports[-1].seconds + 20:
                break
        seconds = (time.monotonic() - began) / len(reports)
        after = engine.io_bytes()
        bounds = {
            name: sum(report.bound_seconds[name] for report in reports) / len(reports)
            for name in reports[0].bound_seconds
        }
        largest = max(bounds, key=lambda name: bounds[name])
        plan, per_second = engine.memory_plan, rows * seq_len / seconds
        check.add(
            "rows", batch=rows, tokens=rows * seq_len, micro_batch=plan.batch.micro_rows, steps=len(reports),
            warm_up_seconds=warm_up, seconds=seconds, each_seconds=[report.seconds for report in reports],
            tokens_per_second=per_second,
            model_flops_per_second=engine.model_flops_per_token(seq_len) * per_second,
            hardware_flops_per_second=engine.hardware_flops_per_token(seq_len) * per_second,
            bounds=bounds, largest_bound=largest, overlap_efficiency=bounds[largest] / seconds,
            read_bytes=(after[0] - before[0]) / len(reports), written_bytes=(after[1] - before[1]) / len(reports),
            device_peak_bytes=engine.device_peak_bytes, memory=memory_stats(check), device_plan_bytes=plan.device_bytes,
            host_peak_bytes=engine.host_peak_bytes - engine.host_baseline_bytes, host_plan_bytes=plan.host_bytes,
            counts=vars(plan.counts), losses=[report.loss for report in reports],
        )  # fmt: skip
        return seconds

    def _reopen(self) -> None:
        """After running out of device memory: without the allocator's cap, from the last committed step."""
        self.close()
        gc.collect()
        torch.cuda.empty_cache()
        self.engine = open_engine(
            self.check.settings, self.config, resume=True,
            batch_shape=(self.check.settings.batches[0], self.check.settings.seq_len),
        )  # fmt: skip
        if self.check.cuda:  # the engine has just set it
            torch.cuda.set_per_process_memory_fraction(1.0, torch.device(self.check.settings.device))
        self.check.note(
            uncapped="After running out of memory, the allocator's cap was lifted for what follows"
        )

    def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()
