"""The engine's optimizer, for trainers that call one."""

import math
import uuid
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from common.errors import UserError


class EngineOptimizer(torch.optim.Optimizer):
    """Ends the engine's step where a trainer calls ``step()``; schedulers set its learning rate.

    Hyper-parameters are the engine's own (``weight_decay``, ``betas``, ``max_grad_norm``, ...).

    Args:
        lr: highest learning rate, for a scheduler; None: what the engine was opened with.

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
        self._id = uuid.uuid4().hex
        self._is_loaded = False
        super().__init__([streamed.norm], {"lr": self._engine._run.config.adam.lr if lr is None else lr})
        streamed.learning_rate = lambda: float(self.param_groups[0]["lr"])
        streamed.optimizer = self

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """End the step.

        Raises:
            UserError: if the trainer clips gradients in another way than the engine.
        """
        if closure is not None:
            raise UserError("The engine computes each step once, so step() takes no closure.")
        self._check_clipping()
        self._engine.step()

    def check_arguments(self, trainer: Trainer) -> None:
        """Refuse arguments of a trainer that it leaves to its optimizer and its model, where the engine has others.

        Raises:
            UserError: names them.
        """
        args = trainer.args
        adam = self._engine._run.config.adam
        if args.load_best_model_at_end:
            raise UserError(
                "load_best_model_at_end: the engine cannot go back to the weights of a checkpoint. Leave it out, and "
                "load the directory of trainer.state.best_model_checkpoint when the engine is closed."
            )
        if args.torch_compile:
            raise UserError("torch_compile: the engine runs blocks one by one, uncompiled. Leave it out.")
        pairs = {
            "learning_rate": (args.learning_rate, self.defaults["lr"]),
            "weight_decay": (args.weight_decay, adam.weight_decay),
            "adam_beta1": (args.adam_beta1, adam.betas[0]),
            "adam_beta2": (args.adam_beta2, adam.betas[1]),
            "adam_epsilon": (args.adam_epsilon, adam.eps),
            "max_grad_norm": (args.max_grad_norm or 0.0, self._engine.max_grad_norm or 0.0),
        }
        different = [f"{name}={asked:g} ({has:g})" for name, (asked, has) in pairs.items() if asked != has]
        if different:
            raise UserError(
                f"The trainer's arguments and the engine differ: {', '.join(different)}. Give fuyou.Engine the same "
                "lr, weight_decay, betas, eps, and max_grad_norm, or the trainer those in parentheses."
            )
        optimizer = self._engine._run.config.optimizer.optimizer
        asked = str(getattr(args.optim, "value", args.optim))
        if not asked.removeprefix("paged_").startswith("adamw"):
            # Others by that name (GaLore's, APOLLO's) are not it
            raise UserError(
                f"optim={asked!r}: the engine was opened with optimizer={optimizer!r}. Leave optim out."
            )
        step = trainer.state.global_step
        engine_step = self._engine.step_count
        if step and not self._is_loaded and step != engine_step:
            raise UserError(_other_step(step, engine_step))

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
                f"with max_grad_norm={self._engine.max_grad_norm}: give both the same."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps; all else is in the engine's store."""
        return {**super().state_dict(), "engine_step": self._engine.step_count, "optimizer": self._id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the learning rate from a trainer's checkpoint, which must be of the step that the engine is at.

        Raises:
            UserError: if it belongs to another one.
        """
        step = state_dict.get("engine_step", self._engine.step_count)
        if step != self._engine.step_count:
            raise UserError(_other_step(step, self._engine.step_count))
        self._is_loaded |= state_dict.get("optimizer") != self._id  # accelerate loads what it has just read
        super().load_state_dict(
            {name: value for name, value in state_dict.items() if name not in ("engine_step", "optimizer")}
        )


def _other_step(step: int, engine_step: int) -> str:
    return (
        f"The trainer's checkpoint is of step {step}, and the engine's store is at step {engine_step}: resume from the "
        "checkpoint of that step, or begin again. With commit_every equal to the trainer's save_steps, the store of a "
        "process that was killed is at its newest checkpoint."
    )
