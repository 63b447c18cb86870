"""An engine as a model of its family's own class, for trainers that want one.

The model is a shallow copy of the one that the engine streams, and shares its modules, so that what a trainer does to
them (no dropout, for instance) acts on what computes. Its only parameter is a number: the gradient of that is the norm
of the whole gradient, so that a trainer's own clipping sees, and logs, the true one. The engine clips itself
(``max_grad_norm``), and :class:`fuyou.integrations.EngineOptimizer` takes its steps.
"""

import copy
import functools
import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput
from transformers.utils import ModelOutput

from common.errors import UserError
from common.models.task_type import TaskType
from fuyou.engine.engine import Engine
from fuyou.engine.token_outputs import TokenOutput
from fuyou.model.open_model import check_reference

_KEPT = 2
"""Passes whose reference is kept until a trainer asks for it: KTO's has two, one without gradients first."""
_NOT_OF_THE_MODEL = frozenset({"use_cache", "return_dict", "output_router_logits", "logits_to_keep"})
_SAID_BY_POSITIONS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""Where documents of a flattened row begin, for kernels that need it; the engine sees it in ``position_ids``."""
_FUSED = ("log_probs", "entropy", "mean_logits", "is_top1")
"""Outputs of a fused head of TRL's that does not say which."""


@dataclass
class FusedOutput(ModelOutput):
    """What TRL's trainers read of a call with ``fused_lm_head=True``; each ``[B, S - 1]``, and 0 without a label."""

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


class _FacadeConfig:
    """What a facade's configuration does in another way than the family's, which it also is."""

    @property
    def _name_or_path(self) -> str:
        """Name of no files. A trainer of TRL's that would load them once more is refused."""
        caller: Any = sys._getframe(1)
        while caller.f_code.co_name == "__getattribute__":
            caller = caller.f_back
        # A trainer without arguments only makes the name of a directory of it.
        if caller.f_code.co_name == "get_config_model_id" and caller.f_back.f_locals.get("args") is not None:
            raise UserError(
                "The trainer would load the whole model once more. As its reference, give DPOTrainer or KTOTrainer "
                "ref_model=as_reference(engine), and GRPOTrainer beta=0; for its tokenizer, give processing_class."
            )
        return "engine"

    @_name_or_path.setter
    def _name_or_path(self, name: str) -> None:
        """Pass over a name."""


class _Streamed:
    """What an engine and its facades share."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.norm = nn.Parameter(torch.ones(()))
        self.untouched = nn.Parameter(torch.zeros(()))
        self.learning_rate: Callable[[], float] = lambda: engine.lr
        self.optimizer: Any = None  # EngineOptimizer, once there is one
        self._checked: Any = None  # Trainer whose arguments were compared with the engine
        self.has_reference = False
        self.temperature = 1.0
        self.fused: tuple[str, ...] = _FUSED
        self._kept: deque[tuple[torch.Tensor, TokenOutput]] = deque(maxlen=_KEPT)
        engine._steps.norm_parameter = self.norm

    def check_trainer(self) -> None:
        """Compare the arguments of the trainer that calls with the engine, before its first step."""
        frame: Any = sys._getframe(1)
        while frame is not None:  # a trainer hands its arguments to nothing that is ours
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer) and caller is not self._checked:
                if caller.compute_metrics is not None and self.engine._run.model.task_type.generates:
                    raise UserError(
                        "compute_metrics needs the logits of whole batches, which never exist here: leave it out, or "
                        "compute metrics from engine.tokens."
                    )
                if self.optimizer is not None and torch.is_grad_enabled():
                    self.optimizer.check_arguments(caller)
                    self._checked = caller
                return
            frame = frame.f_back

    def tokens(self, batch: dict[str, Any], outputs: tuple[str, ...]) -> TokenOutput:
        """Run the model, and with it the reference if there is one, for the call that will ask for it."""
        engine = self.engine
        engine._steps.check_whole()
        if engine.in_step:  # KTO's first pass of a batch has no gradients
            raise UserError(
                "The engine takes one forward and one backward pass for each step: set gradient_accumulation_steps to "
                "1 and per_device_train_batch_size to the whole batch, which the engine splits itself (micro_batch)."
            )
        if torch.is_grad_enabled():
            engine.lr = self.learning_rate()
        if self.temperature != 1.0:
            raise UserError(
                f"The trainer divides logits by a temperature of {self.temperature:g}, which the engine does not do "
                "before it takes log-probabilities: set the temperature to 1."
            )
        output = engine.tokens(**batch, outputs=outputs, reference=self.has_reference)
        if output.reference is not None:
            self._kept.append((batch["input_ids"], output.reference))
        return output

    def reference(self, batch: dict[str, Any], outputs: tuple[str, ...]) -> TokenOutput:
        """Return what the reference gives: computed already with the model's own pass, or now."""
        if self.untouched.item() != 0:  # what a trainer mixes the model's only parameter, 1, into
            raise UserError(
                "The trainer mixes the model's weights into the reference's, which is fixed here: leave sync_ref_model "
                "out."
            )
        for ids, output in self._kept:
            if torch.equal(ids, batch["input_ids"]) and set(outputs) <= set(output.keys()):
                return output
        with torch.no_grad(), self.engine.disable_adapters():
            return self.engine.tokens(**batch, outputs=outputs)


