"""The engine's optimizer, for trainers that call one."""

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from common.errors import UserError


class EngineOptimizer(torch.optim.Optimizer):
    """Ends the engine's step where a trainer calls ``step()``; schedulers set its learning rate.

    Hyper-parameters are the engine's own (``weight_decay``, ``betas``, ``max_grad_norm``, ...).

    Args:
        lr: highest learning rate, for a scheduler; None: the engine's.

    Raises:
        UserError: if this is no such model.
    """

    def __init__(self, model: PreTrainedModel, lr: float | None = None):
        streamed = getattr(model, "_streamed", None)
        if streamed is None:
            raise UserError(
                f"EngineOptimizer takes what as_model(engine) has returned, not another {type(model).__name__}."
            )
        self._engine = streamed.engine
        super().__init__([streamed.norm], {"lr": self._engine.lr if lr is None else lr})
        streamed.learning_rate = lambda: float(self.param_groups[0]["lr"])

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End the step.

        Raises:
            UserError: if the trainer clips gradients in another way than the engine.
        """
        if closure is not None:
            raise UserError("The engine computes each step once: no closure can compute it again.")
        self._check_clipping()
        self._engine.step()

    def _check_clipping(self) -> None:
        (norm,) = (parameter.grad for group in self.param_groups for parameter in group["params"])
        if norm is None:
            return
        true = self._engine.gradient_norm()
        asked = self._engine.max_grad_norm or math.inf
        clipped = float(norm)
        if clipped < true * (1 - 1e-4) and not math.isclose(clipped, asked, rel_tol=1e-3):
            raise UserError(
                f"The trainer scales a gradient of norm {true:.4g} down to {clipped:.4g}, and the engine was opened "
                f"with max_grad_norm={self._engine.max_grad_norm}: give both the same (of the trainer, 0 or 1e9 leaves "
                "it to the engine)."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps; all else is in the engine's store."""
        return {**super().state_dict(), "engine_step": self._engine.step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the learning rate from a trainer's checkpoint, which must be of the step that the engine is at.

        Raises:
            UserError: if it belongs to another one.
        """
        step = state_dict.get("engine_step", self._engine.step_count)
        if step != self._engine.step_count:
            raise UserError(
                f"The trainer's checkpoint is of step {step}, and the engine's store is at step "
                f"{self._engine.step_count}: resume from the checkpoint of that step, or start again."
            )
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "engine_step"})
