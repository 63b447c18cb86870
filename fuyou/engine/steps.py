"""Training steps and evaluations of an open run: forward pass, backward pass, the end of a step, its commit."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.activity import activity
from common.errors import FinetuneError, UserError
from fuyou.checkpoint.commits import checked_user_state
from fuyou.engine.opening import OpenRun
from fuyou.engine.runtime import Room
from fuyou.engine.token_outputs import AUX_LOSS, TokenOutput, TokenRequest, streamed_values
from fuyou.model.loss.cross_entropy import IGNORED
from fuyou.model.loss.token_head import loss_tensor
from fuyou.model.training_batch import TrainingBatch
from fuyou.optimizer.adam import Update
from fuyou.optimizer.clipping import clip_coefficient
from fuyou.optimizer.nonfinite import check_finite
from fuyou.runtime.accounting import StepReport
from fuyou.runtime.compute.step_computation import StepComputation
from fuyou.runtime.compute.token_computation import TokenComputation, TokenPass
from fuyou.schedule.batch import ENGINE_LOSS, LossInputs
from fuyou.schedule.tasks import Op, Resource, StepList


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
        self._current: StepComputation | None = None  # The step that has begun and not ended
        self._torn = False  # Whether what is scheduled and what has run may differ: see _indivisible
        self._norm: float | None = None  # of the step's gradient, once it is requested
        self.norm_parameter: torch.nn.Parameter | None = None
        """A scalar whose gradient is to be the norm of the whole gradient."""

    # -- training -------------------------------------------------------------------------------------------------

    def forward(self, given: dict[str, Any], lr: float) -> EngineOutput:
        """Begin a step: run its forward pass.

        Args:
            given: the batch, as :meth:`fuyou.Engine.__call__` has it.
            lr: the step's learning rate.
        """
        self._check_idle()
        batch, labels = self._checked(given)
        self._fit(batch)
        current = self._run_forward(batch, labels, lr)
        with self._indivisible():
            loss = current.loss = self._whole_loss(current)
            self._check_finite(loss, 0.0)
        return EngineOutput(loss_tensor(loss, lambda: self._backward(current)), _aux_loss(current))

    def tokens(self, given: dict[str, Any], request: TokenRequest, lr: float) -> TokenOutput:
        """Begin a step whose loss the caller computes, or run a forward pass alone where gradients are disabled.

        Args:
            given: the batch, as :meth:`fuyou.Engine.tokens` has it.
            request: what is requested.
            lr: the step's learning rate.
        """
        run = self._run
        train = torch.is_grad_enabled()
        if train:
            self._check_idle()
        else:
            self.flush()
        batch, labels = self._checked(given, engine_loss=False)
        passing = request.open(run.model, batch)
        self._fit(batch, passing.loss_inputs)
        if not train:
            current = self._evaluate(batch, labels, passing)
        else:
            current = self._run_forward(batch, labels, lr, passing)
        with self._indivisible() if train else contextlib.nullcontext():
            current.loss = 0.0
            self._whole_loss(current)  # which combines the router's
        values = dict(passing.values)
        if current.router is not None:
            values[AUX_LOSS] = torch.tensor(current.router.value)
        if train:
            current.loss = math.nan  # until the caller notes it
            norm = None if self.norm_parameter is None else (self.norm_parameter, self.gradient_norm)
            values = streamed_values(
                values, lambda grads: self._token_backward(current, passing, grads), norm
            )
        aux_loss = values.pop(AUX_LOSS, None)
        mask = batch.targets != IGNORED
        result = TokenOutput(values, mask, aux_loss)
        if passing.reference is not None:
            result.reference = TokenOutput(passing.reference, mask)
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
        current.loss = total
        self._check_finite(total, 0.0)

    def check_whole(self) -> None:
        """See that the run is open, and that nothing has failed halfway.

        Raises:
            FinetuneError: it is closed, or something has.
        """
        if self._run.closed:
            raise FinetuneError("The engine has been closed.")
        if self._torn:
            raise FinetuneError(
                "The last call failed halfway, and what it began cannot be completed: call engine.abandon(), which "
                f"goes back to the last committed step ({self._run.commits.committed_step}), or engine.close()."
            )

    @contextlib.contextmanager
    def _indivisible(self) -> Iterator[None]:
        """Do what must be done as a whole: an exception in between, from any source, leaves the run torn."""
        before = self._torn
        self._torn = True
        yield
        self._torn = before

    def _check_idle(self) -> None:
        self.check_whole()
        if self._current is not None:
            raise FinetuneError(
                "engine() was called again before the last step was ended with loss.backward() and engine.step(). For "
                "a forward pass alone, use engine.eval_loss(), or torch.no_grad() around engine.tokens(); for larger "
                "batches, pass the whole batch at once; to leave out a batch that failed, call engine.abandon(), which "
                "goes back to the last committed step."
            )

    def _run_forward(
        self, batch: TrainingBatch, labels: int, lr: float, passing: TokenPass | None = None
    ) -> StepComputation:
        run = self._run
        runtime = self._run.runtime
        start_time = time.monotonic()
        step = run.step_count + 1
        update = Update(step, replace(run.config.adam, lr=lr))
        shape = runtime.batch_shape(*batch.size, ENGINE_LOSS if passing is None else passing.loss_inputs)
        micro = self._micro_batches(batch)
        with self._indivisible():
            run.commits.begin(update)
            tasks = runtime.scheduler.training_step(
                step, shape, commit=step % run.config.store.commit_every == 0
            )
            current = self._current = self._computation(tasks, micro, labels, start_time, passing)
            runtime.submit(tasks)
            with self._shown(current):
                current.forward()
        return current

    @contextlib.contextmanager
    def _shown(self, current: StepComputation) -> Iterator[None]:
        """Show how far a step is whose rows pass in chunks: it may take hours."""
        if current.tasks.chunks == 1:
            yield
            return
        with activity(f"taking step {current.tasks.step}") as doing:
            doing.since = current.start_time
            doing.share = lambda: current.share
            yield

    def _token_backward(
        self, current: StepComputation, passing: TokenPass, gradients: dict[str, torch.Tensor]
    ) -> None:
        self._check_backward(current)
        aux = gradients.pop(AUX_LOSS, None)
        factor = 0.0 if aux is None else float(aux)
        finite = math.isfinite(factor) and all(
            bool(gradient.isfinite().all()) for gradient in gradients.values()
        )
        factors, all_finite = zip(*self._run.agreement.all_gather_object((factor, finite)), strict=True)
        factor = sum(factors)
        finite = all(all_finite)
        if not finite:
            self._check_finite(math.nan, 0.0)
        if current.router is not None:
            current.router.weigh(factor)
        passing.gradients = gradients
        self._backward(current)

    def _check_backward(self, current: StepComputation) -> None:
        self.check_whole()
        if current is not self._current:
            raise FinetuneError("The step of this loss has ended: call backward() before engine.step().")
        if current.complete:
            raise FinetuneError(
                "backward() was called twice: the blocks stream once. Call engine.step() now."
            )

    def _backward(self, current: StepComputation) -> None:
        self._check_backward(current)
        with self._indivisible(), self._shown(current):
            current.backward()

    def end(self) -> StepReport:
        """End the step whose backward pass has been run, and say what it was like."""
        self.check_whole()
        run = self._run
        runtime = self._run.runtime
        current = self._current
        if current is None or not current.complete:
            raise FinetuneError("engine.step() comes after engine(**batch).loss.backward().")
        step = run.step_count + 1
        user = checked_user_state(run.user_state)
        assert current.tasks.end is not None
        norm = self.gradient_norm()
        with self._indivisible():
            self._check_finite(0.0, norm)
            coefficient = clip_coefficient(norm, run.config.optimizer.max_grad_norm or math.inf)
            clipped = coefficient is not None
            if coefficient is not None:
                run.commits.scale_gradients(step, coefficient)
            run.step_count = step
            planned = runtime.memory_plan.batch
            micro_batch = planned.rows, planned.seq_len, planned.micro_rows, planned.chunk or 0
            last = {"loss": current.loss, "grad_norm": norm, "aux_loss": _aux_loss(current)}
            run.commits.end(step, run.device.torch_device, user, last, micro_batch)
            runtime.plane.executor.finish(current.tasks.end)
            again = False
            if run.config.update_policy.speculative:
                again = clipped and runtime.scheduler.speculative
                runtime.submit(runtime.scheduler.resolve_speculation(step, clipped))
            report = self._report(current, step, norm, clipped=clipped, updated_again=again)
            self._current = self._norm = None
        return report

    def _report(self, ended: StepComputation, step: int, norm: float, **happened: bool) -> StepReport:
        seconds = time.monotonic() - ended.start_time
        busy = self._run.runtime.accounting.take()
        watch = self._run.write_watch
        if watch is not None:
            watch.step(busy[Resource.SSD.value], self._run.runtime.io.training)
            if self._run.agreement.is_alone:  # several ranks tell each other with the next norm
                watch.note([watch.slow_rate])
        return StepReport(
            step=step,
            loss=ended.loss,
            grad_norm=norm,
            seconds=seconds,
            tokens=ended.tokens,
            busy_intervals=busy,
            planned_read_bytes=ended.tasks.ssd_read_bytes(),
            planned_written_bytes=ended.tasks.ssd_written_bytes(),
            planned_sent_bytes=ended.tasks.sent_bytes(),
            saved_activation_bytes=ended.tasks.saved_bytes(self._run.runtime.memory_plan.saved_bytes),
            recomputation_saved=ended.recomputation_saved,
            aux_loss=_aux_loss(ended),
            **happened,
        )

    def _check_finite(self, loss: float, norm: float) -> None:
        step = self._run.step_count + 1
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._finish_earlier_commit(step)
        check_finite(step, loss, norm, self._run.commits.committed_step)

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._current is not None or self._torn

    def gradient_norm(self) -> float:
        """Return the norm of the step's gradient summed over all ranks, after its backward pass. Collective."""
        self.check_whole()
        if self._current is None or not self._current.complete:
            raise FinetuneError("The gradient norm exists between loss.backward() and engine.step().")
        if self._norm is None:
            self._norm = self._computed_norm(self._current)
        return self._norm

    def _computed_norm(self, current: StepComputation) -> float:
        run = self._run
        if run.agreement.is_alone:
            return current.parameters.gradient_norm()
        reductions = [
            task for task in current.tasks.tasks if task.op in (Op.GRADIENT_REDUCE, Op.GRADIENT_EXCHANGE)
        ]
        run.runtime.plane.executor.wait(reductions)
        run.device.synchronize()
        watch = run.write_watch
        slow = None if watch is None else watch.slow_rate
        with self._indivisible():  # the squares are taken once
            squares = run.runtime.ranks.take_squares(current.tasks.step)
            of_all, slow_rates = zip(*run.agreement.all_gather_object((float(squares), slow)), strict=True)
        if watch is not None:
            watch.note(slow_rates)
        return math.sqrt(sum(of_all))

    # -- evaluation -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_loss(self, given: dict[str, Any], router_loss: bool) -> float:
        """Return the mean loss over a batch, forward only; pending updates are applied first."""
        self.flush()
        batch, labels = self._checked(given)
        self._fit(batch)
        computation = self._evaluate(batch, labels)
        if not router_loss:
            computation.router = None
        return self._whole_loss(computation)

    def _evaluate(
        self, batch: TrainingBatch, labels: int, passing: TokenPass | None = None
    ) -> StepComputation:
        run = self._run
        runtime = self._run.runtime
        shape = runtime.batch_shape(*batch.size, ENGINE_LOSS if passing is None else passing.loss_inputs)
        micro = self._micro_batches(batch)
        start_time = time.monotonic()
        with run.model.stack.evaluating():
            try:
                with self._indivisible():
                    tasks = runtime.scheduler.evaluation(run.step_count, shape)
                    computation = self._computation(tasks, micro, labels, start_time, passing)
                    runtime.submit(tasks)
                try:
                    computation.forward()
                except BaseException:
                    # What waits for the rest of this pass must not wait for ever: nothing reads what it leaves.
                    with self._indivisible():
                        runtime.plane.executor.finish_all(
                            task for task in tasks.tasks if task.op is Op.COMPUTE
                        )
                    raise
            finally:
                runtime.accounting.take()
        return computation

    # -- what both need -------------------------------------------------------------------------------------------

    def _checked(self, given: dict[str, Any], engine_loss: bool = True) -> tuple[TrainingBatch, int]:
        """Return a batch that can be trained on, and the number of labels in the batches of all ranks.

        Raises:
            UserError: it cannot, or another rank's cannot.
        """
        batch = None
        refusal = None
        try:
            batch = TrainingBatch.of(self._run.model, given, engine_loss=engine_loss)
        except UserError as error:
            refusal = error
        result = None if refusal is None else refusal.as_written, 0 if batch is None else batch.label_count
        refusals, counts = zip(*self._run.agreement.all_gather_object(result), strict=True)
        for rank, words in enumerate(refusals):
            if words is not None:
                raise refusal or UserError(
                    f"Rank {rank} was given a batch that cannot be trained on: {words}"
                )
        assert batch is not None
        if not sum(counts):
            raise UserError(
                "No token of this batch has a label (all are -100): there is nothing to learn from it."
            )
        return batch, sum(counts)

    def _fit(self, batch: TrainingBatch, loss: LossInputs = ENGINE_LOSS) -> None:
        """See that there are buffers in which the batch has room, on every rank: all or none make theirs again."""
        runtime = self._run.runtime
        # Attention makes no mask then
        in_chunks = batch.size[1] > (runtime.memory_plan.batch.chunk or batch.size[1])
        local = Room(*batch.size, batch.images, batch.padded and not in_chunks, loss.outputs, loss.reference)
        of_all = self._run.agreement.all_gather_object(local)
        needed = Room(*map(max, zip(runtime.room, *of_all, strict=True)))
        if not runtime.is_open or needed != runtime.room:
            self.flush()
            before = runtime.memory_plan
            runtime.plan(needed)
            try:
                self._run.prove_chunks()
            except BaseException:
                runtime.memory_plan = before
                raise
            with self._indivisible():
                runtime.reopen()

    def _micro_batches(self, batch: TrainingBatch) -> list[dict[str, torch.Tensor]]:
        run = self._run
        planned = self._run.runtime.memory_plan.batch
        if planned.chunk is not None and batch.size[1] > planned.chunk:
            return batch.chunks(planned.chunk, run.device.torch_device, run.model.stack)
        rows = min(batch.size[0], planned.micro_rows)
        return batch.micro_batches(rows, run.device.torch_device, run.config.precision.dtype)

    def _computation(
        self,
        tasks: StepList,
        micro_batches: list[dict[str, torch.Tensor]],
        labels: int,
        start_time: float,
        passing: TokenPass | None = None,
    ) -> StepComputation:
        runtime = self._run.runtime
        step = (
            self._run.model,
            runtime.plane,
            tasks,
            micro_batches,
            labels,
            runtime.recomputations,
            start_time,
        )
        return StepComputation(*step) if passing is None else TokenComputation(passing, *step)

    def _whole_loss(self, computation: StepComputation) -> float:
        """Return the sum of what all ranks have found, added in fp32 in their order, and the router loss of all
        together."""
        router = computation.router
        local = (computation.loss, [] if router is None else router.local_sums())
        of_all = self._run.agreement.all_gather_object(local)
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
        self.check_whole()
        run = self._run
        if not run.is_open:
            return
        if self._current is not None:
            raise FinetuneError("A step is in progress: call loss.backward() and engine.step() first.")
        runtime = run.runtime
        requested = run.runtime.scheduler.commit_step
        if requested is None:
            requested = run.commits.committed_step
        if runtime.scheduler.pending or run.step_count != requested:
            with self._indivisible():
                runtime.submit(runtime.scheduler.flush(run.step_count, commit=True))
        runtime.plane.executor.drain()

    def close(self) -> None:
        """Commit a finished step; discard one that is in flight."""
        if self._run.is_running:
            if self._current is not None:
                self._current.skip_forward()
                self._finish_earlier_commit(self._current.tasks.step)
            elif not self._torn:
                self.flush()
        self._current = None
        self._torn = False

    def _finish_earlier_commit(self, step: int) -> None:
        """Let the commits of steps before ``step``, which run next to it, come to their end."""
        run = self._run
        if run.is_open:
            run.runtime.plane.executor.wait(run.commits.unfinished(step))


def _aux_loss(computation: StepComputation) -> float | None:
    return None if computation.router is None else computation.router.value
