"""A trial: a few blocks of the model are run by the engine itself, and simulated with what was measured part by part.

Where the processor computes, parts take longer in a run than alone: what they read has been written by other cores, the
lanes' threads want the interpreter and a core at the same moment, memory is fetched from the system and given back. So
the profile gets the times that its parts have in the engine: each in the proportion in which the engine's compute tasks
differ from the simulator's, which knows already what Adam and the drives cost beside them.
"""

import copy
import os
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from common.activity import activity
from common.errors import UserError
from fuyou.engine.engine import Engine
from fuyou.layout.record import DTYPES
from fuyou.layout.visits import Phase
from fuyou.model.recompute.policy import ActivationPolicy, operators_worth_saving
from fuyou.planner.choose_settings import PlannerContext
from fuyou.planner.evaluate import SAVE_NOTHING, Candidate, Evaluation, Evaluator
from fuyou.planner.machine import profiled_machine
from fuyou.planner.profiling import Profile, ProfiledWorkload, measure, save
from fuyou.planner.profiling.drives import FOLDER
from fuyou.planner.training_job import TrainingJob, describe_training
from fuyou.runtime.accounting import StepReport, TaskKind
from fuyou.runtime.devices.device import Device
from fuyou.schedule.tasks import ComputeTask

BLOCKS = 4
"""Half of the blocks keep what saves computing, so that one run shows both ways."""
MOST_PARAMETERS = 128e6
"""With more the store would take longer to fill than everything else that is measured."""
WARM_STEPS = 3
"""A step is traced before blocks take their short cuts, one more fills the pipeline, and drives are slow on new
files."""
STEPS, MOST_STEPS, STEPS_SECONDS = 3, 8, 2.0
"""Then at least so many steps, and most so many, unless they take longer than this."""


def measured_profile(context: PlannerContext) -> Profile:
    """Measure what this machine does with a run: every part alone, then some blocks in the engine.

    Takes a dozen seconds; the result is not kept.
    """
    alone = measure(context.workload, context.device)
    return as_the_engine_runs_it(alone, context.workload, context.device, context.limits)


def profile_or_measure(context: PlannerContext) -> Profile:
    """Return the profile that is kept, or one that is measured, and kept from now on."""
    if context.profile is not None:
        return context.profile
    with activity("measuring this machine with this model, which is kept for the next time"):
        return save(measured_profile(context), context.workload, context.device)