class _Forward:
    """The call of a facade, under the signature of the family's own, which trainers cannot replace.

    What they put in its place (autocast, a fused head) is passed over, but for a head's temperature and outputs.
    """

    def __get__(self, model: "_Facade | None", kind: type) -> Callable[..., Any]:
        function = _forward_of(kind)
        return function if model is None else cast(Callable[..., Any], function.__get__(model))

    def __set__(self, model: "_Facade", replaced: Callable[..., Any]) -> None:
        if getattr(getattr(replaced, "__func__", replaced), "__closure__", None) is not None:
            told = inspect.getclosurevars(getattr(replaced, "__func__", replaced)).nonlocals
            model._streamed.temperature = float(told.get("temperature", model._streamed.temperature))
            if not model._is_reference:
                # Whose pass is as the model's, so that equal weights give equal numbers
                model._streamed.fused = tuple(told.get("outputs", model._streamed.fused))


class _Facade(PreTrainedModel):
    """What a facade does in another way than the family's class, which it also is."""

    _streamed: _Streamed
    _is_reference: bool
    forward = _Forward()

    # -- calls ----------------------------------------------------------------------------------------------------

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        streamed = self._streamed
        streamed.check_trainer()
        bound = inspect.signature(self.forward).bind_partial(*args, **kwargs).arguments
        batch = {
            **bound.pop("kwargs", {}),
            **{name: value for name, value in bound.items() if value is not None},
        }
        fused = batch.pop("fused_lm_head", False)
        items = batch.pop("num_items_in_batch", None)
        routed = batch.get("output_router_logits", False)
        batch = {name: value for name, value in batch.items() if name not in _NOT_OF_THE_MODEL}
        if "position_ids" in batch:
            batch = {name: value for name, value in batch.items() if name not in _SAID_BY_POSITIONS}
        task = streamed.engine._run.model.task_type
        labels = batch.get("labels")
        give = streamed.reference if self._is_reference else streamed.tokens
        if task is TaskType.SEQUENCE_CLASSIFICATION:
            batch.pop("labels", None)
            logits = give(batch, ("logits",)).logits.squeeze(1)
            loss = None
            if labels is not None:
                loss = self.loss_function(
                    labels=labels, logits=logits, pooled_logits=logits, config=self.config
                )
            return SequenceClassifierOutput(loss=loss, logits=logits)
        if labels is None:
            raise UserError(
                "Logits of a whole batch never exist here, and this call has no labels: a loss is made of "
                "log-probabilities. Leave label smoothing and compute_metrics out, or override compute_loss on "
                "engine.tokens."
            )
        outputs = streamed.fused if fused else ("log_probs",)
        given = give(batch, outputs)
        if routed and not self._is_reference and given.aux_loss is None:
            raise UserError(
                "The trainer adds the router loss of a mixture of experts, and this engine was opened without: open it "
                'with router_loss="on", or give the trainer router_aux_loss_coef=0.'
            )
        mask = given.mask
        count = mask.sum().clamp(min=1) if items is None else items
        loss = -given.log_probs.sum() / count
        if given.aux_loss is not None:
            loss = loss + given.aux_coefficient * given.aux_loss
        if not fused:
            return CausalLMOutput(loss=loss)
        per_token = {name: (given[name] * mask)[:, :-1] for name in outputs}
        return FusedOutput(loss=loss, label_mask=mask[:, :-1], aux_loss=given.aux_loss, **per_token)

    # -- what a trainer asks of a model ---------------------------------------------------------------------------

    def named_modules(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Yield modules, but not to ``peft``, which would adapt them."""
        if sys._getframe(1).f_globals["__name__"].startswith("peft.tuners"):
            raise UserError(
                "The engine has its adapters before a trainer gets it: open it with adapters=peft_config, and leave "
                "the trainer's peft_config out."
            )
        return super().named_modules(*args, **options)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the only parameter: a number, whose gradient is the norm of all; of a reference, one that stays 0."""
        yield "gradient_norm", self._streamed.untouched if self._is_reference else self._streamed.norm

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return a digest of all weights, which are read for it: trainers name their caches after that."""
        digest = hashlib.blake2b(digest_size=32)
        for name, value in self._streamed.engine.named_parameters():
            digest.update(name.encode())
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"digest": torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)}

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Pass over weights: those of the run are in its store, which :class:`fuyou.Engine` resumes."""
        return nn.modules.module._IncompatibleKeys([], [])

    def save_pretrained(self, save_directory: Any, **_: Any) -> None:  # type: ignore[override]
        """Export what was trained, as :meth:`fuyou.Engine.save_pretrained` does."""
        self._streamed.engine.save_pretrained(Path(save_directory))

    def to(self, *_: Any, **__: Any) -> "_Facade":  # type: ignore[override]
        """Stay where it is: the engine knows where it computes. Of several GPUs, a trainer is to use none itself: it
        would wrap this in DataParallel, and multiply the batch."""
        trainer = sys._getframe(1).f_locals.get("self")
        if isinstance(trainer, Trainer):
            trainer.args._n_gpu = min(1, trainer.args.n_gpu)
        return self

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        """Do nothing: blocks are computed again in any case."""

    gradient_checkpointing_disable = enable_input_require_grads = gradient_checkpointing_enable

    def generate(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Refuse: each token would read all weights from the SSDs."""
        raise UserError(
            "The engine trains and does not generate: rollouts come from a server that loads the adapters of "
            "engine.save_pretrained, as in examples/grpo.py; give TRL's GRPOTrainer a rollout_func that calls it."
        )


@functools.cache
def _forward_of(kind: type) -> Callable[..., Any]:
    family = next(
        c for c in kind.__mro__ if c.__module__.startswith("transformers.") and "forward" in vars(c)
    )

    @torch.compiler.disable  # so that torch_compile is refused by EngineOptimizer, not by the compiler
    @functools.wraps(vars(family)["forward"])
    def forward(self: _Facade, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    return forward


def as_model(engine: Engine) -> PreTrainedModel:
    """Return the engine as a model of its family's class, for a trainer.

    What cannot work is refused by a sentence when it is tried: several processes, gradient accumulation, logits of
    whole batches.

    Args:
        engine: one; it takes no step meanwhile but through the trainer.

    Raises:
        UserError: the engine is one of several ranks.
    """
    return _facade(engine, is_reference=False)


def as_reference(engine: Engine) -> PreTrainedModel:
    """Return the model without its adapters, as ``ref_model`` of a trainer whose model is :func:`as_model` of the same
    engine: both are computed in the same visits of the weights.

    Args:
        engine: whose adapters are trained.

    Raises:
        UserError: not adapters alone are trained, so that nothing of the reference is left.
    """
    check_reference(engine._run.model)
    return _facade(engine, is_reference=True)


def _facade(engine: Engine, is_reference: bool) -> PreTrainedModel:
    if engine._run.layout.share.world_size > 1:
        raise UserError(
            "Trainers drive one process for now: several ranks write the loop with engine.tokens, or use finetune "
            "--nodes."
        )
    streamed = getattr(engine, "_facades", None)
    if streamed is None:
        streamed = engine._facades = _Streamed(engine)  # type: ignore[attr-defined]
    streamed.has_reference |= is_reference
    model = engine._run.model.stack.model
    facade = copy.copy(model)
    facade.__dict__["_modules"], facade.__dict__["_parameters"] = dict(model._modules), {}
    facade.__class__ = type(type(model).__name__, (_Facade, type(model)), {})
    facade.config = copy.deepcopy(model.config)
    facade.config.__class__ = type(type(model.config).__name__, (_FacadeConfig, type(model.config)), {})
    facade.__dict__.update(_streamed=streamed, _is_reference=is_reference)
    return facade
