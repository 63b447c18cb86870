"""The training loop: one for an engine on one machine, for ranks out of core and for ranks in memory."""

import contextlib
import json
import math
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cli.job.job import Job, TrainedModel
from cli.job.outputs import BEST, CHECKPOINTS, RESULT, STEP
from cli.job.resumed import check_files
from cli.options.loss_sum import LossSum, edited_lines
from cli.options.run_record import EVALUATIONS, METRICS, RUN, read_json
from cli.report.log import MetricsLogger
from cli.report.page import read_metrics
from cli.report.results import EvaluationResult, StepResult, Summary, Usage, bound, step_metrics
from cli.train.process import Interrupts, RankProcess, Stopped
from common.activity import activity
from common.data import Batches
from common.errors import UserError
from common.files import replace_file
from common.models.adapters.gguf_adapter import FILE as GGUF_ADAPTER
from common.models.checkpoint.gguf import source_of
from common.models.generation import write_stops
from common.units import counted, format_count
from fuyou.model.loss.cross_entropy import targets_of


class Trainer(ABC):
    """What the loop drives. On several ranks, each has one and all call everything alike."""

    model: TrainedModel
    is_resumed: bool  # Whether to print that the run continues
    plan: Mapping[str, Any]  # Plan of the run, as JSON
    location: tuple[str, str]  # What the run can be continued from, in one word, and where that lies
    # Result and learning rate of the last committed step of a continued run; None: its line is there for sure
    last_step: tuple[StepResult, float] | None = None
    # How gradients are clipped out of core: `deferral` or `speculation`; None: not
    clip_by: str | None = None
    past_host: bool = False  # Whether parameters get from SSDs to the device without crossing host memory

    @abstractmethod
    def train_step(self, batch: dict[str, torch.Tensor], lr: float) -> StepResult:
        """Take a step with the batch of all ranks, and commit it if that is due."""

    @abstractmethod
    def evaluate(self, batches: Batches) -> EvaluationResult:
        """Return the loss on held-out data."""

    @abstractmethod
    def commit(self) -> None:
        """Make sure that the last step is on the drives."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return what this node took so far."""

    @abstractmethod
    def stop_requested(self) -> bool:
        """Return whether any rank wants to stop after this step; the same on all ranks."""

    def has_commit(self) -> bool:
        """Return whether the run has a commit: out of core since it was opened."""
        return True

    def commit_if_due(self, step: int) -> None:
        """Commit the last step if that is due, and not done by :meth:`train_step`."""
        return

    def wait_for_writes(self) -> None:
        """Wait for what steps still write, so that no evaluation has to."""
        return


class Lap:
    """Time and traffic from the end of one step to that of the next: what a step writes back runs on into the next."""

    def __init__(self, trainer: Trainer) -> None:
        self.usage = trainer.usage()
        self._trainer = trainer
        self._start_time = time.perf_counter()

    def next(self) -> tuple[float, tuple[int, int]]:
        """Return seconds, and bytes read from and written to SSDs, since the last call, or since the beginning."""
        start_time = self._start_time
        self._start_time = time.perf_counter()
        (read_before, written_before), self.usage = self.usage.io or (0, 0), self._trainer.usage()
        read, written = self.usage.io or (0, 0)
        return self._start_time - start_time, (read - read_before, written - written_before)


EVALUATION = "evaluation.json"  # File in the best checkpoint with the evaluation that makes it the best


