"""Runs the compute tasks of one step, in the caller's thread: embedding, blocks, head, and back."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from common.data.rows import PADDING
from common.errors import FinetuneError
from common.models.task_type import TaskType
from common.randomness import fresh_random_states, random_states, set_random_states
from fuyou.layout.model_layout import BEFORE_HEAD_PHASES, Phase
from fuyou.layout.record import Kind
from fuyou.model.blocks.calls import BlockCalls
from fuyou.model.chunk_survey import chunk_survey
from fuyou.model.loss.cross_entropy import cross_entropy
from fuyou.model.loss.router_loss import RouterPass, router_logits
from fuyou.model.open_model import OpenModel
from fuyou.model.recompute.replay import BlockReplay, SavedForward
from fuyou.runtime.compute.piece_visits import PieceVisits, replayed
from fuyou.runtime.compute.task_parameters import TaskParameters, apart
from fuyou.runtime.data_plane.data_plane import DataPlane
from fuyou.runtime.device import explain_out_of_memory
from fuyou.schedule.tasks import Activation, ComputeTask, StepList, known


class StepComputation:
    """The computation of one step or of one evaluation, micro-batch by micro-batch.

    Args:
        model: whose parts compute.
        plane: buffers, and the executor that the other tasks run in.
        micro_batches: the batch in parts, where it computes.
        labels: number of labels in the batches of all ranks together.
        recomputations: how blocks are computed again; remembers from step to step.
        start_time: when the step began, on :func:`time.monotonic`'s clock.
    """

    def __init__(
        self,
        model: OpenModel,
        plane: DataPlane,
        tasks: StepList,
        micro_batches: list[dict[str, torch.Tensor]],
        labels: int,
        recomputations: BlockReplay,
        start_time: float,
    ):
        stack = model.stack
        router_loss = model.router_loss
        self._stack = stack
        self._plane = plane
        self._buffers = plane.buffers
        self.tasks = tasks
        self.start_time = start_time
        self._plan = plane.buffers.plan
        self._recomputations = recomputations
        self._dtype = plane.buffers.layout.precision.dtype
        self._device = plane.buffers.device.torch_device
        self._task_type = model.task_type
        # On the device: CUDA divides by a number of the host's as multiplication by its reciprocal, which is not what
        # an ordinary loop (transformers' loss divides by such a tensor) gives.
        self._labels = torch.tensor(labels).to(self._device, non_blocking=True)
        self.tokens = sum(micro["input_ids"].numel() for micro in micro_batches)
        self._micro = micro_batches
        self.router = None if router_loss is None else RouterPass(router_loss, self._router_masks())
        """To be settled between forward and backward pass, if the loss has a router loss."""
        self._calls: list[BlockCalls | None] = [None] * len(self._micro)
        self._random: dict[tuple[int | None, int], tuple[torch.Tensor, ...]] = {}
        # Where blocks are in pieces
        self._random_states: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self._recorded: dict[tuple[int, int], SavedForward] = {}
        self._saved: list[float] = []
        self.parameters = TaskParameters(stack, self._buffers)
        self._losses: list[torch.Tensor] = []
        self._pieces = PieceVisits(stack, plane.buffers.layout, self.parameters.add)
        self._adapters: dict[int, dict[str, torch.Tensor]] = {}  # of passes in pieces, by micro-batch
        computing = [task for task in tasks.tasks if isinstance(task, ComputeTask)]
        self._flops = 0.0
        self._all_flops = sum(task.flops for task in computing)
        self._todo: Iterator[ComputeTask] = iter(computing)
        self._next: ComputeTask | None = next(self._todo, None)
        self.loss = float("nan")

    def _router_masks(self) -> list[torch.Tensor]:
        """Return, per micro-batch, 1 for tokens that count for routers and 0 for padding, and for those that a mask
        ``[B, S]`` hides."""
        result = []
        for micro in self._micro:
            mask = micro.get("attention_mask")
            counts = torch.ones_like(micro["input_ids"]) if mask is None or mask.dim() != 2 else mask
            if PADDING in micro:
                counts = counts.masked_fill(micro[PADDING], 0)
            result.append(counts.flatten().float())
        return result

    # -- passes ---------------------------------------------------------------------------------------------------

    def forward(self) -> torch.Tensor:
        """Run everything up to the head; return the batch's mean loss (this rank's part of it), an fp32 scalar."""
        self._run_all(self.tasks.forward_phases)
        total = self._losses[0]
        for loss in self._losses[1:]:
            total = total + loss
        self.loss = float(total)
        return total

    def backward(self) -> None:
        """Run the rest."""
        self._run_all(frozenset(Phase))

    def _run_all(self, phases: frozenset[Phase]) -> None:
        try:
            # The engine computes in its own dtype: a caller's autocast is over when the backward pass comes.
            autocast_off = torch.autocast(self._device.type, enabled=False)
            with explain_out_of_memory(), autocast_off, self._stack.kernels.pinned():
                while self._next is not None and self._next.visit.phase in phases:
                    self._run(self._next)
                    self._next = next(self._todo, None)
        except BaseException:
            self._pieces.close()
            raise

    def skip_forward(self) -> None:
        """Give the pass up before its head, but let what waits for it continue: the updates that a forward pass carries
        along belong to the step before, which is to be committed all the same."""
        while self._next is not None and self._next.visit.phase in BEFORE_HEAD_PHASES:
            self._plane.executor.finish(self._next)
            self._next = next(self._todo, None)

    @property
    def share(self) -> float:
        """Return the part of the step's operations that is computed."""
        return self._flops / self._all_flops if self._all_flops else 0.0

    @property
    def complete(self) -> bool:
        """Whether the backward pass has ended."""
        return self._next is None

    @property
    def recomputation_saved(self) -> float:
        """Fraction of the blocks' recomputation that was left out, in FLOPs."""
        return sum(self._saved) / len(self._saved) if self._saved else 0.0

    def _run(self, task: ComputeTask) -> None:
        self._plane.executor.start(task)
        self._buffers.device.begin_compute(task)
        self._compute(task)
        self._buffers.device.end_compute(task)
        self._plane.executor.finish(task)
        self._flops += task.flops
        self._plane.heap.trim()

    def _compute(self, task: ComputeTask) -> None:
        match task.visit.phase:
            case Phase.EMBED_FORWARD:
                self._embed_forward(task)
            case Phase.BLOCK_FORWARD if task.visit.part is not None:
                self._piece_forward(task, known(task.visit.layer))
            case Phase.BLOCK_BACKWARD if task.visit.part is not None:
                self._piece_backward(task, known(task.visit.layer))
            case Phase.BLOCK_FORWARD:
                self._block_forward(task, known(task.visit.layer))
            case Phase.HEAD:
                self._head(task)
            case Phase.HEAD_EVAL:
                self._head_eval(task)
            case Phase.BLOCK_BACKWARD:
                self._block_backward(task, known(task.visit.layer))
            case Phase.EMBED_BACKWARD:
                self._embed_backward(task)
        if task.last:
            self.parameters.finish_gradients(task)

    # -- visits ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _embed_forward(self, task: ComputeTask) -> None:
        self._random[None, task.micro] = random_states(self._device)
        with self._stack.bound(self.parameters.real(task), before=True):
            hidden, calls = self._stack.embed(self._model_inputs(task.micro))
        if hidden.dtype != self._dtype:
            raise FinetuneError(f"The embedding gives {hidden.dtype} where blocks compute in {self._dtype}.")
        self._calls[task.micro] = calls
        self._activation(known(task.output), hidden.shape).copy_(hidden)

    @torch.no_grad()
    def _block_forward(self, task: ComputeTask, layer: int) -> None:
        self._random[layer, task.micro] = random_states(self._device)
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro))
        calls = self._call(task.micro)
        with (
            self._stack.bound(self.parameters.real(task)),
            self._earlier_keys(task, layer, calls),
            router_logits() as logits,
        ):
            result, self._recorded[layer, task.micro] = self._recomputations.forward(
                layer, calls, lambda: self._stack.block(layer, hidden, calls), self._kept(task)
            )
        if self.router is not None:
            self.router.add(task.micro, logits)
        self._activation(known(task.output), hidden.shape).copy_(result)

    @torch.enable_grad()
    def _head(self, task: ComputeTask) -> None:
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro)).detach()
        hidden.requires_grad_(task.output is not None)
        loss: torch.Tensor | None = None
        for columns in self._columns(task.micro):
            with self._stack.bound(self.parameters.leaves(task), before=False):
                logits = self._logits(task.micro, hidden, columns)
                part, gradient = self._loss(task.micro, logits, columns, gradient=True)
                torch.autograd.backward(logits, gradient)
                del logits, gradient
            loss = part if loss is None else loss + part
        assert loss is not None
        self._losses.append(loss)
        self._pass_on(task, hidden)

    @torch.no_grad()
    def _head_eval(self, task: ComputeTask) -> None:
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro))
        with self._stack.bound(self.parameters.real(task), before=False):
            parts = [
                self._loss(task.micro, self._logits(task.micro, hidden, columns), columns, gradient=False)[0]
                for columns in self._columns(task.micro)
            ]
        self._losses.append(torch.stack(parts).sum())

    @torch.enable_grad()
    def _block_backward(self, task: ComputeTask, layer: int) -> None:
        shape = self._hidden_shape(task.micro)
        hidden = self._activation(task.inputs[0], shape).detach().requires_grad_(task.output is not None)
        calls, recorded = self._call(task.micro), self._recorded.pop((layer, task.micro))
        losses: list[torch.Tensor] = []  # that it adds
        with (
            self._stack.bound(self.parameters.leaves(task)),
            self._earlier_keys(task, layer, calls, backward=True),
            self._replayed(layer, task.micro) as rewind,
        ):

            def run() -> torch.Tensor:
                rewind()
                with router_logits() as logits:
                    output = self._stack.block(layer, hidden, calls)
                # Here, and not behind it: what the router loss needs of the block must be computed again, too.
                losses[:] = [] if self.router is None else self.router.losses(task.micro, logits)
                return output

            result, saved = self._recomputations.backward(layer, calls, run, self._kept(task), recorded)
            self._saved.append(saved)
            calls.backward(result, self._activation(task.inputs[1], shape), losses)
        self._pass_on(task, hidden)

    @torch.no_grad()
    def _piece_forward(self, task: ComputeTask, layer: int) -> None:
        calls = self._call(task.micro)
        if task.visit.begins:
            # A copy, as of the gradient below: the schedule gives the buffer to others when the first part has ended.
            hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro)).clone()

            def work() -> tuple[torch.Tensor, list[torch.Tensor]]:
                with router_logits() as logits:
                    return calls.run(layer, self._stack.blocks[layer], hidden), logits

            alone = len(self._micro) == 1
            states = random_states(self._device) if alone else fresh_random_states(self._device)
            self._random_states[layer, task.micro] = states
            self._pieces.begin(task, work, calls.documents, states)
        self._advance(task, self.parameters.real(task, Kind.ADAPTER))
        if task.visit.ends:
            (output, logits), states = self._pieces.end(task.micro)
            if len(self._micro) == 1:
                set_random_states(states, self._device)
            if self.router is not None:
                self.router.add(task.micro, logits)
            self._activation(known(task.output), output.shape).copy_(output)

    @torch.enable_grad()
    def _piece_backward(self, task: ComputeTask, layer: int) -> None:
        calls = self._call(task.micro)
        self.parameters.open_sums(task)
        if task.visit.begins:
            shape = self._hidden_shape(task.micro)
            hidden = self._activation(task.inputs[0], shape).clone().requires_grad_(task.visit.passes_on)
            gradient = self._activation(task.inputs[1], shape).clone()

            def work() -> torch.Tensor:
                with router_logits() as logits:
                    output = calls.run(layer, self._stack.blocks[layer], hidden)
                losses = [] if self.router is None else self.router.losses(task.micro, logits)
                calls.backward(output, gradient, losses)
                return hidden

            states = self._random_states.pop((layer, task.micro))
            self._pieces.begin(task, work, calls.documents, states)
            self._adapters[task.micro] = self.parameters.leaves(task, Kind.ADAPTER)
        self._advance(task, self._adapters[task.micro])
        if task.visit.ends:
            hidden, _ = self._pieces.end(task.micro)
            del self._adapters[task.micro]
            self._pass_on(task, hidden)

    def _advance(self, task: ComputeTask, adapters: Mapping[str, torch.Tensor]) -> None:
        ((_, views),) = self.parameters.views(task, Kind.BLOCK)
        self._pieces.advance(task, views, adapters)

    @torch.enable_grad()
    def _embed_backward(self, task: ComputeTask) -> None:
        with self._stack.bound(self.parameters.leaves(task), before=True), self._replayed(None, task.micro):
            hidden, again = self._stack.embed(self._model_inputs(task.micro))
            lost = again.lost_gradient()
            if lost is not None:
                raise FinetuneError(
                    f"{type(self._stack.model).__name__} gives block {lost[0]} an argument{lost[1]} that carries a "
                    "gradient in this batch and none in one of text alone, and that gradient would be lost: freeze "
                    "what it comes from (vision tower and projector), and start again."
                )
            values, gradients = self._call(task.micro).embedding_gradients(again)
            if hidden.requires_grad:
                values.append(hidden)
                gradients.append(self._activation(task.inputs[0], hidden.shape))
            if values:
                torch.autograd.backward(values, gradients)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _pass_on(self, task: ComputeTask, hidden: torch.Tensor) -> None:
        if task.output is not None:
            assert hidden.grad is not None
            self._activation(task.output, hidden.shape).copy_(hidden.grad)

    def _logits(self, micro: int, hidden: torch.Tensor, columns: slice) -> torch.Tensor:
        dim = self._stack.token_dim
        whole = columns == slice(0, hidden.shape[dim])
        inputs = self._micro[micro]
        batch = {
            name: value[:, columns] for name, value in inputs.items() if name in ("input_ids", "position_ids")
        }
        part = hidden if whole else hidden.narrow(dim, columns.start, columns.stop - columns.start)
        logits = self._stack.head(batch, part)
        return logits.unsqueeze(1) if self._task_type is TaskType.SEQUENCE_CLASSIFICATION else logits

    def _loss(
        self, micro: int, logits: torch.Tensor, columns: slice, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return cross_entropy(logits, self._micro[micro]["targets"][:, columns], self._labels, gradient)

    def _columns(self, micro: int) -> list[slice]:
        """Return the ranges of tokens that go through the head at once: all, where it looks for the end of each row."""
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
        buffers = self._buffers.activations[Activation.HIDDEN]
        return apart(buffers.values(index, math.prod(shape), self._dtype)).view(shape)

    def _kept(self, task: ComputeTask) -> torch.Tensor | None:
        if task.saved is None or self._call(task.micro).cache is not None:
            return None
        return apart(self._buffers.activations[Activation.SAVED].bytes(task.saved, self._plan.saved_bytes))

    @contextmanager
    def _earlier_keys(
        self, task: ComputeTask, layer: int, calls: BlockCalls, backward: bool = False
    ) -> Iterator[None]:
        """Give a block the keys and values of its row while the context is open, if that passes in chunks."""
        cache = calls.cache
        if cache is None:
            yield
            return
        block = chunk_survey(self._stack).keys[layer]
        chunk = known(self._plan.batch.chunk)
        sums = None
        nbytes = block.row_nbytes(cache.length, chunk)
        flat = self._buffers.activations[Activation.SAVED].bytes(known(task.saved), nbytes)
        if backward:
            count = block.elements * cache.length + block.state_elements
            sums = apart(self._buffers.key_gradients.values(0, count, torch.float32))
            if cache.start + self._micro[task.micro]["input_ids"].shape[1] == cache.length:
                sums.zero_()
        cache.row = block.row(apart(flat), sums, cache.start, cache.length, chunk)
        try:
            yield
        finally:
            cache.row = None

    def _replayed(self, layer: int | None, micro: int) -> AbstractContextManager[Callable[[], None]]:
        return replayed(self._random.pop((layer, micro)), self._device)
