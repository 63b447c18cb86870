"""A small model trained both ways: as transformers does it in memory, and streamed as by the engine, without drives or
an optimizer process. The streamed one has the engine's schedule, parts, and computation; dictionaries replace what
would move bytes."""

import contextlib
import copy
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from common.models.adapters.default_targets import settle_targets
from common.models.adapters.options import ALL_LINEAR, DENSE_LINEAR
from common.models.adapters.targets import unmatched_entries
from common.models.meta_model import build_meta_model, widen_kept
from common.models.miniature import TOKENS, VOCABULARY
from common.models.task_type import TaskType, task_type_of
from common.randomness import own_random_numbers
from fuyou.layout.model_layout import BufferCounts, ModelLayout
from fuyou.layout.record import Record
from fuyou.model.loss.cross_entropy import targets_of
from fuyou.model.open_model import OpenModel
from fuyou.model.recompute.replay import BlockReplay
from fuyou.model.training_batch import TrainingBatch
from fuyou.optimizer.absent_gradients import AbsenceMarks, marked_absent
from fuyou.runtime.compute.step_computation import StepComputation
from fuyou.runtime.data_plane.data_plane import DataPlane
from fuyou.schedule.batch import Batch, BatchShape
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Activation, ComputeTask

ROWS = 2


class MemoryTwin:
    """A small model with random weights, trained as transformers trains it.

    Args:
        small: its configuration.
        adapters: what is trained, if the weights are frozen.
        trainable: name patterns of the trained parameters, if not all.
        packed: whether rows hold several documents, with position ids that restart.

    Raises:
        Exception: of any kind, if the family's code does not run with this configuration.
    """

    def __init__(
        self,
        small: PreTrainedConfig,
        dtype: torch.dtype,
        adapters: PeftConfig | None,
        trainable: Sequence[str] | None,
        packed: bool,
    ):
        self._small = small
        self._dtype = dtype
        self._plain = build_meta_model(small, dtype=dtype)
        # What the engine trains of this model: adapters for modules that exist in fewer layers, or names.
        self.adapters = _fitting_adapters(adapters, self._plain)
        self.trainable = trainable and _fitting_names(trainable, self._plain)
        middle = TOKENS // 2 + 1
        self._documents = [slice(0, middle), slice(middle, TOKENS)] if packed else [slice(None)]
        self.model: nn.Module
        # By every name of each parameter; None if there is none
        self.gradients: dict[str, torch.Tensor | None] = {}

    def build(self, layout: ModelLayout) -> None:
        """Build the model, of the engine's class, with its router loss and its trained parameters."""
        config = copy.deepcopy(self._plain.config)
        for part, asked in zip(config_parts(config), config_parts(self._small), strict=True):
            if hasattr(part, "output_router_logits"):
                part.output_router_logits = getattr(asked, "output_router_logits", False)
        with own_random_numbers(1):
            built = type(self._plain)._from_config(config, dtype=self._dtype)
        widen_kept(built)
        model: nn.Module = built
        if self.adapters is not None:
            # A copy, as peft fills in what is left out; the engine names things as inside
            model = get_peft_model(model, copy.deepcopy(self.adapters)).get_submodule("base_model.model")  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():  # so that no path is idle because it begins with zeros
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.1 if parameter.dim() > 1 else 0.02)
        trained = {
            name
            for record in layout.records
            for slot in record.parameters
            if slot.name in record.trained_names
            for name in slot.names
        }
        for name, value in model.named_parameters(remove_duplicate=False):
            value.requires_grad_(name in trained)
        self.model = model.train()
        if self._dtype != torch.float32 and (head := built.get_output_embeddings()) is not None:
            # Of logits in fp32, as the engine and most families compute it: some round it to the model's dtype.
            head.register_forward_hook(lambda _module, _inputs, logits: logits.float())

    def exchanged_module(self) -> str | None:
        """Return the name of a module that a forward pass replaces, as Big Bird's does by the length of rows."""
        kinds = {name: type(module) for name, module in self.model.named_modules()}
        with seeded(0), torch.no_grad():
            self.model(input_ids=self.batch(0)["input_ids"], use_cache=False)
        changed = (name for name, module in self.model.named_modules() if type(module) is not kinds.get(name))
        return next(changed, None)

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """Return the batch of a step: ``ROWS`` rows of ``TOKENS`` tokens."""
        generator = torch.Generator().manual_seed(10 + number)
        most = getattr(self._small.get_text_config(decoder=True), "vocab_size", VOCABULARY)
        ordinary = (4, VOCABULARY // 2) if most >= VOCABULARY else (0, most)  # special tokens lie at the ends
        tokens = torch.randint(*ordinary, (ROWS, TOKENS), generator=generator)
        task_type = task_type_of(self._small)
        labels = tokens.clone()
        if not task_type.generates:
            shape = (ROWS,) if task_type is TaskType.SEQUENCE_CLASSIFICATION else (ROWS, TOKENS)
            labels = torch.randint(0, self._small.num_labels or 2, shape, generator=generator)
        batch = {"input_ids": tokens, "labels": labels}
        if len(self._documents) > 1:
            for piece in self._documents:
                labels[:, piece.start] = -100
            positions = torch.cat([torch.arange(piece.stop - piece.start) for piece in self._documents])
            batch["position_ids"] = positions.expand(ROWS, -1).contiguous()
        return batch

    def run(self, batch: Mapping[str, torch.Tensor], shifts_labels: bool) -> float:
        """Run a forward and a backward pass, separately for each document; return the loss, and leave
        :attr:`gradients`.

        Raises:
            ArithmeticError: if the loss is not finite.
            Exception: of any kind, if the family's code does not run with this batch.
        """
        parts = [
            {name: batch[name][..., piece].contiguous() for name in ("input_ids", "labels")}
            for piece in self._documents
        ]
        counts = [int((targets_of(part["labels"], shifts_labels) != -100).sum()) for part in parts]
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for part, count in zip(parts, counts, strict=True):
            loss = self.model(**part, use_cache=False).loss * (count / sum(counts))
            loss.backward()
            total += float(loss)
        if not np.isfinite(total):
            raise ArithmeticError(f"its loss is {total}")
        self.gradients = {
            name: each.grad for name, each in self.model.named_parameters(remove_duplicate=False)
        }
        return total

    def repeats(self, batch: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the loss of a batch does not depend on random numbers."""
        losses = []
        for seed in (2, 3):
            with seeded(seed), torch.no_grad():
                losses.append(float(self.model(**batch, use_cache=False).loss))
        return losses[0] == losses[1]


def config_parts(config: PreTrainedConfig) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Return a configuration and that of its language model, which may be the same."""
    return config, config.get_text_config(decoder=True)


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    """Draw the same random numbers each time, for any caller, and leave the caller's as they were."""
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002
    try:
        with own_random_numbers(number):
            random.seed(number)
            np.random.seed(number)  # noqa: NPY002  # what a family's own code draws from
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _fitting_names(patterns: Sequence[str], plain: nn.Module) -> list[str]:
    names = [name for name, _ in plain.named_parameters()]
    return [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)] or names


def _fitting_adapters(adapters: PeftConfig | None, plain: PreTrainedModel) -> PeftConfig | None:
    """Return the adapters for modules that exist in fewer layers; on all linear layers if none do."""
    adapters = copy.deepcopy(adapters)
    if adapters is None:
        return None
    for field in ("layers_to_transform", "layers_pattern"):
        if getattr(adapters, field, None) is not None:
            setattr(adapters, field, None)
    if rows := getattr(adapters, "trainable_token_indices", None):
        few = (
            {name: _few_rows(given) for name, given in rows.items()}
            if isinstance(rows, dict)
            else _few_rows(rows)
        )
        adapters.trainable_token_indices = few  # type: ignore[attr-defined]
    if getattr(adapters, "target_modules", None) == DENSE_LINEAR:
        settle_targets(plain, adapters)
    _name_what_is_there(adapters, plain)
    targets = getattr(adapters, "target_modules", None)
    named = [name for name, _ in plain.named_modules()]
    if isinstance(targets, str) and targets != ALL_LINEAR:
        fits = any(re.fullmatch(targets, name) for name in named)
    else:
        ends = [targets] if isinstance(targets, str) else list(targets or ())
        fits = (
            ALL_LINEAR in ends
            or not ends
            or any(f".{name}".endswith(f".{end}") for name in named for end in ends)
        )
    if not fits and not getattr(adapters, "target_parameters", None):
        adapters.target_modules = ALL_LINEAR  # type: ignore[attr-defined]
    if isinstance(adapters, LoraConfig) and (
        adapters.rank_pattern or adapters.alpha_pattern or adapters.exclude_modules
    ):
        _drop_unmatched(adapters, plain)
    return adapters


def _name_what_is_there(config: PeftConfig, plain: nn.Module) -> None:
    """Let targets in layers that a model lacks be those of the same last name in its layers."""
    names = [f".{name}" for name, _ in chain(plain.named_modules(), plain.named_parameters())]
    for field in ("target_modules", "target_parameters"):
        targets = getattr(config, field, None)
        if isinstance(targets, list | set):
            fitting = {
                each if any(name.endswith(f".{each}") for name in names) else each.rpartition(".")[2]
                for each in targets
            }
            setattr(config, field, sorted(fitting))


def _drop_unmatched(config: LoraConfig, plain: nn.Module) -> None:
    """Leave out patterns and exclusions for what is not among the adapted modules of fewer layers."""
    model: Any = copy.deepcopy(plain)
    tuner: Any = get_peft_model(model, copy.deepcopy(config), low_cpu_mem_usage=True).base_model
    names = [name for name, _ in chain(plain.named_modules(), plain.named_parameters())]
    adapted = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
    for field, entry in [*unmatched_entries(names, adapted, config)]:
        given = getattr(config, field)
        if isinstance(given, dict):
            del given[entry]
        else:
            setattr(config, field, None if given == entry else [each for each in given if each != entry])


def _few_rows(tokens: Sequence[int]) -> list[int]:
    return sorted({token % 16 for token in tokens})  # tokens of the small vocabulary


class _Buffers:
    """Buffers that are allocated on first use, with the requested size."""

    def __init__(self) -> None:
        self.by_index: dict[int, torch.Tensor] = {}

    def values(self, index: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self.bytes(index, count * dtype.itemsize).view(dtype)

    def bytes(self, index: int, count: int) -> torch.Tensor:
        held = self.by_index.get(index)
        if held is None or held.numel() < count:
            held = self.by_index[index] = torch.zeros(count, dtype=torch.uint8)
        return held[:count]


class SmallStep:
    """Streams steps of a model on the CPU, in fp32.

    Args:
        model: opened for the CPU in fp32.
        parameters: values by any of their names.
    """

    def __init__(self, model: OpenModel, parameters: Mapping[str, torch.Tensor]):
        self._model = model
        self._layout = model.layout
        self._flat = {record.index: _flat(record, parameters) for record in self._layout.records}
        # As in a run: what a step has learnt about recomputing blocks, the next one makes use of.
        self._recomputations = BlockReplay()
        # Gradients by first name, in the order in which the backward pass has made them; None where nothing flows.
        self.gradients: dict[str, torch.Tensor | None] = {}

    def run(self, given: Mapping[str, torch.Tensor], micro_rows: int, chunk: int | None = None) -> float:
        """Run a forward and a backward pass, with rows in chunks of ``chunk`` tokens or whole; return the loss, and
        leave :attr:`gradients`."""
        batch = TrainingBatch.of(self._model, given, engine_loss=False)
        rows, length = batch.size
        planned = Batch(rows, length, micro_rows, chunk=chunk)
        room = 4 * planned.micro_batches * (len(self._layout.blocks) + 2)
        enough = {field.name: max(room, len(self._layout.records)) for field in fields(BufferCounts)}
        counts = BufferCounts(**enough)
        given_sizes = {"ring_chunks": 2, "chunk_elements": 1, "head_columns": length, "resident": ()}
        sizes: dict[str, Any] = {field.name: 0 for field in fields(MemoryPlan)} | given_sizes
        plan = MemoryPlan(**{**sizes, "counts": counts, "batch": planned})
        shape = BatchShape(planned.micro_batches, 0, rows * length, chunks=planned.chunks)
        tasks = Scheduler(self._layout, counts).training_step(1, shape)
        # By first name and first expert: parameters of experts may be in pieces.
        parts: dict[str, dict[int, torch.Tensor | None]] = defaultdict(dict)
        data_plane = cast(DataPlane, self._plane(plan, parts))
        cpu = torch.device("cpu")
        if planned.chunks > 1:
            micro = batch.chunks(planned.columns, cpu, self._model.stack)
        else:
            micro = batch.micro_batches(micro_rows, cpu, self._layout.precision.dtype)
        step = StepComputation(
            self._model, data_plane, tasks, micro, batch.label_count, self._recomputations, time.monotonic()
        )
        loss = float(step.forward())
        if step.router is not None:
            step.router.combine([step.router.local_sums()])
            loss += float(step.router.share)
        step.backward()
        self.gradients = {name: _joined(name, by_expert) for name, by_expert in parts.items()}
        return loss

    def _plane(self, plan: MemoryPlan, parts: dict[str, dict[int, torch.Tensor | None]]) -> SimpleNamespace:
        parameters: dict[Any, _Buffers] = defaultdict(_Buffers)
        gradients: dict[Any, _Buffers] = defaultdict(_Buffers)
        records = self._layout.records

        def start(task: ComputeTask) -> None:
            for index, buffer in task.places.items():
                parameters[records[index].kind].by_index[buffer] = self._flat[index].view(torch.uint8)

        def finish(task: ComputeTask) -> None:
            for index in task.visit.completes if task.last else ():
                record = records[index]
                buffer = gradients[record.kind]
                flat = buffer.values(task.gradients[index], record.numel, record.precision.dtype).clone()
                for slot, view in zip(record.parameters, record.views(flat).values(), strict=True):
                    is_absent = marked_absent(view.reshape(-1)[:1]).any()
                    parts[slot.names[0]][slot.experts[0] if slot.experts else 0] = None if is_absent else view

        buffers = SimpleNamespace(
            layout=self._layout,
            plan=plan,
            wide={},
            device=SimpleNamespace(
                torch_device=torch.device("cpu"),
                begin_compute=lambda task: None,
                end_compute=lambda task: None,
            ),
            parameters=parameters,
            gradients=gradients,
            activations={kind: _Buffers() for kind in Activation},
            key_gradients=_Buffers(),
            absence_marks=lambda record: AbsenceMarks(record, torch.device("cpu")),
        )
        heap = SimpleNamespace(trim=lambda: None)
        executor = SimpleNamespace(start=start, finish=finish)
        return SimpleNamespace(buffers=buffers, heap=heap, executor=executor)


def _joined(name: str, by_expert: dict[int, torch.Tensor | None]) -> torch.Tensor | None:
    values = [value for _, value in sorted(by_expert.items()) if value is not None]
    assert len(values) in (0, len(by_expert)), f"some experts of {name} have gradients, and some have none"
    return torch.cat(values) if len(values) > 1 else values[0] if values else None


def _flat(record: Record, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    flat = torch.zeros(record.numel, dtype=record.precision.dtype)
    views = record.views(flat)
    for slot in record.parameters:
        whole = next(parameters[name].detach() for name in slot.names if name in parameters)
        views[slot.name].copy_(slot.taken_from(whole))
    return flat