def train(job: Job, trainer: Trainer, process: Interrupts | RankProcess) -> None:
    """Take all steps that are left, export the result, and print how it went.

    If the user stops the run, raise KeyboardInterrupt, or with several ranks Stopped.
    """
    model = trainer.model
    done = trainer.model.step_count
    if process.is_rank0 and trainer.is_resumed:
        restarted = " (restarted: a rank was lost)" if process.restarted else ""
        print(f"resume   after step {done:,} of {job.steps:,}{restarted}", flush=True)
        for change in job.settings.changes:
            print(f"changed  {change}", flush=True)
    process.enter("before the first step")
    _begin(job, trainer, process.is_rank0)
    losses = _losses_until(done, trainer)
    tokens = job.rows * job.seq_len
    flops_per_token = model.model_flops_per_token(job.seq_len)
    summary = Summary(tokens, flops_per_token)
    with contextlib.ExitStack() as stack:
        logger = None
        if process.is_rank0:
            logger = stack.enter_context(MetricsLogger(job, done, trainer.plan, trainer.last_step, losses))
        after = AfterStep(job, trainer, process, logger)
        losses.put(model.user_state)  # which AfterStep reads as it was committed
        steps = range(done + 1, 1 if job.settings.export else job.steps + 1)
        if not job.settings.export:
            # What a run that was killed has left undone, or the evaluation before the first step
            after.run(done)
        lap = Lap(trainer)
        was_interrupted = True
        for step in steps:
            if after.is_over():
                break
            after.forget(step)
            process.enter(f"in step {step}")
            batch = job.batches.batch(step - 1)
            lr = job.learning_rate.at(step)
            _check_ids(job, batch)
            # The line of each step says when the next one is due; after an evaluation or a checkpoint it comes later.
            with (
                activity(f"taking step {step} of {job.steps}")
                if was_interrupted
                else contextlib.nullcontext()
            ):
                result = trainer.train_step(batch, lr)
            losses = losses.add(step, result.loss, result.grad_norm, lr)
            losses.put(model.user_state)
            if step == 1 and result.grad_norm == 0:
                raise UserError(
                    "The gradient of the first step is exactly 0 for everything that is trained, so the run would "
                    "learn nothing: check what --peft-config adapts, and the labels of the data."
                )
            if after.evaluates(step):
                trainer.wait_for_writes()
            seconds, moved = lap.next()
            summary.add(result, seconds, moved)
            if logger is not None:
                rate = tokens / seconds
                per_device = rate / process.world_size
                took = step_metrics(
                    result, seconds, per_device, per_device * flops_per_token, lap.usage, moved
                )
                epoch = (
                    ""
                    if job.tokenizer is None
                    else f", epoch {step * job.settings.batch_size / job.batches.rows:.2f}"
                )
                bound_by = f", bound by {bound(result.busy_seconds)}" if result.busy_seconds else ""
                text = f"{result}, lr {lr:.3g}{epoch}, {format_count(rate)} tokens/s{bound_by}"
                logger.step(step, result, lr, took, text)
            else:
                job.outputs.check_in_place()  # as this node sees it; rank 0's logger does the same
            # After the line of the step, which is dropped again if there is no commit
            trainer.commit_if_due(step)
            _begin(job, trainer, process.is_rank0)
            if trainer.stop_requested() and step < job.steps:
                trainer.commit()
                raise Stopped(
                    f"stopped after step {step}, which is committed. {job.settings.how_to_continue}"
                )
            was_interrupted = after.run(step)
            if was_interrupted:
                lap = Lap(trainer)
            if after.is_late(step, seconds):
                break
        if not job.settings.export:
            after.is_over()
    process.enter("after the last step")
    with activity("writing the last step to the drives"):
        trainer.commit()
    _begin(job, trainer, process.is_rank0)
    summary.add_moved(lap.next()[1])
    process.enter("after the last step")
    is_saved = job.settings.save and not after.time_is_up
    if is_saved:
        process.enter("while the result was written")
        _export(job, trainer, process.is_rank0)
    if not process.is_rank0:
        return
    if logger is not None and not (after.time_is_up or job.settings.export):
        after.forget(math.inf)
        logger.note_end(model.step_count, losses)
    for line in (after.last_words, "" if job.settings.export else after.lost_best()):
        if line:
            print(line, flush=True)
    if summary.steps:
        print(summary.text(lap.usage, trainer.clip_by, trainer.past_host))
        if not is_saved and job.outputs.has_result:
            command = shlex.join(["finetune", "export", "--output", str(job.output)])
            print(
                f"kept     the result of an earlier step in {job.output}: {command} writes that of this one"
            )
    elif not job.settings.export:
        print(f"nothing to do: all {job.steps:,} steps are done")
    print(_where(job, trainer.location, summary.steps, is_saved), flush=True)


