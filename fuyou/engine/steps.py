"""Training steps and evaluations of an open run: forward pass, backward pass, the end of a step, its commit."""

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.errors import FinetuneError, UserError
from fuyou.engine.batches import check_batch, largest_of_all, with_labels
from fuyou.engine.opening import OpenRun
from fuyou.engine.token_outputs import AUX_LOSS, TokenOutput, TokenRequest, loss_inputs, streamed_values, token_output
from fuyou.model.loss.cross_entropy import IGNORED, targets_of
from fuyou.model.loss.loss_tensor import loss_tensor
from fuyou.optimizer.adam import Update
from fuyou.optimizer.clipping import clip_coefficient
from fuyou.runtime.accounting import StepReport
from fuyou.runtime.compute.step_computation import StepComputation, StepInputs
from fuyou.runtime.compute.token_computation import TokenComputation, TokenPass
from fuyou.schedule.batch import ENGINE_LOSS, LossInputs
from fuyou.schedule.tasks import Op, StepList


@dataclass
class EngineOutput:
    """The result of a forward pass."""

    loss: torch.Tensor
    """Mean cross entropy over the batch's labels and, if the model has one, its router loss times its coefficient: fp32
    scalar; ``backward()`` streams the backward pass."""
    aux_loss: float | None = None
    """Router loss before its coefficient, by the name it has in transformers; None if there is none."""


