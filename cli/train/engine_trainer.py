"""Training out of core on one machine, from the settings to a trained model, and the engine as the loop drives it."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from cli.job.claim import claim
from cli.job.job import Job
from cli.job.machine import plan_of
from cli.job.resolve import resolve
from cli.job.resumed import check_same_run
from cli.job.throughput import announcement
from cli.options.settings import Settings
from cli.report.results import EvaluationResult, StepResult, Usage
from cli.train.loop import Trainer, evaluate, train
from cli.train.objectives import (
    ObjectiveLoop,
    Ranks,
    ReferencePass,
    is_reference_short,
    objective_of,
    reference_identity,
)
from cli.train.process import Interrupts, Stopped
from common.activity import activity
from common.communication import all_gather_object
from common.data import Batches
from common.errors import UserError, printable
from common.models.adapters.options import AdapterOptions
from common.models.checkpoint.identity import weights_identity
from common.scratch import scratch_folder
from common.units import format_bytes
from fcdp.strategy.topology import Topology
from fuyou import Engine, NonFiniteLoss
from fuyou.layout.share import Share
from fuyou.planner import profile_or_measure

_STEP = "step"  # Key in the engine's user state of what it does not report itself
# Size of runs that are worth a measurement of the machine
PROFILED_PARAMETERS = 100_000_000
PROFILED_STEPS = 20
PROFILED_HOST_BYTES = 4 << 30  # Host memory from which on the measurement itself is sure to fit


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the sums of what all ranks give, place by place, added in the order of the ranks."""
    return [sum(each) for each in zip(*all_gather_object(list(values)), strict=True)]