def _losses_until(done: int, trainer: Trainer) -> LossSum:
    """Return the hash over the losses of the steps that are ``done``; the last one may have been committed before it
    was added. A run of an earlier version begins with the next step."""
    losses = LossSum.committed(trainer.model.user_state)
    if losses is not None and losses.step == done - 1 and trainer.last_step is not None:
        result, lr = trainer.last_step
        losses = losses.add(done, result.loss, result.grad_norm, lr)
    return losses if losses is not None and losses.step == done else LossSum(done, done)


def _begin(job: Job, trainer: Trainer, is_rank0: bool) -> None:
    """Remove what an earlier run has left as soon as this one has a commit."""
    if is_rank0 and not job.outputs.has_begun and trainer.has_commit():
        job.outputs.begin()


def _check_ids(job: Job, batch: dict[str, Any]) -> None:
    largest = int(batch["input_ids"].max())
    if largest >= job.choice.vocab_size:
        raise UserError(
            f"The tokenizer gives token {largest}, and the model knows {job.choice.vocab_size:,} tokens (0 to "
            f"{job.choice.vocab_size - 1}): {job.checkpoint} holds a tokenizer that does not belong to its model: copy "
            "there the tokenizer files that come with the model."
        )


# Key in the user state: a hash of the held-out data, and the step since which evaluations on them count
_HELD_OUT = "held_out"