class Steps:
    """Takes the steps of a run.

    Args:
        run: open.
    """

    def __init__(self, run: OpenRun):
        self._run = run
        self._current: StepComputation | None = None
        self._in_flight = False
        self._norm: float | None = None  # of the step's gradient, once it is asked for
        self.norm_parameter: torch.nn.Parameter | None = None
        """A scalar whose gradient is to be the norm of the whole gradient."""
        self._known_loss: float | None = None  # of the step; None: the caller has computed it and not said it

    # -- training -------------------------------------------------------------------------------------------------

    def forward(self, batch: dict[str, Any], lr: float) -> EngineOutput:
        """Begin a step: run its forward pass.

        Args:
            batch: as :meth:`fuyou.Engine.__call__` has it.
            lr: the step's learning rate.
        """
        self._check_idle()
        labels = self._prepare(batch)
        current = self._begin(batch, labels, lr)
        loss = self._known_loss = current.loss = self._whole_loss(current)
        if not self._run.nonfinite.skips:
            self._should_skip(self._run.step_count + 1, loss, 0.0)
        return EngineOutput(loss_tensor(loss, current.backward), _aux_loss(current))

    def tokens(self, batch: dict[str, Any], request: TokenRequest, lr: float) -> TokenOutput:
        """Begin a step whose loss the caller computes, or run a forward pass alone where gradients are disabled.

        Args:
            batch: as :meth:`fuyou.Engine.tokens` has it.
            request: what is asked for.
            lr: the step's learning rate.
        """
        run, train = self._run, torch.is_grad_enabled()
        if train:
            self._check_idle()
        else:
            self.flush()
        batch = with_labels(run, batch)
        labels = check_batch(run, batch)
        passing = request.open(run.model, batch)
        self._fit(batch, loss_inputs(passing))
        mask = targets_of(batch["labels"], run.model.stack.family.shifts_labels) != IGNORED
        if not train:
            tasks = self._evaluation(batch, loss_inputs(passing))
            current = self._computation(tasks, batch, labels, time.monotonic(), passing)
            self._run_forward(current, tasks)
        else:
            current = self._begin(batch, labels, lr, passing)
        current.loss = 0.0
        self._whole_loss(current)  # which combines the router's
        values = dict(passing.values)
        if current.router is not None:
            values[AUX_LOSS] = torch.tensor(current.router.value)
        if train:
            self._known_loss, current.loss = None, math.nan
            norm = None if self.norm_parameter is None else (self.norm_parameter, self.gradient_norm)
            values = streamed_values(values, lambda gradients: self._backward(current, passing, gradients), norm)
        result = token_output(passing, mask, values)
        if current.router is not None:
            result.aux_coefficient = current.router.coefficient
        return result

    def note_loss(self, loss: float) -> None:
        """Note this rank's share of the loss of the step, which the caller computes: it is reported, and must be
        finite."""
        current = self._current
        if current is None:
            raise FinetuneError("engine.backward() comes after engine.tokens(), once in each step.")
        total = sum(self._run.agreement.all_gather_object(loss))
        self._known_loss = current.loss = total
        if not self._run.nonfinite.skips:
            self._should_skip(self._run.step_count + 1, total, 0.0)

    def _check_idle(self) -> None:
        if self._current is not None:
            raise FinetuneError(
                "engine() was called again before the last step was ended with loss.backward() and engine.step(). For "
                "a forward pass alone, use engine.eval_loss(), or torch.no_grad() around engine.tokens(); for larger "
                "batches, pass the whole batch at once; to leave out a batch that failed, call engine.abandon(), which "
                "goes back to the last committed step."
            )

    def _begin(
        self, batch: dict[str, Any], labels: int, lr: float, passing: TokenPass | None = None
    ) -> StepComputation:
        """Begin a step: schedule it, and run its forward pass."""
        run, runtime = self._run, self._run.runtime
        start_time, step = time.monotonic(), run.step_count + 1
        adam = replace(run.config.adam, lr=lr)
        run.commits.begin(Update(step, adam, 1.0, run.config.seed, skipped=run.nonfinite.skipped))
        loss = ENGINE_LOSS if passing is None else loss_inputs(passing)
        rows, seq_len = batch["input_ids"].shape
        shape = runtime.batch_shape(rows, seq_len, loss)
        self._in_flight = True  # before the schedule changes: an interrupt may come at any point
        waits = run.commits.clip_statistics(run.step_count).share > run.config.max_clipped_share
        commits = step % run.config.store.commit_every == 0
        tasks = runtime.scheduler.training_step(step, shape, commit=commits, defer_all=waits)
        current = self._current = self._computation(tasks, batch, labels, start_time, passing)
        runtime.submit(tasks)
        current.forward()
        return current

    def _backward(self, current: StepComputation, passing: TokenPass, gradients: dict[str, torch.Tensor]) -> None:
        """Run the backward pass of a step with the gradients of the caller's loss."""
        if current is not self._current:
            raise FinetuneError("The step that this loss is of has ended: call backward() before engine.step().")
        aux = gradients.pop(AUX_LOSS, None)
        factor = 0.0 if aux is None else float(aux)
        finite = math.isfinite(factor) and all(bool(one.isfinite().all()) for one in gradients.values())
        factors, all_finite = zip(*self._run.agreement.all_gather_object((factor, finite)), strict=True)
        factor, finite = sum(factors), all(all_finite)
        if not finite and not self._run.nonfinite.skips:
            self._should_skip(self._run.step_count + 1, math.nan, 0.0)
        if current.router is not None:
            current.router.weigh(factor)
        passing.gradients = gradients
        current.backward()

    def end(self) -> StepReport:
        """End the step whose backward pass has been run, and say what it was like."""
        run, runtime, current = self._run, self._run.runtime, self._current
        if current is None or not current.complete:
            raise FinetuneError("engine.step() comes after engine(**batch).loss.backward().")
        step = run.step_count + 1
        assert current.tasks.end is not None
        norm = self.gradient_norm()
        skipped = self._should_skip(step, 0.0 if self._known_loss is None else self._known_loss, norm)
        coefficient = clip_coefficient(norm, run.config.max_grad_norm or math.inf)
        clipped = not skipped and coefficient is not None
        if skipped:
            run.commits.skip_step(step)
        elif coefficient is not None:
            run.commits.scale_gradients(step, coefficient)
        run.step_count = step
        planned = runtime.memory_plan.batch
        micro_batch = planned.rows, planned.seq_len, planned.micro_rows
        run.commits.end(step, run.nonfinite.skipped, run.device.torch_device, run.user_state, micro_batch)
        runtime.plane.executor.finish(current.tasks.end)
        again = False
        if run.config.update_policy.speculative:
            again = (clipped or skipped) and runtime.scheduler.speculative
            runtime.submit(runtime.scheduler.resolve_speculation(step, clipped or skipped))
        self._current = self._norm = None
        self._in_flight = False
        return self._report(current, step, norm, skipped=skipped, clipped=clipped, updated_again=again)

    def _report(self, ended: StepComputation, step: int, norm: float, **happened: bool) -> StepReport:
        seconds, times = time.monotonic() - ended.start_time, self._run.runtime.accounting.take()
        return StepReport(
            step=step,
            loss=ended.loss,
            grad_norm=norm,
            seconds=seconds,
            tokens=ended.tokens,
            bound_seconds=times.busy,
            idle_seconds=times.idle,
            planned_read_bytes=ended.tasks.ssd_read_bytes(),
            planned_written_bytes=ended.tasks.ssd_written_bytes(),
            planned_sent_bytes=ended.tasks.sent_bytes(),
            kept_activation_bytes=ended.tasks.kept_bytes(self._run.runtime.memory_plan.kept_bytes),
            recomputation_saved=ended.recomputation_saved,
            aux_loss=_aux_loss(ended),
            busy_intervals=times.intervals,
            **happened,
        )

    def _should_skip(self, step: int, loss: float, norm: float) -> bool:
        """Return whether ``step`` is to change nothing.

        Raises:
            NonFiniteLoss: it is not finite, and training stops.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._finish_earlier_commit()
        return self._run.nonfinite.should_skip_step(step, loss, norm, self._run.commits.committed_step)

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._current is not None

    def gradient_norm(self) -> float:
        """Return the norm of the step's gradient summed over all ranks, after its backward pass. Collective."""
        if self._current is None or not self._current.complete:
            raise FinetuneError("A gradient's norm is there after loss.backward(), until engine.step().")
        if self._norm is None:
            self._norm = self._computed_norm(self._current)
        return self._norm

    def _computed_norm(self, current: StepComputation) -> float:
        run = self._run
        if run.agreement.is_alone:
            return current.gradient_norm()
        reductions = [task for task in current.tasks.tasks if task.op in (Op.GRADIENT_REDUCE, Op.GRADIENT_EXCHANGE)]
        run.runtime.plane.executor.wait(reductions)
        run.device.synchronize()
        squares = run.runtime.ranks.take_squares(current.tasks.step)
        return math.sqrt(sum(run.agreement.all_gather_object(float(squares))))

    # -- evaluation -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_loss(self, batch: dict[str, Any]) -> float:
        """Return the mean loss over a batch, forward only; pending updates are applied first."""
        self.flush()
        labels = self._prepare(batch)
        tasks = self._evaluation(batch)
        computation = self._computation(tasks, batch, labels, time.monotonic())
        self._run_forward(computation, tasks)
        return self._whole_loss(computation)

    def _evaluation(self, batch: dict[str, Any], loss: LossInputs = ENGINE_LOSS) -> StepList:
        """Return the tasks of a forward pass that changes nothing."""
        runtime = self._run.runtime
        rows, seq_len = batch["input_ids"].shape
        shape = runtime.batch_shape(rows, seq_len, loss)
        return runtime.scheduler.evaluation(self._run.step_count, shape)

    def _run_forward(self, computation: StepComputation, tasks: StepList) -> None:
        """Run a forward pass alone, without dropout.

        Args:
            computation: the pass.
            tasks: an evaluation's, not submitted yet.
        """
        model, runtime = self._run.model.stack.model, self._run.runtime
        model.eval()
        try:
            runtime.submit(tasks)
            computation.forward()
        except BaseException:
            # What waits for the rest of this pass must not wait for ever: nobody looks at what it leaves behind.
            for task in tasks.tasks:
                if task.op is Op.COMPUTE and not task.done:
                    runtime.plane.executor.finish(task)
            raise
        finally:
            runtime.accounting.take()
            model.train()

    # -- what both need -------------------------------------------------------------------------------------------

    def _prepare(self, batch: dict[str, Any]) -> int:
        """Check the batch and find room for it; return the number of labels in the batches of all ranks."""
        model = self._run.model
        if not model.task_type.generates and model.config.num_labels == 1:
            raise UserError(
                "This model gives a single number for each row, which cross entropy cannot learn from: make a loss of "
                'engine.tokens(outputs=("logits",)).'
            )
        labels = check_batch(self._run, batch)
        self._fit(batch)
        return labels

    def _fit(self, batch: dict[str, Any], loss: LossInputs = ENGINE_LOSS) -> None:
        """See that there are buffers in which the batch has room, on every rank."""
        size = largest_of_all(self._run, batch, loss)
        if not self._run.runtime.fits(*size):
            self.flush()
            self._run.runtime.fit(*size)

    def _computation(
        self,
        tasks: StepList,
        batch: dict[str, Any],
        labels: int,
        start_time: float,
        passing: TokenPass | None = None,
    ) -> StepComputation:
        run, runtime = self._run, self._run.runtime
        inputs = StepInputs(run.model, runtime.plane, tasks, batch, runtime.recomputations, start_time)
        if passing is not None:
            return TokenComputation(passing, inputs)
        return StepComputation(inputs, None if run.agreement.is_alone else labels)

    def _whole_loss(self, computation: StepComputation) -> float:
        """Return the sum of what all ranks have found, added in fp32 in their order, and the router loss of all
        together."""
        router = computation.router
        own = (computation.loss, [] if router is None else router.local_sums())
        of_all = self._run.agreement.all_gather_object(own)
        total, *others = (torch.tensor(loss, dtype=torch.float32) for loss, _ in of_all)
        for other in others:
            total += other
        if router is not None:
            router.combine([sums for _, sums in of_all])
            total += router.share
        return float(total)

    # -- committing -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Apply what is pending and commit the last step; returns when it is on SSD."""
        run = self._run
        if not run.is_open:
            return
        if self._current is not None:
            raise FinetuneError("A step is under way: call loss.backward() and engine.step() first.")
        runtime, requested = run.runtime, run.runtime.scheduler.commit_step
        if requested is None:
            requested = run.commits.committed_step
        if runtime.scheduler.pending or run.step_count != requested:
            runtime.submit(runtime.scheduler.flush(run.step_count, commit=True))
        runtime.plane.executor.drain()

    def close(self) -> None:
        """Commit a finished step; discard one that is in flight."""
        if self._run.is_running:
            if not self._in_flight:
                self.flush()
            elif self._current is not None:
                self._current.abandon()
                self._finish_earlier_commit()
        self._current = None

    def _finish_earlier_commit(self) -> None:
        """Let the previous step's commit, which runs beside this one, come to its end."""
        run = self._run
        if run.is_open:
            run.runtime.plane.executor.wait(run.commits.under_way(run.step_count + 1))


def _aux_loss(computation: StepComputation) -> float | None:
    """Return the router loss of a pass that has one."""
    return None if computation.router is None else computation.router.value
