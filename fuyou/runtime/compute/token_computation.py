"""One pass whose loss the caller computes: what the head gives, and the gradients that come back."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from common.randomness import random_states
from fuyou.layout.model_layout import Phase
from fuyou.model.loss.token_head import TokenHead
from fuyou.model.open_model import adapters_off, evaluating
from fuyou.model.streamed_model import CHUNK_PLACE
from fuyou.runtime.compute.step_computation import StepComputation
from fuyou.schedule.batch import LossInputs
from fuyou.schedule.tasks import ComputeTask, known


class TokenPass:
    """The numbers of one pass, on the CPU, where the caller's loss is computed.

    Args:
        examples: an empty example of each, ``[0, ...]``.
        rows, positions: size of the batch; the latter is 1 where the head gives one prediction for each row.
        inputs: the caller's own tensors ``[rows, positions, ...]`` that the head's function gets in pieces.
        reference: whether the reference's numbers are wanted, too.
    """

    def __init__(
        self,
        head: TokenHead,
        examples: Mapping[str, torch.Tensor],
        rows: int,
        positions: int,
        inputs: Mapping[str, torch.Tensor],
        reference: bool,
    ):
        self.head = head
        self.positions = positions
        self._inputs = inputs
        self.values = _empty(examples, rows, positions)
        """Numbers of the model by name, ``[rows, positions, ...]``; zeros until the head has run."""
        self.reference = _empty(examples, rows, positions) if reference else None  # The same of the reference
        self.gradients: dict[str, torch.Tensor] = {}
        """Gradients of the loss with respect to :attr:`values`; what is not there has none."""

    @property
    def loss_inputs(self) -> LossInputs:
        """What the loss is computed from, for the memory plan."""
        numbers = sum(math.prod(value.shape[2:]) for value in self.values.values())
        return LossInputs(max(1, numbers), self.reference is not None)

    def tokens(self, rows: slice, columns: slice, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the caller's own tensors for a range of tokens, ``[n, ...]``."""
        return _on_device(self._inputs, rows, columns, device)

    def put(self, reference: bool, rows: slice, columns: slice, outputs: Mapping[str, torch.Tensor]) -> None:
        """Note the numbers ``[n, ...]`` of a range of tokens."""
        values = self.reference if reference else self.values
        assert values is not None
        for name, value in outputs.items():
            target = values[name][rows, columns]
            target.copy_(value.view(target.shape))

    def gradients_of(self, rows: slice, columns: slice, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the gradients of a range of tokens, ``[n, ...]``."""
        return _on_device(self.gradients, rows, columns, device)


def _on_device(
    values: Mapping[str, torch.Tensor], rows: slice, columns: slice, device: torch.device
) -> dict[str, torch.Tensor]:
    return {
        name: value[rows, columns].flatten(0, 1).to(device, non_blocking=True)
        for name, value in values.items()
    }


def _empty(examples: Mapping[str, torch.Tensor], rows: int, positions: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(rows, positions, *example.shape[1:], dtype=example.dtype)
        for name, example in examples.items()
    }


class TokenComputation(StepComputation):
    """The computation of a step, or of a forward pass alone, whose loss the caller computes.

    The head runs twice: for its numbers, and again with the gradients of the caller's loss. Micro-batches of the
    reference follow the others in each visit of the forward pass, on the same parameters, without adapters and without
    dropout.
    """

    def __init__(self, passing: TokenPass, *step: Any):
        super().__init__(*step)
        self._passing, self._own = passing, len(self._micro)
        if passing.reference is not None:
            self._micro = self._micro * 2
            self._calls = self._calls * 2
        self._places: list[tuple[slice, int]] = []  # Rows of each micro-batch, and the first of their tokens
        row = 0
        for micro in self._micro[: self._own]:
            first, length = micro[CHUNK_PLACE].tolist()[:2] if CHUNK_PLACE in micro else (0, 0)
            rows, tokens = micro["input_ids"].shape
            self._places.append((slice(row, row + rows), first))
            row += rows if first + tokens >= length else 0

    def forward(self) -> torch.Tensor:
        """Run everything up to the first run of the head; there is no loss yet."""
        self._run_all(self.tasks.forward_phases)
        return torch.zeros(())

    def _run(self, task: ComputeTask) -> None:
        if not self._is_reference(task.micro):
            super()._run(task)
            return
        modules = list(self._modules(task))
        with adapters_off(modules), evaluating(modules):
            super()._run(task)
        # Nothing of the reference is computed again.
        self._random.pop((task.visit.layer, task.micro), None)
        if task.visit.phase is Phase.BLOCK_FORWARD:
            self._recorded.pop((known(task.visit.layer), task.micro))
        elif task.visit.phase is Phase.HEAD_EVAL:
            self._calls[task.micro] = None

    @torch.no_grad()
    def _head_eval(self, task: ComputeTask) -> None:
        # The head's own forward pass may draw random numbers, which its second run must draw again.
        self._random[task.visit.layer, task.micro] = random_states(self._device)
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro))
        for columns in self._columns(task.micro):
            with self._stack.bound(self.parameters.real(task), before=False):
                logits = self._logits(task.micro, hidden, columns).flatten(0, 1)
                outputs = self._passing.head.values(logits, self._tokens(task.micro, columns))
            self._passing.put(self._is_reference(task.micro), *self._place(task.micro, columns), outputs)

    @torch.enable_grad()
    def _head(self, task: ComputeTask) -> None:
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro)).detach()
        hidden.requires_grad_(task.output is not None)
        with self._replayed(task.visit.layer, task.micro):
            for columns in self._columns(task.micro):
                with self._stack.bound(self.parameters.leaves(task), before=False):
                    logits = self._logits(task.micro, hidden, columns)
                    gradient = self._passing.head.gradient(
                        logits.detach().flatten(0, 1),
                        self._tokens(task.micro, columns),
                        self._passing.gradients_of(*self._place(task.micro, columns), self._device),
                    )
                    torch.autograd.backward(logits, gradient.view_as(logits))
                    del logits, gradient
        self._pass_on(task, hidden)

    def _is_reference(self, micro: int) -> bool:
        return micro >= self._own

    def _modules(self, task: ComputeTask) -> Iterator[torch.nn.Module]:
        if task.visit.phase is Phase.BLOCK_FORWARD:
            yield from self._stack.blocks[known(task.visit.layer)].modules()
        else:
            blocks = set(self._stack.blocks)
            todo: list[torch.nn.Module] = [self._stack.model]
            while todo:
                module = todo.pop()
                yield module
                todo += [child for child in module.children() if child not in blocks]

    def _place(self, micro: int, columns: slice) -> tuple[slice, slice]:
        rows, first = self._places[micro % self._own]
        if self._passing.positions == 1:
            return rows, slice(0, 1)
        return rows, slice(first + columns.start, first + columns.stop)

    def _tokens(self, micro: int, columns: slice) -> dict[str, torch.Tensor]:
        rows, positions = self._place(micro, columns)
        inputs = self._micro[micro]
        columns = columns if self._passing.positions > 1 else positions
        inputs_of_head = {"targets": inputs["targets"][:, columns].flatten()}
        if inputs["input_ids"].shape == inputs["targets"].shape:
            inputs_of_head["input_ids"] = inputs["input_ids"][:, columns].flatten()
        return inputs_of_head | self._passing.tokens(rows, positions, self._device)