class AfterStep:
    """What is due after a step, the same on all ranks: an evaluation, checkpoints, and the end of the run.

    None of it is part of the step's commit. So each is done only where its result is not there yet, and a continued run
    begins with what its last committed step still lacks: it ends with the files of a run that was never killed.
    """

    def __init__(
        self, job: Job, trainer: Trainer, process: Interrupts | RankProcess, logger: MetricsLogger | None
    ) -> None:
        self._job = job
        self._trainer = trainer
        self._process = process
        self._logger = logger
        self._outputs = job.outputs
        # What later steps left was not committed: it is replaced
        self._resumed_from = trainer.model.step_count
        self._uncommitted = self._left_by_later_steps() if process.is_rank0 else {}
        self._losses = self._earlier_losses()
        self._note_evaluations()
        self._name_damage()
        self.time_is_up = False
        self.last_words = ""  # why the run has ended before its last step

    def _left_by_later_steps(self) -> dict[str, int]:
        """Return the checkpoints, with their steps, that an earlier process has saved after steps that were lost."""
        names = self._outputs.checkpoints(math.inf, after=self._resumed_from)
        steps = {name: int(name.removeprefix(f"{CHECKPOINTS}/{STEP}")) for name in names}
        if (step := self._step_of_best()) > self._resumed_from:
            steps[f"{CHECKPOINTS}/{BEST}"] = step
        return steps

    def _step_of_best(self) -> int:
        """Return the step of the checkpoint that is there as the best one; 0 if there is none."""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(read_json(self._job.output / CHECKPOINTS / BEST / EVALUATION)["step"])
        return 0

    def _name_damage(self) -> None:
        """Say which checkpoints of an earlier process are not what that has saved, and whether the best one is lost."""
        if not (self._process.is_rank0 and self._resumed_from):
            return
        outdated = self._outdated(self._resumed_from)
        for name in self._outputs.checkpoints(self._resumed_from)[len(outdated) :]:
            if faults := self._outputs.faults(name):
                self._say(f"damaged  {faults[0].removesuffix('.')}: it does not count for --keep")
        # What makes that checkpoint the best may be computed again: the commit of its step does not hold it.
        is_due = self.evaluates(self._resumed_from) and self._step_of_best() == self._resumed_from
        if not is_due and best_of(self._losses)[0] != self._resumed_from and (lost := self.lost_best()):
            self._say(lost)

    def _outdated(self, step: int) -> list[str]:
        """Return the checkpoints of up to ``step`` that are older than the ``--keep`` newest whole ones."""
        names = self._outputs.checkpoints(step)
        whole = [name for name in names if self._outputs.is_whole(name)]
        return (
            names[: names.index(whole[-self._job.settings.keep])]
            if len(whole) >= self._job.settings.keep
            else []
        )

    def lost_best(self) -> str:
        """Return a line if the best evaluation is of a step whose checkpoint is not there any more; else nothing."""
        (best, _), name = best_of(self._losses), f"{CHECKPOINTS}/{BEST}"
        if self._job.settings.save_every is None or not best:
            return ""
        if (is_whole := self._outputs.is_whole(name)) and self._step_of_best() == best:
            return ""
        path = self._job.output / name
        why = f"of step {self._step_of_best():,}" if is_whole else "damaged" if path.is_dir() else "not there"
        return (
            f"lost     the checkpoint of the best evaluation (step {best:,}, loss {self._losses[best]:.4f}): {path} "
            f"is {why}"
        )

    def _say(self, text: str) -> None:
        if self._logger is None:
            print(text, flush=True)
        else:
            self._logger.say(text)

    def forget(self, step: float) -> None:
        """Remove what an earlier process has saved after this step, before it is taken again, or after earlier ones."""
        for name in [name for name, saved in self._uncommitted.items() if saved <= step]:
            saved = self._uncommitted.pop(name)
            self._outputs.remove(name)
            if self._logger is not None:
                self._say(f"removed  {self._job.output / name}: of step {saved:,}, which was not committed")

    def _earlier_losses(self) -> dict[int, float]:
        """Return the losses of earlier evaluations on the same data, by step: those in the run's own file, which may be
        lost, and those in the commit."""
        job = self._job
        model = self._trainer.model
        losses = read_evaluations(job.output / RUN / METRICS, model.step_count)
        committed = {
            step: math.nan if loss is None else loss for step, loss in model.user_state.get(EVALUATIONS, ())
        }
        if not self._is_ours(losses, committed):
            losses = {}
            if self._process.is_rank0:
                self._say(
                    f"changed  {RUN}/{METRICS} has other evaluations than this run: those of its commit count"
                )
        losses |= committed
        digest = getattr(job.held_out, "digest", "")
        before, since = model.user_state.get(_HELD_OUT, [digest, 0])
        if before != digest:
            losses = {}
            since = model.step_count
            if self._process.is_rank0 and job.held_out is not None:
                print(
                    "changed  the held-out data: earlier evaluations are not compared with later ones",
                    flush=True,
                )
        model.user_state[_HELD_OUT] = [digest, since]
        return {step: loss for step, loss in losses.items() if step >= since}

    def _is_ours(self, losses: dict[int, float], committed: dict[int, float]) -> bool:
        """Return whether the evaluations in the run's file can be those of which the best is ``committed``."""
        noted = LossSum.committed(self._trainer.model.user_state)
        metrics = self._job.output / RUN / METRICS
        if (noted is not None and noted.is_of_another(metrics)) or edited_lines(metrics):
            return False
        if not committed:
            return True
        known = {step: loss for step, loss in losses.items() if step <= max(committed)}
        is_same = all(str(known.get(step, loss)) == str(loss) for step, loss in committed.items())
        return is_same and best_of(committed | known)[0] == best_of(committed)[0]

    def _note_evaluations(self) -> None:
        """Have the next commit hold the best evaluation, and those after it that ``--patience`` counts."""
        best, _ = best_of(self._losses)
        steps = sorted(step for step in self._losses if step >= best)
        later = steps[max(1, len(steps) - (self._job.settings.patience or 0)) :]
        losses = [(step, self._losses[step]) for step in (*steps[:1], *later)]
        self._trainer.model.user_state[EVALUATIONS] = [
            [step, loss if math.isfinite(loss) else None] for step, loss in losses
        ]

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation is due: before the first step, after the last, and as ``--eval-every`` says."""
        if self._job.held_out is None or step in self._losses:
            return False
        every = self._job.settings.eval_every
        return step in (0, self._job.steps) or (every is not None and step % every == 0)

    def run(self, step: int) -> bool:
        """Do what is due after ``step``, as far as it was not done; return whether anything was."""
        return any([self._evaluate(step), self._save_best(step), self._save(step)])

    def is_over(self) -> bool:
        """Return whether evaluations have found nothing better for as long as ``--patience`` waits."""
        best, since = best_of(self._losses)
        if self._job.settings.patience is None or since < self._job.settings.patience:
            return False
        loss = self._losses.get(best, math.nan)
        self.last_words = (
            f"ended early: none was better than that of step {best:,} (loss {loss:.4f}) "
            f"in {counted(since, 'evaluation')} (--patience {self._job.settings.patience})"
        )
        return True

    def is_late(self, step: int, seconds: float) -> bool:
        """Return whether another step like the last one, of ``seconds``, would go beyond ``--max-hours``."""
        job = self._job
        if job.settings.max_hours is None or step == job.steps:
            return False
        late = time.monotonic() - job.settings.started_at + seconds > job.settings.max_hours * 3600
        self.time_is_up = self._process.agree(late)
        if self.time_is_up:
            self.last_words = (
                f"ended after step {step:,} of {job.steps:,}, which is committed: another one would go "
                f"beyond --max-hours {job.settings.max_hours:g}. {job.settings.how_to_continue}"
            )
        return self.time_is_up

    def _evaluate(self, step: int) -> bool:
        if not self.evaluates(step):
            return False
        assert self._job.held_out is not None
        self._process.enter(f"in the evaluation after step {step}")
        with activity(f"evaluating after step {step}"):
            result = self._trainer.evaluate(self._job.held_out)
        if self._logger is not None:
            self._logger.evaluation(step, result)
        self._losses[step] = result.loss
        self._note_evaluations()
        return True

    def _save_best(self, step: int) -> bool:
        if self._job.settings.save_every is None or not step or best_of(self._losses)[0] != step:
            return False
        name = f"{CHECKPOINTS}/{BEST}"
        evaluation = {"step": step, "loss": self._losses[step]}
        file = self._job.output / name / EVALUATION
        return self._checkpoint(name, lambda: read_json(file) == evaluation, evaluation)

    def _save(self, step: int) -> bool:
        every = self._job.settings.save_every
        if every is None or not step or step % every or step == self._job.steps:
            return False
        is_new = self._checkpoint(f"{CHECKPOINTS}/{STEP}{step}", lambda: step <= self._resumed_from)
        if self._process.is_rank0:
            for old in self._outdated(step):
                self._outputs.remove(old)
        return is_new

    def _checkpoint(
        self, name: str, is_it: Callable[[], bool], evaluation: dict[str, float] | None = None
    ) -> bool:
        """Save a checkpoint unless rank 0, which alone writes, sees that it is there, whole and with ``is_it``; return
        whether. Collective."""
        lacks = self._process.is_rank0
        if lacks:
            with contextlib.suppress(OSError, ValueError):
                lacks = not (self._outputs.is_whole(name) and is_it())
        if not self._process.agree(lacks):
            return False
        self._uncommitted.pop(name, None)
        shown = name.removeprefix(f"{CHECKPOINTS}/")
        self._process.enter(f"while the checkpoint {shown} was saved")
        with activity(f"saving the checkpoint {shown}"):
            _write(self._job, self._trainer.model, name, self._process.is_rank0, evaluation)
        if self._logger is not None:
            self._logger.say(f"saved    {self._job.output / name}")
        return True


def read_evaluations(metrics: Path, done: int) -> dict[int, float]:
    """Return the loss of each evaluation up to step ``done`` by its step, from the run's own file."""
    name = "validation_metrics/loss"
    entries = read_metrics(metrics) if done else []
    losses = {entry["step"]: entry[name] for entry in entries if name in entry and entry["step"] <= done}
    return {step: math.nan if loss is None else loss for step, loss in losses.items()}


