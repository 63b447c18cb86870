"""A run that can begin, with everything that was chosen and opened for it."""

from dataclasses import dataclass, fields
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import PreTrainedConfig

from cli.job.machine import training_of
from cli.options.schedule import LearningRate
from cli.options.settings import Settings
from common.data import Batches
from common.hardware.machine import Gpu, describe_machine, torch_name
from common.models.checkpoint.compressed.formats import method_of
from common.models.task_type import TaskType
from common.options import spelled
from common.units import format_bytes, format_count
from fuyou.layout.record import Precision
from fuyou.layout.share import Share
from fuyou.planner import PlannerContext
from fuyou.planner.training_job import fitting_job
from fuyou.runtime.device import memory_limits, open_device

if TYPE_CHECKING:  # fcdp takes long to import, and one process does without
    from fcdp.trainer import Trainer
    from fuyou import Engine

TrainedModel: TypeAlias = "Engine | Trainer"

TEMPLATE_DATE = "date in chat templates"  # Key in the committed state of the day that chat templates write


@dataclass(frozen=True)
class QuantizedStore:
    """A store on one node in which frozen weights are kept in fewer bits."""

    nbytes: int
    widened: int = 0  # See :attr:`fuyou.layout.model_layout.ModelLayout.widened`


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A setup is what a run trains and where, found out without opening anything large."""

    settings: Settings
    config: PreTrainedConfig  # Of the model
    checkpoint: Path | None  # Directory of the checkpoint; None for a preset, whose weights are random
    gpu: Gpu | None  # GPU that computes; None: the CPU does
    output: Path  # Output directory, which exists
    ssd: tuple[Path, ...]  # Directories, one per drive, in which the store's own directories are made
    run_name: str  # Name of the store's directory in each of `ssd`
    seq_len: int  # Tokens per sequence
    template_date: date | None = None  # Day that chat templates write; None: there are no data

    @property
    def known(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(Setup)}

    @property
    def device(self) -> str:
        return torch_name(self.gpu)

    @cached_property
    def context(self) -> PlannerContext:
        """The run as a planner sees it, alone on this machine."""
        device, settings = open_device(self.device), self.settings
        limits = host_bytes, device_bytes = memory_limits(device, settings.host_memory, settings.device_memory)
        job = fitting_job(training_of(settings), device_bytes, host_bytes, device.shares_host_memory)
        return PlannerContext(job, device, limits, self.ssd)


@dataclass(frozen=True, kw_only=True)
class Job(Setup):
    """A job is a run that can begin: its settings, its model, its data and its places on the drives."""

    architecture: str  # Name of the model's class
    vocab_size: int
    parameters: int
    batches: Batches
    data_key: str  # Digest that changes with the tokens that are trained on
    learning_rate: LearningRate
    adapter_parameters: int = 0  # Numbers in the adapters, where those are trained instead of the weights; else 0
    held_out: Batches | None = None  # Data to evaluate with, in a fixed order; None: no evaluation
    frozen_parameters: int = 0  # Parameters in vision towers that stay frozen while all other weights are trained
    task_type: TaskType = TaskType.CAUSAL_LM  # Task that the model's head is for

    @cached_property
    def quantized(self) -> QuantizedStore | None:
        """The store of one node, if it keeps frozen weights in fewer bits.

        With several ranks, of whole blocks: what their devices have in common is known when they have met.
        """
        settings = self.settings
        if not settings.trains_adapters or (settings.nodes is not None and not settings.ssd):
            return None
        compressed = self.checkpoint is not None and method_of(self.checkpoint) is not None
        if not compressed if settings.frozen_dtype is None else settings.frozen_dtype == "plain":
            return None
        share = Share(settings.nodes or 1, settings.gpus_per_node or 1)
        job = self.context.job if settings.nodes is None else training_of(settings)
        return QuantizedStore(job.among(share).record_bytes * share.ranks_per_node, job.shape.widened)

    @property
    def computing_on(self) -> str:
        if self.settings.nodes is not None:
            ranks, what = self.settings.gpus_per_node or 1, self.gpu.name if self.gpu else "the CPU"
            ranks_of = f"{ranks} {'ranks' if ranks > 1 else 'rank'} on {what}"
            return ranks_of if self.settings.nodes == 1 else f"{self.settings.nodes} nodes, {ranks_of} in each,"
        return self.gpu.name if self.gpu else "the CPU"

    @property
    def steps(self) -> int:
        return self.learning_rate.total

    @property
    def store_bytes(self) -> int:
        """Bytes that the store takes on all SSDs of one node, without activations.

        Where several ranks train in memory: bytes of two commits, as the older one goes when the newer is complete.
        """
        settings = self.settings
        if self.quantized is not None:
            return self.quantized.nbytes
        width, optimizer = 2 if settings.dtype == "bf16" else 4, settings.optimizer
        if settings.nodes is not None and not settings.ssd:
            return 2 * (self.adapter_parameters or self.parameters) * 12
        slots, nodes = 2, settings.nodes or 1
        if settings.trains_adapters:  # every node has all parameters, and a part of the states
            in_fp32 = 4 + Precision.named("fp32", optimizer).state_bytes / nodes
            return self.parameters * width + int(self.adapter_parameters * in_fp32) * slots
        trained = self.parameters - self.frozen_parameters
        share = width + Precision.named(settings.dtype, optimizer).state_bytes / nodes
        return self.frozen_parameters * width + int(trained * slots * share)

    @property
    def rows(self) -> int:
        return self.settings.batch_size * self.batches.rows_per_item

    @property
    def _objective(self) -> dict[str, Any]:
        settings = self.settings
        if settings.objective == "sft":
            return {}
        values = {spelled(name): getattr(settings, name) for name in sorted(settings.traits.options)}
        return {"--objective": settings.objective, **values}

    def close(self) -> None:
        self.batches.close()
        if self.held_out is not None:
            self.held_out.close()

    def header(self) -> str:
        settings, rate = self.settings, self.learning_rate
        source = "random weights" if self.checkpoint is None else str(self.checkpoint)
        source = "" if source == settings.model else f", {source}"
        store = ", ".join(str(path / self.run_name) for path in self.ssd)
        if settings.nodes is not None and not settings.ssd:
            store = f"a commit every {settings.commit_interval:,} steps in {store}"
        warmup = f" after {rate.warmup:,} of warm-up" if rate.warmup else ""
        lines = {
            "model": f"{settings.model}: {self.architecture}, {format_count(self.parameters)} parameters{source}",
            **self._adapters(),
            **self._compressed(),
            "machine": f"{describe_machine()}; computing on {self.computing_on} in {settings.dtype}",
            "store": f"{store}: {format_bytes(self.store_bytes)}",
            "data": self.batches.description,
            **({} if self.held_out is None else {"held out": self.held_out.description}),
            **({"learns": self._learns()} if self._objective else {}),
            "steps": f"{self.steps:,} of {self._batch()} x {self.seq_len:,} tokens; "
            f"learning rate {rate.peak:g}, {rate.schedule}{warmup}",
            "output": f"{self.output}{'' if settings.save else ': no checkpoint (--no-save)'}",
        }
        return "\n".join(f"{name:8} {text}".replace("\n", f"\n{'':8} ") for name, text in lines.items())

    def _batch(self) -> str:
        size = self.settings.batch_size
        what = self.settings.traits.counts
        return f"{size:,} {what}, {self.rows:,}" if what else f"{size:,}"

    def _learns(self) -> str:
        given = {name[2:]: value for name, value in self._objective.items() if name != "--objective" and value}
        named = [f"{name} {value:g}" for name, value in given.items()]
        against = " against the model as it is before the first step" if self.settings.traits.needs_reference else ""
        return ", ".join([f"{self.settings.objective}{against}", *named])

    def _compressed(self) -> dict[str, str]:
        method = None if self.checkpoint is None else method_of(self.checkpoint)
        if method is None:
            return {}
        stored = f"{method.name} in the checkpoint"
        if self.quantized is not None and self.settings.frozen_dtype in (None, "checkpoint"):
            exception = ""
            if self.quantized.widened:
                exception = (
                    f" (but for {format_count(self.quantized.widened)}, whose tensors blocks in pieces would cut)"
                )
            return {"weights": f"{stored}, frozen in its own bytes{exception}; they compute in {self.settings.dtype}"}
        writes = self.settings.save and not self.settings.trains_adapters
        return {"weights": f"{stored}, dequantized{f'; written as {self.settings.dtype}' if writes else ''}"}

    def _adapters(self) -> dict[str, str]:
        settings = self.settings
        if not settings.trains_adapters:
            return {}
        what = f"LoRA of rank {settings.lora_rank}" if settings.lora_rank is not None else str(settings.peft_config)
        if settings.adapter is not None:
            what = f"those of {settings.adapter}, trained further"
        part = self.adapter_parameters / self.parameters
        return {"adapters": f"{what}: {format_count(self.adapter_parameters)} parameters, {part:.2%} of the model's"}
