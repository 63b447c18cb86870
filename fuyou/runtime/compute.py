"""Runs the compute tasks of one step, in the caller's thread: embedding, blocks, head, and back."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from common.data.rows import take_rows
from common.errors import FinetuneError
from common.models.task_type import TaskType
from fuyou.layout.record import Record
from fuyou.layout.visits import BEFORE_HEAD_PHASES, FORWARD_PHASES, Phase
from fuyou.model.block_calls import BlockCalls
from fuyou.model.loss import cross_entropy, targets_of
from fuyou.model.router_loss import RouterLoss, RouterPass, router_logits
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.absent_gradients import mark_absent
from fuyou.optimizer.gradient_sum import GradientSum, round_in_place, sum_of_squares
from fuyou.recompute.replay import Recomputations, Recorded
from fuyou.runtime.data_plane import DataPlane
from fuyou.schedule.memory_plan import MemoryPlan
from fuyou.schedule.tasks import Activation, Op, StepList, Task


class StepComputation:
    """One step's (or one evaluation's) computation, micro-batch by micro-batch.

    Args:
        stack: the model's parts.
        plane: buffers, and the executor that the other tasks run in.
        tasks: the step.
        batch: ``input_ids``, ``labels`` and the rest, ``[B, S]`` each; or lists, see :mod:`common.data.rows`.
        plan: how the batch is split.
        recomputations: how blocks are computed again; remembers from step to step.
        began: when the step began, on :func:`time.monotonic`'s clock.
        items: labels in the batches of all ranks together; None: this is the only one.
        router_loss: that is a part of the loss, if any is.
        task_type: what the head is for.
    """

    def __init__(
        self,
        stack: StreamedModel,
        plane: DataPlane,
        tasks: StepList,
        batch: Mapping[str, Any],
        plan: MemoryPlan,
        recomputations: Recomputations,
        began: float,
        items: int | None = None,
        router_loss: RouterLoss | None = None,
        task_type: TaskType = TaskType.CAUSAL_LM,
    ):
        self._stack, self._plane, self.tasks, self.began = stack, plane, tasks, began
        self._plan, self._recomputations = plan, recomputations
        self._dtype = plane.shape.precision.dtype
        self._device = plane.device.torch_device
        self._task_type = task_type
        targets = targets_of(batch["labels"], stack.family.shifts_labels)
        # On the device: CUDA divides by a number of the host's as multiplication by its reciprocal, which is not what
        # an ordinary loop (transformers' loss divides by such a tensor) gives.
        labels = (targets != -100).sum() if items is None else torch.tensor(items)
        self._items = labels.to(self._device, non_blocking=True)
        self.tokens = batch["input_ids"].numel()
        self._micro = self._split(batch, targets)
        self.router = None if router_loss is None else RouterPass(router_loss, self._router_masks(router_loss.masked))
        """To be settled between forward and backward pass, if the loss has a router loss."""
        self._calls: list[BlockCalls | None] = [None] * len(self._micro)
        self._random: dict[tuple[int, int], torch.Tensor] = {}
        self._recorded: dict[tuple[int, int], Recorded] = {}
        self._saved: list[float] = []
        self._sums: dict[int, GradientSum] = {}
        self._squares: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []
        self._todo: Iterator[Task] = iter([task for task in tasks.tasks if task.op is Op.COMPUTE])
        self._next: Task | None = next(self._todo, None)
        self.loss = float("nan")

    def _split(self, batch: Mapping[str, Any], targets: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        rows = min(batch["input_ids"].shape[0], self._plan.batch.micro_rows)
        result = []
        for start in range(0, batch["input_ids"].shape[0], rows):
            taken = take_rows(batch, start, start + rows)
            micro = {
                name: value.to(self._device, self._dtype if value.is_floating_point() else None, non_blocking=True)
                for name, value in taken.items()
                if name != "labels"
            }
            micro["targets"] = targets[start : start + rows].to(self._device, non_blocking=True)
            result.append(micro)
        return result

    def _router_masks(self, masked: bool) -> list[torch.Tensor]:
        """The tokens of each micro-batch that count for routers, fp32: those that a mask ``[B, S]`` does not hide."""
        result = []
        for micro in self._micro:
            mask = micro.get("attention_mask") if masked else None
            if mask is None or mask.dim() != 2:
                mask = torch.ones_like(micro["input_ids"])
            result.append(mask.flatten().float())
        return result

    # -- passes ---------------------------------------------------------------------------------------------------

    def forward(self) -> torch.Tensor:
        """Run everything up to the head; returns the batch's mean loss (this rank's part of it), an fp32 scalar."""
        while self._next is not None and self._next.visit is not None and self._next.visit.phase in FORWARD_PHASES:
            self._run(self._next)
            self._next = next(self._todo, None)
        total = self._losses[0]
        for loss in self._losses[1:]:
            total = total + loss
        self.loss = float(total)
        return total

    def backward(self) -> None:
        """Run the rest."""
        while self._next is not None:
            self._run(self._next)
            self._next = next(self._todo, None)

    def abandon(self) -> None:
        """Give the pass up before its head, but let what waits for it go on: the updates that a forward pass carries
        along belong to the step before, which is to be committed all the same."""
        while self._next is not None and self._next.visit is not None and self._next.visit.phase in BEFORE_HEAD_PHASES:
            self._plane.executor.finish(self._next)
            self._next = next(self._todo, None)

    @property
    def complete(self) -> bool:
        """Whether the backward pass has ended."""
        return self._next is None

    def gradient_norm(self) -> float:
        """Norm of the whole gradient, as the optimizer sees it (rounded to the compute dtype). For a single rank."""
        return float(torch.stack(self._squares).sum().sqrt())

    @property
    def recomputation_saved(self) -> float:
        """Fraction of the blocks' recomputation that was left out, in FLOPs."""
        return sum(self._saved) / len(self._saved) if self._saved else 0.0

    def _run(self, task: Task) -> None:
        assert task.visit is not None
        self._plane.executor.start(task)
        self._plane.device.begin_compute(task)
        match task.visit.phase:
            case Phase.EMBED_FORWARD:
                self._embed_forward(task)
            case Phase.BLOCK_FORWARD:
                self._block_forward(task, task.visit.layer)
            case Phase.HEAD:
                self._head(task)
            case Phase.HEAD_EVAL:
                self._head_eval(task)
            case Phase.BLOCK_BACKWARD:
                self._block_backward(task, task.visit.layer)
            case Phase.EMBED_BACKWARD:
                self._embed_backward(task)
        if task.last and task.gradient >= 0:
            self._finish_gradient(task)
        self._plane.device.end_compute(task)
        self._plane.executor.finish(task)
        self._plane.heap.trim()

    # -- visits ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _embed_forward(self, task: Task) -> None:
        self._random[-1, task.micro] = _random_state(self._device)
        with self._stack.bound(self._parameters(task), before=True):
            hidden, calls = self._stack.embed(self._model_inputs(task.micro))
        if hidden.dtype != self._dtype:
            raise FinetuneError(f"The embedding gives {hidden.dtype} where blocks compute in {self._dtype}.")
        self._calls[task.micro] = calls
        self._activation(task.output, hidden.shape).copy_(hidden)

    @torch.no_grad()
    def _block_forward(self, task: Task, layer: int) -> None:
        self._random[layer, task.micro] = _random_state(self._device)
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro))
        calls = self._call(task.micro)
        with self._stack.bound(self._parameters(task)), router_logits() as logits:
            result, self._recorded[layer, task.micro] = self._recomputations.forward(
                layer, hidden, calls, lambda: self._stack.block(layer, hidden, calls), self._kept(task)
            )
        if self.router is not None:
            self.router.add(task.micro, logits)
        self._activation(task.output, hidden.shape).copy_(result)

    @torch.enable_grad()
    def _head(self, task: Task) -> None:
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro)).detach()
        hidden.requires_grad_(task.output >= 0)
        loss: torch.Tensor | None = None
        for columns in self._columns(task.micro):
            with self._stack.bound(self._leaves(task), before=False):
                logits = self._logits(task.micro, hidden, columns)
                part, gradient = self._loss(task.micro, logits, columns, gradient=True)
                torch.autograd.backward(logits, gradient)
                del logits, gradient
            loss = part if loss is None else loss + part
        assert loss is not None
        self._losses.append(loss)
        self._pass_on(task, hidden)

    @torch.no_grad()
    def _head_eval(self, task: Task) -> None:
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro))
        with self._stack.bound(self._parameters(task), before=False):
            parts = [
                self._loss(task.micro, self._logits(task.micro, hidden, columns), columns, gradient=False)[0]
                for columns in self._columns(task.micro)
            ]
        self._losses.append(torch.stack(parts).sum())

    @torch.enable_grad()
    def _block_backward(self, task: Task, layer: int) -> None:
        shape = self._hidden_shape(task.micro)
        hidden = self._activation(task.inputs[0], shape).detach().requires_grad_(task.output >= 0)
        calls, recorded = self._call(task.micro), self._recorded.pop((layer, task.micro))
        losses: list[torch.Tensor] = []  # that it adds
        with self._stack.bound(self._leaves(task)), self._replayed(layer, task.micro) as replay:

            def run() -> torch.Tensor:
                replay.rewind()
                with router_logits() as logits:
                    output = self._stack.block(layer, hidden, calls)
                # Here, and not behind it: what the router loss needs of the block must be computed again, too.
                losses[:] = [] if self.router is None else self.router.losses(task.micro, logits)
                return output

            result, saved = self._recomputations.backward(layer, hidden, calls, run, self._kept(task), recorded)
            self._saved.append(saved)
            calls.backward(result, self._activation(task.inputs[1], shape), losses)
        self._pass_on(task, hidden)

    @torch.enable_grad()
    def _embed_backward(self, task: Task) -> None:
        with self._stack.bound(self._leaves(task), before=True), self._replayed(-1, task.micro):
            hidden, again = self._stack.embed(self._model_inputs(task.micro))
            lost = again.lost_gradient()
            if lost is not None:
                raise FinetuneError(
                    f"{type(self._stack.model).__name__} gives block {lost[0]} an argument{lost[1]} that carries a "
                    "gradient in this batch and none in one of text alone, and that gradient would be lost: freeze "
                    "what it comes from (vision tower and projector), and start anew."
                )
            values, gradients = self._call(task.micro).embedding_gradients(again)
            if hidden.requires_grad:
                values.append(hidden)
                gradients.append(self._activation(task.inputs[0], hidden.shape))
            if values:
                torch.autograd.backward(values, gradients)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _pass_on(self, task: Task, hidden: torch.Tensor) -> None:
        """Leave the gradient of a visit's input for the visit below, if that wants it."""
        if task.output >= 0:
            assert hidden.grad is not None
            self._activation(task.output, hidden.shape).copy_(hidden.grad)

    def _logits(self, micro: int, hidden: torch.Tensor, columns: slice) -> torch.Tensor:
        """``[b, s, V]`` for this range of tokens."""
        dim = self._stack.token_dim
        whole = columns == slice(0, hidden.shape[dim])
        inputs = self._micro[micro]
        batch = {name: value[:, columns] for name, value in inputs.items() if name in ("input_ids", "position_ids")}
        part = hidden if whole else hidden.narrow(dim, columns.start, columns.stop - columns.start)
        logits = self._stack.head(batch, part)
        return logits.unsqueeze(1) if self._task_type is TaskType.SEQUENCE_CLASSIFICATION else logits

    def _loss(
        self, micro: int, logits: torch.Tensor, columns: slice, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This range of tokens' share of the batch's mean loss, and its gradient with respect to the logits."""
        return cross_entropy(logits, self._micro[micro]["targets"][:, columns], self._items, gradient)

    def _columns(self, micro: int) -> list[slice]:
        """The ranges of tokens that go through the head at once: all, where it looks for the end of each row."""
        length = self._micro[micro]["input_ids"].shape[1]
        width = length if self._task_type is TaskType.SEQUENCE_CLASSIFICATION else self._plan.head_columns
        return [slice(start, min(start + width, length)) for start in range(0, length, width)]

    def _model_inputs(self, micro: int) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self._micro[micro].items() if name != "targets"}

    def _call(self, micro: int) -> BlockCalls:
        calls = self._calls[micro]
        assert calls is not None
        return calls

    def _hidden_shape(self, micro: int) -> tuple[int, ...]:
        return self._call(micro).hidden_shape

    def _activation(self, index: int, shape: tuple[int, ...]) -> torch.Tensor:
        buffers = self._plane.activations[Activation.HIDDEN]
        return _apart(buffers.values(index, math.prod(shape), self._dtype)).view(shape)

    def _kept(self, task: Task) -> torch.Tensor | None:
        """The buffer of kept outputs that a block's task writes or reads, if it has one."""
        if task.kept < 0:
            return None
        return _apart(self._plane.activations[Activation.KEPT].bytes(task.kept, self._plan.kept_bytes))

    def _parameters(self, task: Task) -> dict[str, torch.Tensor]:
        """The parameters of the task's records on the device, under all of their names, in the dtypes of the model."""
        return {
            name: torch.nn.Parameter(views[slot.name].to(self._stack.dtype_of(name)), requires_grad=False)
            for record, views in self._views(task)
            for slot in record.parameters
            for name in slot.names
        }

    def _leaves(self, task: Task) -> dict[str, torch.Tensor]:
        """The same, but what is trained are leaves whose gradients go to their record's sum. Tied names share one."""
        leaves: dict[str, torch.Tensor] = {}
        for record, views in self._views(task):
            trained = record.trained_names
            own = {name: torch.nn.Parameter(view, requires_grad=name in trained) for name, view in views.items()}
            if trained:
                if task.first and record.index not in self._sums:
                    self._sums[record.index] = GradientSum(record, self._sum_buffer(record, task.gradient))
                self._sums[record.index].attach({name: own[name] for name in trained})
            for slot in record.parameters:
                leaf = own[slot.name].to(self._stack.dtype_of(slot.name))
                leaves.update(dict.fromkeys(slot.names, leaf))
        return leaves

    def _views(self, task: Task) -> Iterator[tuple[Record, dict[str, torch.Tensor]]]:
        """The task's records, and their parameters in the device buffers by their first names."""
        assert task.visit is not None
        for index, buffer in task.parameters:
            record = self._plane.shape.records[index]
            flat = self._flat(record, buffer, decoded=task.micro > 0)
            # Each apart: some adapters swap a weight in place, which must not look like a change of its neighbours.
            yield record, {name: _apart(view) for name, view in record.views(flat).items()}

    def _flat(self, record: Record, buffer: int, decoded: bool) -> torch.Tensor:
        """A record's parameters on the device; ``decoded`` says that an earlier micro-batch has brought them back."""
        buffers = self._plane.parameters[record.kind]
        if not record.decoded_nbytes:
            return buffers.values(buffer, record.numel, record.precision.dtype)
        flat = self._plane.decoded.values(0, record.numel, record.precision.dtype)
        if not decoded:
            record.decode(buffers.bytes(buffer, record.device_nbytes), flat)
        return flat

    def _sum_buffer(self, record: Record, buffer: int) -> torch.Tensor:
        wide = self._plane.wide.get(record.kind)
        if wide is not None:
            return wide.values(0, record.numel, torch.float32)
        return self._plane.gradients[record.kind].values(buffer, record.numel, record.precision.dtype)

    def _finish_gradient(self, task: Task) -> None:
        """The record's gradient is complete (unless the embedding will add to it): round it, square it."""
        assert task.visit is not None
        if not task.visit.completes:
            return
        record = self._plane.shape.records[task.visit.trained]
        total = self._sums.pop(record.index)
        total.finish()
        rounded = self._plane.gradients[record.kind].values(task.gradient, record.numel, record.precision.dtype)
        if rounded.data_ptr() != total.flat.data_ptr():
            rounded.copy_(total.flat)
        elif rounded.dtype != total.flat.dtype:
            round_in_place(total.flat, rounded)
        mark_absent(record, rounded, total.seen)
        if self._plane.ranks is None:  # else it is a part of a sum
            self._squares.append(sum_of_squares(rounded))

    def _replayed(self, layer: int, micro: int) -> "_Replay":
        return _Replay(self._random.pop((layer, micro)), self._device)


class NextToken(StepComputation):
    """A forward pass over one sequence, for what comes after it."""

    logits: torch.Tensor
    """fp32 ``[V]``, on the CPU."""

    @torch.no_grad()
    def _head_eval(self, task: Task) -> None:
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro))
        length = hidden.shape[self._stack.token_dim]
        last = slice(length - 1, length)
        with self._stack.bound(self._parameters(task), before=False):
            self.logits = self._logits(task.micro, hidden, last)[0, -1].float().cpu()
        self._losses.append(torch.zeros(()))


def _apart(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory with a version counter of its own.

    All buffers of a ring are views of one allocation and would share its counter: copies into *other* buffers, which
    lanes make while a block computes, would look to autograd as if what it has saved had been overwritten. That nothing
    is overwritten too early is the schedule's business.
    """
    return buffer.data


class _Replay:
    """Draws the same random numbers again: dropout in a recomputed block must repeat itself."""

    def __init__(self, state: torch.Tensor, device: torch.device):
        self._state, self._device = state, device

    def __enter__(self) -> "_Replay":
        self._outer = _random_state(self._device)
        self.rewind()
        return self

    def rewind(self) -> None:
        """Begin again."""
        _set_random_state(self._state, self._device)

    def __exit__(self, *_: object) -> None:
        _set_random_state(self._outer, self._device)


def _random_state(device: torch.device) -> torch.Tensor:
    """State of the generator that computation on ``device`` draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