def best_of(losses: dict[int, float]) -> tuple[int, int]:
    """Return the step whose evaluation gave the lowest loss, 0 without any, and the number of evaluations after it."""
    best = 0
    least = math.inf
    since = 0
    for step, loss in sorted(losses.items()):
        since += 1
        if loss < least:
            best = step
            least = loss
            since = 0
    return best, since


def evaluate(
    batches: Batches, batch_size: int, loss_of: Callable[[dict[str, torch.Tensor]], float]
) -> EvaluationResult:
    """Return the mean loss of every row, taken once, from ``loss_of`` a batch with at least one label.

    The last batch is completed with rows that were seen; their labels are taken away.
    """
    start_time = time.perf_counter()
    total = 0.0
    tokens = 0
    computed = 0
    for number in range(batches.steps_per_epoch):
        batch = batches.batch(number)
        batch["labels"][batches.rows - number * batch_size :] = -100
        count = int((targets_of(batch["labels"], not batches.labels_ahead) != -100).sum())
        if count:
            total += loss_of(batch) * count
            tokens += count
        computed += batch["input_ids"].numel()
    return EvaluationResult(total / tokens, tokens, computed / (time.perf_counter() - start_time))


def _export(job: Job, trainer: Trainer, is_rank0: bool) -> None:
    what = f"writing the {'adapters' if job.model.adapters is not None else 'checkpoint'} to {job.output}"
    if is_rank0:
        done = (
            f" as step {trainer.model.step_count:,} of {job.steps:,} left it" if job.settings.export else ""
        )
        print(f"{what}{done}", flush=True)
    with activity(what):
        _write(job, trainer.model, RESULT, is_rank0)


