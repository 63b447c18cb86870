"""The prediction after a sequence: a forward pass that keeps the last token's logits."""

from collections.abc import Mapping
from typing import Any

import torch

from fuyou.model.open_model import OpenModel
from fuyou.model.recompute.replay import BlockReplay
from fuyou.runtime.compute.step_computation import StepComputation
from fuyou.runtime.data_plane.data_plane import DataPlane
from fuyou.schedule.tasks import ComputeTask, StepList


class NextToken(StepComputation):
    """A forward pass over one sequence, for what comes after it."""

    logits: torch.Tensor
    """Prediction of the next token: fp32 ``[V]``, on the CPU."""

    def __init__(
        self,
        model: OpenModel,
        plane: DataPlane,
        tasks: StepList,
        batch: Mapping[str, Any],
        recomputations: BlockReplay,
        start_time: float,
    ):
        super().__init__(model, plane, tasks, batch, recomputations, start_time)
        self.router = None  # there is no loss that it could be a part of

    @torch.no_grad()
    def _head_eval(self, task: ComputeTask) -> None:
        hidden = self._activation(task.inputs[0], self._hidden_shape(task.micro))
        length = hidden.shape[self._stack.token_dim]
        last = slice(length - 1, length)
        with self._stack.bound(self._parameters(task), before=False):
            self.logits = self._logits(task.micro, hidden, last)[0, -1].float().cpu()
        self._losses.append(torch.zeros(()))