class EngineTrainer(Trainer):
    """Trains out of core: alone, or as a rank of ``topology`` that takes its part of every batch and reports for its
    node.

    ``stopping`` returns whether a signal has come that ends the run after this step.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        topology: Topology | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = self._engine = engine
        self.is_resumed = engine.step_count > 0 if topology else job.settings.resume
        self.plan = asdict(engine.memory_plan) | {"ssd_bytes": engine.ssd_bytes}
        everywhere = " on every node" if topology else ""
        self.location = ("store", ", ".join(str(path / job.run_name) for path in job.ssd) + everywhere)
        self._topology = topology
        self._stopping = stopping
        self._ranks = Ranks(topology.rank, topology.world_size, sum_over_ranks) if topology else Ranks()
        self._node_ranks = topology.ranks_per_node if topology else 1
        self._job = job
        objective = objective_of(job)
        self._objective = None if objective is None else ObjectiveLoop(objective, engine, self._ranks)
        if job.traits.compares:
            engine.disable_dropout()
        self.clip_by = engine.clip_by and engine.clip_by.value
        self.past_host = engine.io == "kvikio"
        report = engine.committed_report
        noted = engine.user_state.get(_STEP)
        if report and noted:
            result = StepResult(
                report["loss"], report["grad_norm"], aux_loss=report["aux_loss"], watched=noted["watched"]
            )
            self.last_step = result, noted["lr"]
        if job.traits.needs_reference:
            writes = topology is None or topology.local_rank == 0
            ReferencePass(engine, self._ranks, writes).attach_all(job)

    def train_step(self, batch: dict[str, torch.Tensor], lr: float) -> StepResult:
        """Take a step; its updates and its commit may continue while the next one runs."""
        engine = self._engine
        watched = dict[str, float]()
        engine.lr = lr
        if self._objective is None:
            engine(**self._part(batch)).loss.backward()
        else:
            loss, watched = self._objective.loss(batch, self._job.settings.batch_size)
            engine.backward(loss)
        finite = {name: value for name, value in watched.items() if math.isfinite(value)}
        engine.user_state[_STEP] = {"lr": lr, "watched": finite}
        report = engine.step()
        return StepResult(
            loss=report.loss,
            watched=watched,
            grad_norm=report.grad_norm,
            clipped=report.clipped,
            updated_again=report.updated_again,
            aux_loss=report.aux_loss,
            sent_bytes=report.planned_sent_bytes * self._node_ranks if self._topology else None,
            busy_seconds=report.bound_seconds,
        )

    def _part(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._ranks.cut(batch, len(batch["input_ids"]))

    def can_continue_after(self, error: Exception) -> bool:
        return not isinstance(error, UserError)

    def stop_requested(self) -> bool:
        return self._ranks.sum([float(self._stopping())])[0] > 0

    def wait_for_writes(self) -> None:
        self._engine.flush()

    def evaluate(self, batches: Batches) -> EvaluationResult:
        size = self._job.settings.batch_size
        if self._objective is not None:
            return self._objective.evaluate(batches, size)
        return evaluate(
            batches, size, lambda batch: self._engine.eval_loss(**self._part(batch), router_loss=False)
        )

    def commit(self) -> None:
        self._engine.flush()

    def usage(self) -> Usage:
        """Return what this node took: its ranks take alike."""
        engine = self._engine
        ranks = self._node_ranks
        read, written = engine.io_bytes()
        return Usage(
            device_bytes=engine.device_peak_bytes,
            host_bytes=engine.host_memory_in_use() * ranks,
            host_peak_bytes=engine.host_peak_bytes * ranks,
            host_baseline_bytes=engine.host_baseline_bytes * ranks,
            io=(read * ranks, written * ranks),
            created_bytes=engine.created_bytes * ranks,
        )


def profile_once(job: Job, ranks: Share | None = None) -> None:
    """Measure this machine with this model, so that the engine can plan, where the run is worth up to a minute.

    The result is kept, so that it takes them once. ``ranks`` are all that will run, of which this is one.
    """
    drive_life = job.engine.store.drive_life
    if not drive_life and (job.parameters < PROFILED_PARAMETERS or job.steps < PROFILED_STEPS):
        return
    plan = job.plan
    if plan is None:
        assert job.training is not None and ranks is not None
        plan = plan_of(job.training.among(ranks), job.engine, job.device, job.ssd, ranks.ranks_per_node)
    try:
        if plan.limits[0] < PROFILED_HOST_BYTES:
            raise UserError(f"measuring takes {format_bytes(PROFILED_HOST_BYTES)} of host memory.")
        if plan.profile is None:
            print("profile  measuring this machine with this model, once", flush=True)
            profile_or_measure(plan)
    except UserError as error:
        if drive_life:  # else what does not fit, the engine says with more to go by
            print(f"profile  --drive-life is not applied: {error}", flush=True)
    plan.device.release()


def frozen_engine(job: Job, drives: Sequence[Path]) -> Engine:
    """Return an engine with the weights of a job before training, for forward passes, in other directories."""
    job.watched.check()
    config = job.engine.with_options(ssd=drives, leave_ssd=(), resume=False)
    if job.model.adapters is None:  # something has to be trainable, and costs least if it is small
        parameters = dict(job.model.base.named_parameters())
        smallest = min(parameters, key=lambda name: parameters[name].numel())
        config = config.with_options(trainable=[smallest])
    return Engine(job.checkpoint or job.settings.model, config)  # type: ignore[call-arg] # the config has ssd


def _extend_reference(job: Job) -> None:
    """Compute what a run that gets more steps lacks of its reference, with the model as it was before training."""
    if not (job.settings.resume and job.traits.needs_reference):
        return
    if isinstance(job.engine.weights.adapters, AdapterOptions):  # without them the model is as it was
        return
    if not is_reference_short(job, reference_identity(job, weights_identity(job.checkpoint))):
        return
    with contextlib.ExitStack() as stack:
        drives = [stack.enter_context(scratch_folder(path)) for path in job.ssd]
        with activity("writing the weights before training to the drives", announced=True):
            engine = stack.enter_context(frozen_engine(job, drives))
        engine.disable_dropout()
        ReferencePass(engine, Ranks(), writes=True).extend(job)


def finetune(settings: Settings, interrupts: Interrupts) -> None:
    """Train on one machine, from the settings to a trained model."""
    with contextlib.ExitStack() as stack:
        with activity("preparing the run: model, memory, data", announced=True):
            job = resolve(settings, lambda: stack.enter_context(claim(settings)))
            is_measured = job.checkpoint is None and job.tokenizer is None
            said = announcement(job) if is_measured and not settings.resume else ""
        if said:
            print(said, flush=True)
        print(printable(job.header()), flush=True)
        profile_once(job)
        interrupts.how_to_continue = job.settings.how_to_continue
        _extend_reference(job)
        where = ", ".join(str(path) for path in job.ssd)
        doing = f"opening the run in {where}" if job.settings.resume else f"writing the weights to {where}"
        with activity(doing, announced=True):
            job.watched.check()
            assert job.plan is not None
            engine = Engine(job.plan, job.engine)  # type: ignore[call-arg] # the config has ssd
        stack.enter_context(engine)
        try:
            check_same_run(job, engine)
            train(job, EngineTrainer(job, engine), interrupts)
            interrupts.finish()
        except KeyboardInterrupt:
            with activity(f"stopping {interrupts.where}: what is committed stays"):
                engine.close()
            committed = f"step {engine.committed_step} is committed"
            raise Stopped(
                f"stopped {interrupts.where}; {committed}. {job.settings.how_to_continue}"
            ) from None
        except UserError:
            raise
        except Exception as error:
            engine.close()
            if not isinstance(error, NonFiniteLoss):  # which is reported already
                error.add_note(f"Step {engine.committed_step} is committed.")
            error.add_note(job.settings.how_to_continue)
            raise
    job.close()