def _write(
    job: Job, model: TrainedModel, name: str, is_rank0: bool, evaluation: dict[str, float] | None = None
) -> None:
    """Write what was trained for others to load, under its name when all of it is on the drive. Collective."""
    folder = job.outputs.partial(name)
    if is_rank0:
        check_files(job, model)
        job.outputs.prepare(name)
    try:
        _save(job, model, folder, is_rank0)
        if is_rank0 and evaluation is not None:
            replace_file(folder / EVALUATION, json.dumps(evaluation) + "\n")
        if is_rank0:
            job.outputs.put(name)
    except BaseException:
        if is_rank0:
            job.outputs.discard(name)  # it may have filled the drive
        raise


def _save(job: Job, model: TrainedModel, folder: Path, is_rank0: bool) -> None:
    """Write the files of what was trained, with its chat template. Collective."""
    model.save_pretrained(folder)
    if is_rank0:
        if job.companions is not None:
            job.companions.write(folder)
        job.choice.template.write(folder)
        if job.added_stops:
            write_stops(folder, job.generation_config, job.added_stops)


def _where(job: Job, location: tuple[str, str], steps: int, is_saved: bool) -> str:
    label, text = location
    lines = {"run": f"{job.output / RUN} (configuration, versions, metrics; index.html to look at)"}
    lines[label] = f"{text} (safe to delete unless you will resume)"
    if is_saved:
        loads = "PeftModel" if job.model.adapters is not None else job.model.task_type.auto_class
        lines["saved"] = f"{job.output}, for {loads}.from_pretrained"
        if job.model.adapters is not None and job.checkpoint is not None:
            file = source_of(job.checkpoint)
            words = [
                "finetune",
                "export",
                "--model",
                file or job.checkpoint,
                "--adapter",
                job.output,
                "--output",
                "DIR",
            ]
            lines["to merge"] = shlex.join(map(str, words))
            obstacle = job.model.adapters.gguf.obstacle
            if not obstacle:
                lines["gguf"] = (
                    f"{job.output / GGUF_ADAPTER}, for llama.cpp and for ADAPTER in an Ollama Modelfile"
                )
            elif file is not None:
                lines["gguf"] = f"no adapter for llama.cpp: {obstacle}"
            if job.engine.weights.frozen_dtype in ("int8", "nf4"):
                lines["note"] = (
                    f"the losses are those of weights in {job.engine.weights.frozen_dtype}; a merge takes the "
                    "checkpoint's own, as peft's does, and has another loss: finetune evaluate --model DIR tells it"
                )
    return "\n".join(f"{name:8} {text}" for name, text in lines.items())
