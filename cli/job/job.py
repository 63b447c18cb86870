"""A run that can begin, with everything that was chosen and opened for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import GenerationConfig, PreTrainedTokenizerBase

from cli.job.model import ModelChoice
from cli.job.outputs import Outputs
from cli.options.objectives import Items, ObjectiveTraits
from cli.options.schedule import LearningRate
from cli.options.settings import Settings
from common.data import Batches
from common.hardware.machine import Gpu, describe_machine, torch_name
from common.models.adapters.adapted_model import AdaptedModel
from common.models.checkpoint.companions import Companions
from common.models.checkpoint.compressed.formats import Gguf, method_of
from common.models.checkpoint.shards import rounding
from common.models.checkpoint.watched import WatchedFiles
from common.models.generation import FILE, generation_config_of, stops_of
from common.units import format_bytes, format_count
from fuyou.config import EngineConfig
from fuyou.optimizer.chunk_update import slow_updates
from fuyou.planner import RunPlan, TrainingJob

if TYPE_CHECKING:  # fcdp takes long to import, and one process does without
    from fcdp.trainer import Trainer
    from fuyou import Engine

TrainedModel: TypeAlias = "Engine | Trainer"

_SHOWN_CLASSES = 8
TEMPLATE_DATE = "date in chat templates"  # Key in the committed state of the day that chat templates write


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job is a run that can begin: what it trains, on what, where, and until when."""

    settings: Settings
    engine: EngineConfig  # All options of the engine; in memory, as far as they apply there
    choice: ModelChoice
    model: AdaptedModel  # Open, without its weights
    training: TrainingJob | None = None  # What one rank trains out of core; None: ranks train in memory
    plan: RunPlan | None = None  # Of a run on one machine; ranks plan when they have met
    watched: WatchedFiles = field(default_factory=WatchedFiles)  # --model and --adapter before they were read
    warnings: Sequence[str] = ()  # About these directories
    unplaced: str = ""  # What the checkpoint has that the model has no place for, in words

    batches: Batches
    held_out: Batches | None = None  # Data to evaluate with, in a fixed order; None: no evaluation
    data_key: str  # Digest that changes with the tokens that are trained on
    tokenizer: PreTrainedTokenizerBase | None = None  # None: there are no data
    seq_len: int  # Tokens per sequence
    learning_rate: LearningRate

    gpu: Gpu | None  # GPU that computes; None: the CPU does
    outputs: Outputs  # What the run has written
    ssd: tuple[Path, ...]  # Directories, one per drive, in which the store's own directories are made
    run_name: str  # Name of the store's directory in each of `ssd`
    is_there: bool = False  # Whether a run is there already
    fixed: Mapping[str, Any]  # Options that a continued run must keep, as typed

    @property
    def output(self) -> Path:
        """Output directory, which exists."""
        return self.settings.output_directory

    @property
    def checkpoint(self) -> Path | None:
        """Directory of the checkpoint; None for a preset, whose weights are random."""
        return self.choice.checkpoint

    @property
    def architecture(self) -> str:
        """Name of the model's class."""
        return type(self.model.base).__name__

    @cached_property
    def parameters(self) -> int:
        """Number of the model's parameters, without adapters."""
        return self.model.parameters

    @property
    def device(self) -> str:
        return torch_name(self.gpu)

    @property
    def traits(self) -> ObjectiveTraits:
        return self.settings.traits

    @property
    def steps(self) -> int:
        return self.learning_rate.total

    @property
    def rows(self) -> int:
        return self.settings.batch_size * self.batches.rows_per_item

    @property
    def configuration(self) -> str:
        """All options as TOML."""
        return self.settings.configuration(self.engine.dtype)

    @property
    def stored(self) -> TrainingJob:
        """The run of one rank as its store is: with blocks in pieces where whole ones do not fit this machine.

        With several ranks, of whole blocks: what their devices have in common is known when they have met.
        """
        assert self.training is not None
        return self.training if self.plan is None else self.plan.fitted

    @property
    def store_bytes(self) -> int:
        """Bytes that the store takes on all SSDs of one node, without activations.

        Where several ranks train in memory: bytes of two commits, as the older one goes when the newer is complete.
        """
        if self.training is None:
            return 2 * self.model.trained_parameters * 12
        return self.stored.record_bytes * (self.settings.gpus_per_node or 1)

    @property
    def computing_on(self) -> str:
        what = self.gpu.name if self.gpu else "the CPU"
        if self.settings.nodes is None:
            return what
        ranks = self.settings.gpus_per_node or 1
        ranks_of = f"{ranks} {'ranks' if ranks > 1 else 'rank'} on {what}"
        return ranks_of if self.settings.nodes == 1 else f"{self.settings.nodes} nodes, {ranks_of} in each,"

    @property
    def companions(self) -> Companions | None:
        """The tokenizer and the like that a result gets, as they are now; None: there are none, of a preset."""
        saved = self.engine.saved_adapter
        return (
            None
            if self.checkpoint is None
            else Companions(self.checkpoint, None if saved is None else saved.directory)
        )

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """The generation configuration that comes with the checkpoint."""
        return generation_config_of(self.choice.config)

    @cached_property
    def added_stops(self) -> list[int]:
        """Tokens that end the answers of the data, or of earlier ones of the adapters, at which generation with the
        checkpoint does not stop."""
        if not (self.settings.save and self.model.task_type.generates):
            return []
        stops = list(self.batches.stops)
        saved = self.engine.saved_adapter
        if saved is not None and (saved.directory / FILE).is_file():
            stops += stops_of(generation_config_of(self.choice.config, saved.directory))
        known = stops_of(self.generation_config)
        return [token for token in dict.fromkeys(stops) if token not in known]

    def close(self) -> None:
        self.batches.close()
        if self.held_out is not None:
            self.held_out.close()

    def header(self) -> str:
        rate = self.learning_rate
        source = "random weights" if self.checkpoint is None else str(self.checkpoint)
        source = "" if source == self.settings.model else f", {source}"
        store = ", ".join(str(path / self.run_name) for path in self.ssd)
        if self.settings.in_memory:
            store = f"a commit every {self.engine.store.commit_every:,} steps in {store}"
        warmup = f" after {rate.warmup:,} of warm-up" if rate.warmup else ""
        lines = {
            "model": f"{self.settings.model}: {self.architecture}, {format_count(self.parameters)} parameters{source}",
            "adapters": self._adapters(),
            "warning": "\n".join(self._warnings()),
            "weights": self._weights(),
            "not used": self.unplaced,
            "machine": f"{describe_machine()}; computing on {self.computing_on} in {self.engine.dtype}",
            "store": f"{store}: {format_bytes(self.store_bytes)}",
            "data": self.batches.description,
            "held out": "" if self.held_out is None else self.held_out.description,
            "stops": self._stops(),
            "learns": self._learns(),
            "steps": f"{self.steps:,} of {self._batch()} x {self.seq_len:,} tokens; "
            f"learning rate {rate.peak:g}, {rate.schedule}{warmup}",
            "updates": "" if self.settings.in_memory else " ".join(slow_updates(self.engine.precision) or ()),
            "output": f"{self.output}{'' if self.settings.save else ': no checkpoint (--no-save)'}",
        }
        return "\n".join(
            f"{name:8} {text}".replace("\n", f"\n{'':8} ") for name, text in lines.items() if text
        )

    def _adapters(self) -> str:
        adapters = self.model.adapters
        if adapters is None:
            return ""
        count = adapters.trained_count
        share = adapters.trained_count / self.parameters
        what = f"{format_count(count)} parameters, {share:.2%} of the model's, on {adapters.where}"
        return f"{self.settings.adapters_in_words}: {what}"

    def _warnings(self) -> Iterator[str]:
        yield from self.warnings
        saved = self.engine.saved_adapter
        if saved is not None and not self.settings.resume and (warning := saved.warning(self.checkpoint)):
            yield warning
        if self.choice.base is not None and (frozen := self.model.frozen_heads):
            yield (
                f"the new head ({', '.join(frozen)}) has random values and keeps them, as nothing trains it: name it "
                "in --lora-targets, or in the modules_to_save of --peft-config"
            )
        if self.tokenizer is not None and (unknown := self.model.unknown_tokens(self.batches.stops)):
            yield (
                f"answers end with {' and '.join(map(repr, self.tokenizer.convert_ids_to_tokens(unknown)))}, whose "
                "embedding is 0 in this model and stays so: it hardly learns to stop. Train the token in the "
                "embeddings and in the head (--peft-config with trainable_token_indices), or give --chat-template "
                "zephyr, which ends answers with EOS"
            )

    def _batch(self) -> str:
        what = self.traits.counts
        return (
            f"{self.settings.batch_size:,} {what}, {self.rows:,}" if what else f"{self.settings.batch_size:,}"
        )

    def _learns(self) -> str:
        if self.settings.objective == "sft":
            return ""
        against = " against the model as it is before the first step" if self.traits.needs_reference else ""
        named = [f"{name} {value:g}" for name, value in self.settings.named(self.traits.options).items()]
        dropout = ["without dropout"] * self.traits.compares
        classes = self._classes() if self.traits.items is Items.TEXTS else ""
        return ", ".join([f"{self.settings.objective}{against}", *named, *dropout]) + classes

    def _classes(self) -> str:
        names = [str(name) for name in (self.choice.config.id2label or {}).values()]
        others = ", ..." if len(names) > _SHOWN_CLASSES else ""
        return f", {len(names):,} classes: {', '.join(names[:_SHOWN_CLASSES])}{others}"

    def _stops(self) -> str:
        if not self.added_stops:
            return ""
        assert self.tokenizer is not None
        new, known = (
            " and ".join(repr(self.tokenizer.convert_ids_to_tokens(token)) for token in tokens) or "nothing"
            for tokens in (self.added_stops, stops_of(self.generation_config))
        )
        return (
            f"the answers end with {new}, where the result's {FILE} stops (the model's stops at {known}"
            f"{'; peft reads that one' if self.model.adapters is not None else ''})"
        )

    def _weights(self) -> str:
        method = None if self.checkpoint is None else method_of(self.checkpoint)
        if method is None:
            is_rounded = self.engine.weights.frozen_dtype not in ("int8", "nf4")
            return rounding(self.checkpoint, self.engine.dtype) if is_rounded else ""
        stored = f"{method.name} in the checkpoint"
        dtype = self.engine.dtype
        is_adapted = self.model.adapters is not None
        keeps_bytes = self.engine.weights.frozen_dtype in (None, "checkpoint")
        if is_adapted and keeps_bytes and self.training is not None:
            exception = ""
            widened = self.stored.layout.widened
            if widened:
                exception = f" (but for {format_count(widened)}, whose tensors blocks in pieces would cut)"
            if isinstance(method, Gguf) and method.others:
                exception += f" (but for {method.others}, stored as {dtype})"
            return f"{stored}, frozen in its own bytes{exception}; they compute in {dtype}"
        return (
            f"{stored}, dequantized{f'; written as {dtype}' if self.settings.save and not is_adapted else ''}"
        )
