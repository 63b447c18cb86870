"""A run that is continued: whether there is one, and whether it is the same run."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from cli.job.job import TEMPLATE_DATE, Job, TrainedModel
from cli.options.command import parse_command_line
from cli.options.config_file import REMOVED, options_in_files
from cli.options.settings import COMMITS, CONFIG, RUN, Settings
from common.errors import FinetuneError, UserError
from common.models.adapters.options import SavedAdapter, load_peft_config
from common.options import declaration_of, option_fields, spelled
from common.store import load_manifest
from common.units import counted
from fuyou.checkpoint.run_files import run_places
from fuyou.layout.record import DTYPES


def adapter_digest(settings: Settings) -> str | None:
    """Return a hash of the adapters to begin with, wherever they lie; None: they are new, or there are none."""
    return None if settings.adapter is None else SavedAdapter(settings.adapter).digest


def peft_digest(settings: Settings) -> str | None:
    if settings.peft_config is None:
        return None
    config = load_peft_config(settings.peft_config)
    text = json.dumps(config.to_dict(), sort_keys=True, default=lambda value: sorted(map(str, value)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Options that name files: how to digest what is in them, wherever they lie.
_CONTENT: dict[str, Callable[[Settings], str | None]] = {"adapter": adapter_digest, "peft_config": peft_digest}
# What may differ where options are compared by the content of what they name.
_BY_CONTENT = {
    "--data": "other or changed texts, or another tokenizer",
    **{spelled(name): "other or changed adapters" for name in _CONTENT},
}


def decided(settings: Settings) -> Settings:
    """Return settings in which ``--resume auto`` has become ``--resume``, or nothing where there is no run."""
    if settings.resume != "auto":
        return settings
    resumed = replace(settings, resume=True)
    if EarlierRun.of(resumed).commit is not None:
        return resumed
    context = parse_command_line(settings.arguments)  # without the options of a run that is gone
    return Settings.of_options({**context.params, "resume": False}, settings.arguments, context=context)


@dataclass(frozen=True)
class EarlierRun:
    """The run that may be there already, where a new one would be."""

    output: Path
    stores: Sequence[Path]  # Its folder in each directory where it may be
    in_memory: bool  # Whether several ranks trained in memory

    @classmethod
    def of(cls, settings: Settings) -> "EarlierRun":
        return cls(settings.output_directory, settings.stores, settings.in_memory)

    @cached_property
    def commit(self) -> Mapping[str, Any] | None:
        """Its newest commit, as the manifest has it; None if there is none.

        Empty if it is damaged: the one that opens it says what is wrong. Of several ranks out of core, that of one of
        this node's.
        """
        if self.in_memory:
            from fcdp.checkpoint import ShardedCheckpoints

            commits = ShardedCheckpoints(self.output / COMMITS)
            with contextlib.suppress(FinetuneError, OSError):
                newest = commits.newest()
                return None if newest is None else commits.describe(newest)
            return {}
        for place in run_places(self.stores):
            try:
                content = load_manifest(place)
            except (FinetuneError, OSError):
                return {}
            if content is not None:
                return content
        return None

    @property
    def dtype(self) -> str | None:
        """What it computes in, if that is known."""
        names, commit = {str(dtype): name for name, dtype in DTYPES.items()}, self.commit or {}
        return commit.get("--dtype") or names.get(str(commit.get("dtype")))

    def day(self, resume: bool) -> date:
        """Return the day that chat templates write: the run's first, so that resumed runs see the same data."""
        run = (self.commit or {}).get("user", {}).get("run", {}) if resume else {}
        return date.fromisoformat(run[TEMPLATE_DATE]) if TEMPLATE_DATE in run else date.today()

    def check(self, fixed: Mapping[str, Any]) -> None:
        """Refuse to continue where nothing was committed, or where it was with other ``fixed`` options.

        What depends on the data is compared when they are there (:func:`check_same_run`).
        """
        before = (self.commit or {}).get("user", {}).get("run")
        if isinstance(before, dict):
            _check_same(before, fixed)
        if self.commit is None and not any(place.exists() for place in run_places(self.stores)):
            where = ", ".join(str(folder) for folder in self.stores)
            raise UserError(
                f"--resume: no step was committed in {where}. Leave --resume out to begin, "
                "or use --resume auto, which resumes a run if there is one and starts one otherwise."
            )