def as_the_engine_runs_it(
    profile: Profile, workload: ProfiledWorkload, device: Device, limits: tuple[int, int]
) -> Profile:
    """Return ``profile`` with the times of its parts in the engine, or as it is where a few seconds cannot show them.

    Nothing is tried on accelerators, whose computing does not mind what the host's cores do, nor where a micro-batch
    was too long to be measured whole, or a few blocks with the embeddings have over :data:`MOST_PARAMETERS`.

    Args:
        profile: of parts alone.
        workload: which it is of.
        device: that computes.
        limits: bytes of host and of device memory.

    Raises:
        FinetuneError: a drive or the optimizer process failed.
    """
    if not device.shares_host_memory or profile.measured_tokens < profile.tokens:
        return profile
    start_time = time.monotonic()
    try:
        job = _few_blocks(workload)
    except Exception:  # whatever a family makes of another number of blocks
        return profile
    if job.parameters > MOST_PARAMETERS:
        return profile
    machine = profiled_machine(profile, True, limits[1], limits[0], len(workload.directories), None)
    evaluator = Evaluator(job, machine)
    activation_policy = SAVE_NOTHING
    if evaluator.trace is not None and profile.kept_bytes:
        activation_policy = ActivationPolicy(tuple(operators_worth_saving(evaluator.trace)), len(job.shape.blocks) // 2)
    try:
        simulated = evaluator.evaluate(Candidate(workload.rows, 0.0, activation_policy))
        with torch.random.fork_rng(devices=[]):
            measured = _run(job, workload, device, limits[0], activation_policy)
    except UserError:
        return profile  # no room for the trial
    corrected = corrected_profile(profile, simulated_seconds(simulated), measured)
    return replace(corrected, measured_in_seconds=profile.measured_in_seconds + time.monotonic() - start_time)


def corrected_profile(
    profile: Profile, simulated: Mapping[TaskKind, float], measured: Mapping[TaskKind, float]
) -> Profile:
    """Return ``profile`` with its parts' times in proportion to what the engine's tasks took, over the simulator's."""
    longer = {kind: measured[kind] / simulated[kind] for kind in simulated.keys() & measured.keys() if simulated[kind]}
    finish = profile.block_finish_seconds  # a part of the same task, and measured by itself

    def seconds(alone: float, phase: Phase, kept: bool = False, beside: float = 0.0) -> float:
        # Never below half: a part that is done in no time is none.
        return max(alone / 2, (alone + beside) * longer.get(TaskKind(phase, kept), 1.0) - beside)

    return replace(
        profile,
        embed_forward_seconds=seconds(profile.embed_forward_seconds, Phase.EMBED_FORWARD),
        block_forward_seconds=seconds(profile.block_forward_seconds, Phase.BLOCK_FORWARD),
        block_backward_seconds=seconds(profile.block_backward_seconds, Phase.BLOCK_BACKWARD, beside=finish),
        kept_forward_seconds=seconds(profile.kept_forward_seconds, Phase.BLOCK_FORWARD, True),
        kept_backward_seconds=seconds(profile.kept_backward_seconds, Phase.BLOCK_BACKWARD, True, finish),
        head_seconds=seconds(profile.head_seconds, Phase.HEAD),
        embed_backward_seconds=seconds(profile.embed_backward_seconds, Phase.EMBED_BACKWARD),
    )


def simulated_seconds(evaluation: Evaluation) -> dict[TaskKind, float]:
    """Return how long compute tasks of each kind take in a simulated step, on average."""
    seconds: dict[TaskKind, list[float]] = {}
    for task in evaluation.tasks.tasks:
        if isinstance(task, ComputeTask):
            seconds.setdefault(TaskKind.of(task), []).append(task.finished_at - task.started_at)
    return {kind: statistics.mean(one) for kind, one in seconds.items()}


def typical_seconds(steps: Iterable[Mapping[TaskKind, Sequence[float]]]) -> dict[TaskKind, float]:
    """Return how long compute tasks of each kind took in measured steps: the median of the steps' averages."""
    seconds: dict[TaskKind, list[float]] = {}
    for step in steps:
        for kind, one in step.items():
            seconds.setdefault(kind, []).append(statistics.mean(one))
    return {kind: statistics.median(one) for kind, one in seconds.items()}


def _few_blocks(workload: ProfiledWorkload) -> TrainingJob:
    """Describe a training of the same model with fewer blocks, and a batch of one micro-batch."""
    config = _shallow(workload.config)
    return describe_training(
        config,
        workload.rows,
        workload.seq_len,
        precision=workload.precision,
        micro_batch=workload.rows,
        compiled=workload.compiled,
    )


def _shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = min(BLOCKS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    return config


def _run(
    job: TrainingJob, workload: ProfiledWorkload, device: Device, host_bytes: int, activation_policy: ActivationPolicy
) -> dict[TaskKind, float]:
    """Run the engine, and return the seconds of its compute tasks."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    rows, seq_len = workload.rows, workload.seq_len
    vocabulary = job.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (rows, seq_len), generator=torch.Generator().manual_seed(0))
    steps: list[StepReport] = []
    with (
        _scratch(workload.directories) as name,
        Engine(
            job.config,
            ssd=workload.directories,
            run_name=name,
            overwrite=True,
            device=device.torch_device,
            dtype=names[workload.precision.dtype],
            optimizer_dtype=names[workload.precision.optimizer_dtype],
            optimizer=workload.precision.optimizer,
            host_memory=host_bytes,
            batch_shape=(rows, seq_len),
            micro_batch=rows,
            kept_activations=activation_policy,
            single_slot=True,
            compile=workload.compiled,
            prove=False,
        ) as engine,
    ):
        while len(steps) < WARM_STEPS + STEPS or (
            len(steps) < WARM_STEPS + MOST_STEPS and sum(step.seconds for step in steps[WARM_STEPS:]) < STEPS_SECONDS
        ):
            engine(input_ids=ids, labels=ids).loss.backward()
            steps.append(engine.step())
    return typical_seconds(step.task_seconds for step in steps[WARM_STEPS:])


@contextmanager
def _scratch(directories: Sequence[Path]) -> Iterator[str]:
    """Yield the name of a folder that is removed from all of ``directories`` in the end.

    A later profile clears up after a kill.
    """
    name = f"{FOLDER}{os.getpid()}"
    try:
        yield name
    finally:
        for path in directories:
            shutil.rmtree(path / name, ignore_errors=True)
