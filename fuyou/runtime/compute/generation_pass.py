"""One pass over the weights that makes the next token of every sequence: prompts first, then a token at a time."""

from collections.abc import Sequence

import torch

from fuyou.runtime.compute.key_values import KeyValueMemory
from fuyou.runtime.compute.step_computation import StepComputation, StepInputs
from fuyou.schedule.tasks import ComputeTask, known


class GenerationPass(StepComputation):
    """A forward pass that keeps the logits of each row's last position.

    Args:
        caches: what blocks keep, of each micro-batch; none if whole sequences are computed.
        inputs: of the step.
    """

    def __init__(self, caches: Sequence[KeyValueMemory], inputs: StepInputs):
        super().__init__(inputs)
        self.router = None  # there is no loss that it could be a part of
        self._caches = caches
        self._found: list[torch.Tensor] = []

    @property
    def logits(self) -> torch.Tensor:
        """Logits of what follows: fp32 ``[B, V]``, on the CPU."""
        return torch.cat(self._found)

    @torch.no_grad()
    def _embed_forward(self, task: ComputeTask) -> None:
        cache = self._caches[task.micro] if self._caches else None
        with self._stack.bound(self._parameters.real(task), before=True):
            hidden, self._calls[task.micro] = self._stack.embed(self._model_inputs(task.micro), cache)
        self._activation(known(task.output), hidden.shape).copy_(hidden)

    @torch.no_grad()
    def _block_forward(self, task: ComputeTask, layer: int) -> None:
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro))
        kept = self._caches[task.micro].blocks[layer] if self._caches else None
        if kept is not None:
            kept.fetch()
        with self._stack.bound(self._parameters.real(task)):
            result = self._stack.block(layer, hidden, self._call(task.micro))
        if kept is not None:
            kept.store()
        self._activation(known(task.output), hidden.shape).copy_(result)

    @torch.no_grad()
    def _head_eval(self, task: ComputeTask) -> None:
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro))
        length = hidden.shape[self._stack.token_dim]
        with self._stack.bound(self._parameters.real(task), before=False):
            logits = self._logits(task.micro, hidden, slice(length - 1, length))
        self._found.append(logits[:, -1].float().cpu())
        self._losses.append(torch.zeros(()))