def forget_earlier_run(job: Job) -> None:
    """Remove the options of an earlier run before a new one replaces it, which would take them for its own."""
    if not job.resume and (job.overwrite or not job.is_there):
        (job.output / RUN / CONFIG).unlink(missing_ok=True)


def check_same_run(job: Job, run: TrainedModel, launches: Collection[str] = ()) -> None:
    """Compare the job with what the run began with; a new run remembers it in its ``user_state``, with the ids of the
    launchers that have started its ranks (``launches``)."""
    if launches:
        run.user_state["launches"] = sorted({*run.user_state.get("launches", ()), *launches})
    rate = job.learning_rate
    now = {**job.fixed, "--data": job.data_key, "--seq-len": job.seq_len, "--warmup": rate.warmup}
    # A constant rate does not depend on the end, so such a run can be made longer.
    now["--steps"] = None if rate.schedule == "constant" else rate.total
    if job.tokenizer is not None:
        now[TEMPLATE_DATE] = str(job.template.day)
    before: dict[str, Any] | None = run.user_state.get("run")
    if before is None:
        run.user_state["run"] = now
        return
    is_extended = _is_extended(job, run, before)
    _check_same(before | ({name: now[name] for name in ("--steps", "--warmup")} if is_extended else {}), now)
    if run.step_count > job.steps:
        raise UserError(f"--resume: this run has {run.step_count} steps already, more than --steps {job.steps}.")
    if is_extended:
        run.user_state["run"] = now


def _is_extended(job: Job, run: TrainedModel, before: Mapping[str, Any]) -> bool:
    """Return whether a run that has come to its end gets more steps than it had: allowed, and printed.

    The learning rate of the steps to come is that of a run of that many steps.
    """
    steps = before.get("--steps")
    if steps is None or not steps <= run.step_count < job.steps:
        return False
    step = run.step_count + 1
    print(
        f"extended from {counted(steps, 'step')} to {job.steps:,}: the learning rate of step {step:,} is "
        f"{job.learning_rate.at(step):g}",
        flush=True,
    )
    return True


def fixed_options(settings: Settings) -> dict[str, Any]:
    """Return the options that a continued run must keep, as typed, with the content of files."""
    fixed: dict[str, Any] = {}
    for field in option_fields(Settings):
        if declaration_of(field).fixed:
            value = _CONTENT[field.name](settings) if field.name in _CONTENT else getattr(settings, field.name)
            fixed[spelled(field.name)] = list(value) if isinstance(value, tuple) else value
    return fixed


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    options = options_in_files(parse_command_line([]))
    for name in sorted(name for name in before.keys() - {option.opts[0] for option in options} if name[0] == "-"):
        if REMOVED.get(name[2:]) == before[name]:
            continue
        raise UserError(
            f"--resume: this run began with {name} {before[name]}, which this version does not have. Begin a new run."
        )
    # What files hold may differ because of another option: that is named first.
    for option in sorted(options, key=lambda option: option.opts[0] in _BY_CONTENT):
        name = option.opts[0]
        if name not in before or name not in now or before[name] == now[name]:
            continue
        if name in _BY_CONTENT:
            raise UserError(
                f"--resume: {name} is not what this run began with: {_BY_CONTENT[name]} "
                f"({before[name]} then, {now[name]} now). Give what it began with, or begin a new run in another "
                "--output."
            )
        then = option.typed(before[name])
        raise UserError(
            f"--resume: this run began with {then}, and now it is {option.typed(now[name])}. Give {then}, or begin "
            "a new run in another --output."
        )
