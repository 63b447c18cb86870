"""The single-node engine: fine-tunes a model that is larger than the machine's memory, in an ordinary PyTorch loop."""

import inspect
import os
import textwrap
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from common.errors import UserError
from common.models.attention.isolation import configurations
from fuyou.checkpoint.commits import checked_user_state
from fuyou.config import EngineConfig, explained_options
from fuyou.engine.figures import EngineFigures
from fuyou.engine.opening import OpenRun
from fuyou.engine.saving import save
from fuyou.engine.steps import EngineOutput, Steps
from fuyou.engine.token_outputs import TokenOutput, TokenRequest
from fuyou.model.loss.token_head import HeadFunction
from fuyou.model.open_model import adapters_off, check_reference
from fuyou.optimizer.adam import check_learning_rate
from fuyou.option_groups import EngineOptions, typed_as
from fuyou.planner import RunPlan
from fuyou.runtime.accounting import StepReport


@dataclass(frozen=True, kw_only=True)
class EngineArguments(EngineOptions):
    """The arguments of :class:`Engine`, for type checkers."""

    model: str | os.PathLike[str] | PreTrainedConfig | RunPlan = field(kw_only=False)
    config: EngineConfig | None = field(default=None, kw_only=False)


class Engine(EngineFigures):
    """Trains a causal language model whose states live on SSD.

    >>> with fuyou.Engine("path/to/checkpoint", ssd=["/mnt/nvme0"], lr=1e-5) as engine:
    ...     for batch in loader:
    ...         loss = engine(**batch).loss
    ...         loss.backward()  # blocks stream in reverse; Adam runs at the same time
    ...         engine.step()
    ...     engine.save_pretrained("tuned")

    Every step is committed: after any end, ``resume=True`` continues from the last one, bit for bit.

    Args:
        model: checkpoint directory, preset name, or transformers configuration (the last two: random weights); or a
            :class:`fuyou.planner.RunPlan` of a run with this ``config``, which then is not planned again.
        config: everything else that can be said about the run; or:
        options: the same by the options' own names, listed below. Only ``ssd`` must be given.

    Attributes:
        config: the model's configuration, of transformers.
        parameters: number of the model's parameters.
        trainable_parameters: number of those that are trained.
        created_bytes: bytes written to fill the store of a new run.

    Raises:
        UserError: what was requested is not possible (paths, space, budgets, model).
        FinetuneError: something failed.
    """

    @typed_as(EngineArguments)
    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedConfig | RunPlan,
        config: EngineConfig | None = None,
        **options: Any,
    ):
        if config is not None and options:
            raise TypeError(f"Engine takes a config or options by name, not both: {', '.join(options)}")
        config = config or EngineConfig.of(**options)
        if not isinstance(model, str | os.PathLike | PreTrainedConfig | RunPlan):
            raise UserError(
                f"Engine takes a checkpoint's directory or a configuration, not a {type(model).__name__}."
            )
        self.lr = config.optimizer.lr
        self._model = (
            (model.job.model.checkpoint or model.job.config) if isinstance(model, RunPlan) else model
        )
        self._asked = config
        _release(config)
        self._pid = os.getpid()
        run = OpenRun(model, config)
        super().__init__(run, Steps(run))
        self._adapters_off = False
        self.config = self._run.model_config
        self.created_bytes = self._run.created_bytes
        layout = self._run.model.layout
        self.parameters = layout.parameters
        self.trainable_parameters = sum(layout.records[index].trained_count for index in layout.trainable)
        _ENGINES.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._run.closed else f"step {self.step_count}"
        name = type(self._run.model.stack.model).__name__
        folder = self._asked.store.folders[0]
        sizes = f"{self.trainable_parameters:,} of {self.parameters:,} parameters trained"
        return f"<fuyou.Engine {name}, {sizes}, {state}, in {folder}>"

    # -- training -------------------------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """Learning rate of the steps to come; may be set before each.

        Raises:
            UserError: (when set) it is NaN, infinite or negative.
        """
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        check_learning_rate(lr)
        self._lr = lr

    def __call__(self, **batch: Any) -> EngineOutput:
        """Run the streamed forward pass; the loss is on the batch's device.

        Args:
            batch: ``input_ids`` and ``labels`` int64 ``[B, S]`` (-100 where no loss is wanted; not shifted, unless the
                family's own loss wants them so: BART's kind compares a position with the label at the same place; of
                a sequence classifier ``[B]``);
                optionally ``position_ids`` ``[B, S]`` (restarting at each document of a packed row) or
                ``attention_mask``, and all else that the model's own forward takes: of images, what the family's
                processor returns (``pixel_values``, ``image_grid_thw``, ...), as lists with one entry for each
                sequence (see :mod:`common.data.rows`).

        Raises:
            NonFiniteLoss: the loss is NaN or infinite; the last committed step is intact.
            UserError: the batch does not fit the budgets, or documents of a row would see each other.
        """
        if not torch.is_grad_enabled():
            return EngineOutput(torch.tensor(self.eval_loss(**batch), device=_device_of(batch)))
        if self._adapters_off:
            raise UserError("Without its adapters the model is not trained: put torch.no_grad() around this.")
        output = self._steps.forward(batch, self.lr)
        output.loss = output.loss.to(_device_of(batch))
        return output

    def tokens(
        self,
        *,
        outputs: Sequence[str] = ("log_probs",),
        head: HeadFunction | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        reference: bool = False,
        **batch: Any,
    ) -> TokenOutput:
        """Run the streamed forward pass, and return numbers for each token, for a loss of any kind.

        >>> out = engine.tokens(**batch, outputs=("log_probs", "entropy"))
        >>> loss = -(out.log_probs * advantages).sum() - 0.01 * out.entropy[out.mask].mean()
        >>> loss.backward()  # or engine.backward(loss), which has the loss reported
        >>> engine.step()

        The logits of a batch never exist at once. The head runs a second time, in the backward pass, with the gradients
        that the loss has sent back. With several ranks, gradients are summed: each rank gives its share of the loss.
        Where gradients are disabled, it is a forward pass alone, without dropout, and nothing changes but pending
        updates, which are applied first.

        Args:
            outputs: ``"log_probs"`` (of each position's label; 0 where there is none), ``"entropy"``,
                ``"mean_logits"``, ``"log_sum_sq_probs"`` (the logarithm of the sum of squared probabilities),
                ``"is_top1"``; of classifiers, ``"logits"``.
            head: a function of the logits ``[n, V]`` of n tokens, in the compute dtype, and of a dictionary of what
                there is for each of them (``targets``, ``input_ids``, ``inputs``, ``[n, ...]`` each), which returns
                more outputs ``[n, ...]`` by name. It is called several times, with few tokens each, and must treat
                them independently of each other.
            inputs: tensors ``[B, S, ...]`` for ``head``.
            reference: whether the same is wanted of the model without its adapters, without dropout. Both passes share
                each visit of the weights, so nothing more is read.
            batch: as in :meth:`__call__`; without ``labels``, they are the tokens themselves, but for padding.

        Raises:
            UserError: the batch does not fit the budgets; there is no such output, or no reference.
        """
        if self._adapters_off and torch.is_grad_enabled():
            raise UserError("Without its adapters the model is not trained: put torch.no_grad() around this.")
        request = TokenRequest(tuple(outputs), head, inputs or {}, reference)
        return self._steps.tokens(batch, request, self.lr).to(_device_of(batch))

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a loss that is made of what :meth:`tokens` returned, and have it reported.

        Args:
            loss: scalar; with several ranks, this rank's share.

        Raises:
            NonFiniteLoss: the loss is NaN or infinite; the last committed step is intact.
        """
        self._steps.note_loss(float(loss.detach()))
        loss.backward()

    def disable_dropout(self) -> None:
        """Set the probability of all dropout to 0: of modules, as ``disable_dropout`` of TRL's trainers does, and of
        functions, such as those of attention, whose probabilities are attributes of the modules that call them, or of
        the configurations of these modules (Falcon). What is exported keeps its probabilities."""
        model = self._run.model.stack.model
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        for holder in [*model.modules(), *configurations(model)]:
            for name in [
                name for name, value in vars(holder).items() if "drop" in name and isinstance(value, float)
            ]:
                setattr(holder, name, 0.0)

    @contextmanager
    def disable_adapters(self) -> Iterator[None]:
        """Let forward passes compute without the adapters while the context is open: with the weights as they were.

        Raises:
            UserError: there are no adapters, or not they alone are trained.
        """
        check_reference(self._run.model)
        before = self._adapters_off
        self._adapters_off = True
        try:
            with adapters_off(self._run.model.stack.model.modules()):
                yield
        finally:
            self._adapters_off = before

    def step(self) -> StepReport:
        """End the step: its updates (if deferred) and its commit may continue while the next step runs.

        Raises:
            NonFiniteLoss: the gradient is not finite; the step is not committed.
        """
        return self._steps.end()

    def flush(self) -> None:
        """Apply what is pending and commit the last step; returns when it is on SSD."""
        self._steps.flush()

    def abandon(self) -> None:
        """Give up the step that has begun and all that is not committed, and continue from the last committed step.

        For a loop that catches its own exception between the forward pass and :meth:`step`, or one of the forward
        pass, and wants to leave that batch out. Everything is closed and opened again, as ``resume=True`` does in a new
        process: seconds, and with ``commit_every`` above 1 the steps since the last commit. Collective on several
        ranks.
        """
        self.close()
        norm = self._steps.norm_parameter
        self._run = OpenRun(self._model, self._asked.with_options(resume=True, overwrite=False, leave_ssd=()))
        self._steps = Steps(self._run)
        self._steps.norm_parameter = norm

    @property
    def in_step(self) -> bool:
        """Whether a step has begun, by a forward pass with gradients, and not ended."""
        return self._steps.in_step

    @property
    def step_count(self) -> int:
        """Number of the last step that has ended, counted from the begin of the run; 0 before the first."""
        return self._run.step_count

    @step_count.setter
    def step_count(self, step: int) -> None:
        self._run.step_count = step

    @property
    def committed_step(self) -> int:
        """Number of the step that ``resume`` would continue from."""
        return self._run.commits.committed_step

    @property
    def committed_report(self) -> dict[str, Any]:
        """Loss, grad_norm, and aux_loss of the committed step; empty before the first."""
        return self._run.commits.state.report

    @property
    def base_identity(self) -> str:
        """Hash of the weights that training began with, from the commit; empty if they were random."""
        return self._run.commits.state.base

    @property
    def user_state(self) -> dict[str, Any]:
        """What the caller wants to be committed with each step: strings, numbers, lists and dictionaries of them.

        Raises:
            UserError: (when set, and by :meth:`step`) JSON would not bring the same back.
        """
        return self._run.user_state

    @user_state.setter
    def user_state(self, state: dict[str, Any]) -> None:
        self._run.user_state = checked_user_state(state)

    # -- evaluation -----------------------------------------------------------------------------------------------

    def eval_loss(self, *, router_loss: bool = True, **batch: Any) -> float:
        """Return the mean loss over a batch, forward only.

        Nothing changes but pending updates, which are applied first.

        Args:
            router_loss: whether the router loss of a mixture is part of it, as in training: it depends on which
                sequences share a batch.
            batch: as in training.
        """
        return self._steps.eval_loss(batch, router_loss)

    # -- reading --------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter's name and fp32 master weight (or frozen value), read record by record.

        They are copies, and PyTorch rejects changing them in place: ``clone()`` one to compute with it.
        """
        self.flush()
        with self._run.runtime.io.not_counted():
            masters = self._run.reader().masters()
            while True:
                with torch.inference_mode():
                    item = next(masters, None)
                if item is None:
                    return
                yield item

    def save_pretrained(
        self, directory: str | os.PathLike[str], *, merge: bool = False, allow_nonfinite: bool = False
    ) -> None:
        """Export what was trained: a Hugging Face checkpoint in the compute dtype, or a PEFT adapter directory.

        Record by record, and buffers are given back meanwhile, so that it stays within the host budget. Training can
        continue afterwards.

        Args:
            directory: made if it is not there; files of the same names are replaced.
            merge: write a checkpoint with the adapters merged into the weights as well, in the folder ``merged`` of
                ``directory``.
            allow_nonfinite: export tensors that hold a NaN or an infinity, too.

        Raises:
            NonFiniteWeights: a tensor holds a NaN or an infinity, on every rank; ``directory`` is as it was.
        """
        self.flush()
        save(self._run, Path(directory), merge, allow_nonfinite)

    def close(self) -> None:
        """Stop. A step in flight is discarded, a finished one is committed; ``resume`` continues from there."""
        if not self._run.closed:
            try:
                self._steps.close()
            finally:
                self._run.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def _open_engines() -> list[Engine]:
    """Return the open engines of this process; a forked one leaves those of its parent alone."""
    return [engine for engine in _ENGINES if engine._pid == os.getpid() and not engine._run.closed]


def _release(config: EngineConfig) -> None:
    """Close an engine of this process whose run is to be resumed or replaced: a notebook's cell is run again."""
    if config.topology is None and (config.store.resume or config.store.overwrite):
        folders = {folder.resolve() for folder in (*config.store.folders, *config.store.folders_to_leave)}
        for engine in _open_engines():
            if not folders.isdisjoint(folder.resolve() for folder in engine._asked.store.folders):
                engine.close()


def _close_all() -> None:
    """Commit the last step of a program that ends without closing its engines."""
    with ExitStack() as stack:
        for engine in _open_engines():
            stack.callback(engine.close)


# Not atexit, which runs after the pools of threads that write the last step have been shut down.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _explain_options() -> None:
    """Let ``help`` and completion show each option with its type, its default, and what it means."""
    parameters = list(inspect.signature(Engine).parameters.values())[:-1]
    text = "\n    Options:\n"
    for item, meaning in explained_options():
        default = inspect.Parameter.empty if item.default is MISSING else item.default
        parameters.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=item.type
            )
        )
        label = f"        {item.name}: "
        text += textwrap.fill(meaning, 120, initial_indent=label, subsequent_indent=" " * 12) + "\n"
    Engine.__doc__ = f"{Engine.__doc__}{text}"
    Engine.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


with suppress(OSError):  # a program without its source
    _explain_options()


def _device_of(batch: Mapping[str, Any]) -> torch.device:
    ids = batch.get("input_ids")
    return ids.device if isinstance(ids, torch.Tensor) else torch.device("cpu")
