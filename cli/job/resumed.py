"""A run that is continued: whether there is one, and whether it is the same run."""

import contextlib
import hashlib
import json
import shlex
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import numpy as np

from cli.job.job import TEMPLATE_DATE, Job, TrainedModel
from cli.job.outputs import HISTORY_FILE, RESULT, Outputs
from cli.options.command import parse_command_line
from cli.options.config_file import REMOVED, options_in_files, plain_options
from cli.options.loss_sum import LossSum, differing_steps, edited_lines, evaluated_steps, later_steps
from cli.options.run_record import (
    COMMITS,
    DESCRIPTION,
    EVALUATIONS,
    METRICS,
    OPTIONS,
    OUTPUT,
    REFERENCES,
    RUN,
    STORE,
    RunRecord,
    StorePlace,
    newest_commit,
    newest_in_memory,
    read_description,
    replaced_stores,
    store_places,
)
from cli.options.settings import Settings
from common.errors import FinetuneError, UserError
from common.models.adapters.options import ALL_LINEAR, SavedAdapter, load_peft_config
from common.models.checkpoint.writer import digest_of
from common.models.generation import FILE as GENERATION
from common.options import declaration_of, option_fields, spelled
from common.store import load_manifest
from common.store.directories import Identity
from common.store.folders import remove_uncommitted, run_places, uncommitted_directories
from common.units import counted
from fuyou.checkpoint.commits import CLUSTER
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
_CONTENT: dict[str, Callable[[Settings], str | None]] = {
    "adapter": adapter_digest,
    "peft_config": peft_digest,
}
# What may differ where options are compared by the content of what they name.
_BY_CONTENT = {
    "--data": "other or changed texts or images, or another tokenizer",
    **{spelled(name): "other or changed adapters" for name in _CONTENT},
}


# Keys of what the files of a result are made of besides weights: files of the model by name, and what options name.
_FILES = "files of the model"
_OF_ADAPTER = "--adapter"
_OF_TEMPLATE = "--chat-template"


def files_of_result(job: Job) -> dict[str, str]:
    """Return a hash of each file besides weights that goes into what the job writes, as it is now."""
    files: dict[str, str] = {}
    saved = job.engine.saved_adapter
    companions = job.companions
    if companions is not None:
        for (folder, name), digest in companions.digests().items():
            files[f"{_OF_ADAPTER} {name}" if folder == companions.adapter else name] = digest
        if (file := companions.checkpoint / GENERATION).is_file():
            files[GENERATION] = digest_of(file)
    if saved is not None and (file := saved.directory / GENERATION).is_file():
        files[_OF_ADAPTER] = digest_of(file)
    if job.choice.template.text is not None:
        files[_OF_TEMPLATE] = hashlib.sha256(job.choice.template.text.encode()).hexdigest()[:32]
    return files


def check_files(job: Job, run: TrainedModel) -> None:
    """Refuse to write a result with other files besides weights than the run began with."""
    _check_same_files(job, run.user_state["run"][_FILES], files_of_result(job))


def _check_same_files(job: Job, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) == now.get(name):
            continue
        file = f"{job.checkpoint}/{name}"
        option = "--model"
        if name == _OF_TEMPLATE:
            file = "the chat template"
            option = _OF_TEMPLATE
        elif name.startswith(_OF_ADAPTER):
            assert job.engine.saved_adapter is not None
            inside = name.removeprefix(_OF_ADAPTER).strip() or GENERATION
            file = f"{job.engine.saved_adapter.directory / inside}"
            option = _OF_ADAPTER
        how = (
            "has changed" if name in before and name in now else "is gone" if name in before else "was added"
        )
        raise UserError(
            f"{file} {how} since this run began, and would be part of its result: undo that, or give {option} with "
            "what the run began with and --resume, or begin a new run in another --output."
        )


def faults_of_losses(output: Path) -> tuple[list[str], list[str]]:
    """Return sentences about the files of losses, compared with what the run has noted at its end or committed: about
    those that have the losses of another run, and about those that lack lines."""
    committed = _committed(output).get("user", {})
    noted = [LossSum.committed(each) for each in (committed, read_description(output))]
    losses = max(filter(None, noted), key=lambda each: each.step, default=None)
    other = list[str]()
    gaps = list[str]()
    files = () if losses is None else (output / HISTORY_FILE, output / RUN / METRICS)
    for file in files:
        assert losses is not None
        if fault := losses.fault(file):
            (other if losses.is_of_another(file) else gaps).append(f"{file} {fault}.")
            whole = next((each for each in files if not losses.fault(each)), None)
            if (
                not losses.is_of_another(file)
                and whole is not None
                and (steps := differing_steps(file, whole))
            ):
                other.append(f"{file} has another loss of step {steps[0]:,} than this run.")
    metrics = output / RUN / METRICS
    other += [
        f"{metrics} has another evaluation of step {step:,} than this run." for step in edited_lines(metrics)
    ]
    known = evaluated_steps(metrics)
    lost = [step for step, _ in committed.get(EVALUATIONS, ()) if step not in known]
    gaps += [f"{metrics} has no evaluation of step {step:,}." for step in lost]
    record = RunRecord.read(output)
    if record is not None and record.ended_after is not None:
        for file in (output / HISTORY_FILE, metrics):
            if later := later_steps(file, record.ended_after):
                ended = f"the run in {output} was done after step {record.ended_after:,}"
                other.append(f"{file} has a line for step {later[0]:,}, and {ended}.")
    return other, gaps


def faults_of_references(output: Path) -> list[str]:
    """Return a sentence for each file that the run is compared with, as a commit names them, that cannot be read or has
    other numbers."""
    faults = list[str]()
    for name, (data, _, _, *sums) in _committed(output).get("user", {}).get(REFERENCES, {}).items():
        file = output / RUN / str(name)
        try:
            with np.load(file) as content:  # which has checksums
                here = {table_sum(content["values"]), str(content.get("before", ""))}
                is_of_data = str(content["digest"]).split()[:1] == [data]
            # Held-out data may be others, which the next commit notes
            is_other = bool(sums) and sums[0] not in here if is_of_data else "held-out" not in name
            if is_other:
                faults.append(f"{file} has other log-probabilities than this run: copy its own there again.")
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            what = "damaged" if file.exists() else "missing"
            faults.append(f"{file} is {what}, and the run is not continued without it: copy it there again.")
    return faults


def table_sum(values: np.ndarray) -> str:
    """Return a hash of all numbers of a reference, which a commit notes."""
    return hashlib.sha256(np.ascontiguousarray(values, dtype=np.float32).tobytes()).hexdigest()[:32]


def faults_of_store(output: Path) -> list[str]:
    """Return a sentence if the store in ``output`` is another run's, or at another step than the last of the run."""
    record = RunRecord.read(output)
    inside = [output / STORE, output / COMMITS]
    if record is None:
        return []
    if _is_of_another_run(record, inside):
        return [f"The store in {output} is that of another run."]
    if exchanged := _exchanged_directories(record, inside):
        return exchanged
    step = _committed(output).get("step")
    if record.ended_after in (None, step) or step is None:
        return []
    return [
        f"The run in {output} was done after step {record.ended_after:,}, and its store is at step {step}: one of them "
        "is from another copy."
    ]


def _is_of_another_run(record: RunRecord, stores: Sequence[Path]) -> bool:
    """Return whether the stores that are there are neither those of the run in an output, nor their successors."""
    known = {place.store for place in record.places}
    visible = {place.store for place in store_places(stores)} - {""}  # commits of earlier versions have none
    return bool(known and visible) and not known & (visible | replaced_stores(stores))


def _exchanged_directories(record: RunRecord, inside: Sequence[Path]) -> list[str]:
    """Return a sentence for each directory of a run's stores that lies where the run had another of its directories.

    A copied or moved output has its stores inside, at other paths: of these, the numbers are compared.
    """
    noted = {(directory.store, directory.index): directory for directory in record.places}
    names = {directory.store for directory in record.places}
    there = [*store_places(inside), *filter(None, map(directory_at, record.places))]
    faults = list[str]()
    for directory in there:
        if directory.store not in names:  # of another run, which may be there
            continue
        known = noted.get((directory.store, directory.index))
        if known is None:
            faults.append(
                f"{directory.path} is directory {directory.index} of the run's store, and {DESCRIPTION} does not name "
                "it: copy that file back."
            )
        elif known.path != directory.path and any(directory.path == each.path for each in record.places):
            faults.append(
                f"{directory.path} holds what the run had in {known.path}: folders were exchanged. Move them back."
            )
    return list(dict.fromkeys(faults))


def directory_at(directory: StorePlace) -> StorePlace | None:
    """Return what is now where the run had ``directory``; None if no store's directory can be read there."""
    path = Path(directory.path)
    if path.name == COMMITS:
        return None  # which has a single directory
    with contextlib.suppress(FinetuneError, OSError):
        if (identity := Identity.read(path)) is not None:
            return StorePlace(directory.path, identity.store, identity.index)
    return None


def _committed(output: Path) -> dict[str, Any]:
    """Return the newest commit of the run in ``output``; empty if there is none.

    That of a copy is in its own store: the description names those of the original.
    """
    record = RunRecord.read(output)
    inside = [output / STORE, output / COMMITS]
    if record is None:
        return {}
    names = {directory.store for directory in record.places}
    if names & ({directory.store for directory in store_places(inside)} | replaced_stores(inside)):
        return newest_commit(inside)
    commit = newest_commit(Path(store.path) for store in record.places if store.is_there())
    return commit if commit.get("user", {}).get(OUTPUT) == str(output.resolve()) else {}


def decided(settings: Settings, checks: bool = True) -> Settings:
    """Return settings in which ``--resume auto`` has become ``--resume``, or nothing where there is no run.

    It ``checks`` that no run is lost, unless the launcher has done so. What a run leaves that was killed while it
    filled its store is removed.

    Raises:
        click.exceptions.Exit: the run is finished, which is printed.
        UserError: there is a run that would not be continued, or nothing that could be.
    """
    if settings.overwrite:
        if checks:
            EarlierRun.of(settings).check_replaced()
        return settings
    resumed = replace(settings, resume=True)  # with the name that the run's store has
    earlier = EarlierRun.of(resumed)
    if checks and settings.show_data is None:
        if settings.resume == "auto" and earlier.is_finished(settings):
            print(f"finished after step {earlier.ended_after:,}: {settings.output_directory}", flush=True)
            outputs = Outputs.read(earlier.output)
            other, gaps = faults_of_losses(earlier.output)
            faults = (
                *outputs.edits(),
                *outputs.damaged_folders(),
                *outputs.strays(saves=settings.save),
                *other,
            )
            for sentence in faults:
                print(f"damaged  {sentence.removesuffix('.')}", flush=True)
            for sentence in gaps:
                print(f"gap      {sentence.removesuffix('.')}", flush=True)
            raise click.exceptions.Exit(0)
        earlier.check_start(settings)
    if settings.resume != "auto":
        return settings
    if earlier.commit is not None:
        return resumed
    context = parse_command_line(settings.arguments)  # without the options of a run that is gone
    # Ranks in memory may have been killed after their first checkpoint and before their first commit.
    begins_again = earlier.record is not None and earlier.waits_for_commit(earlier.record)
    options = {**context.params, "resume": False, "overwrite": begins_again}
    return Settings.of_options(options, settings.arguments, context=context)


@dataclass(frozen=True)
class EarlierRun:
    """The run that may be there already, where a new one would be."""

    output: Path
    stores: Sequence[Path]  # Its folder in each directory where it may be
    in_memory: bool  # Whether several ranks trained in memory
    commit_interval: int  # Steps between two commits

    @classmethod
    def of(cls, settings: Settings) -> "EarlierRun":
        return cls(settings.output_directory, settings.stores, settings.in_memory, settings.commit_interval)

    @cached_property
    def record(self) -> RunRecord | None:
        """What ``<output>/run`` says of it; None if there is no sign of a run."""
        return RunRecord.read(self.output)

    @property
    def ended_after(self) -> int | None:
        """Step after which it was done; None: it was not, as far as is known."""
        return None if self.record is None else self.record.ended_after

    @cached_property
    def commit(self) -> Mapping[str, Any] | None:
        """Its newest commit, as the manifest has it; None if there is none.

        Empty if it is damaged: the one that opens it says what is wrong. Of several ranks out of core, that of one of
        this node's.
        """
        if self.in_memory:
            with contextlib.suppress(FinetuneError, OSError):
                return newest_in_memory(self.output / COMMITS)
            return {}
        for place in run_places(self.stores):
            try:
                content = load_manifest(place)
            except (FinetuneError, OSError):
                return {}
            if content is not None and not self._is_begun(content):
                return content
        return None

    def _is_begun(self, content: Mapping[str, Any]) -> bool:
        """Return whether a rank's commit is that of a store that was just filled: other ranks may have none yet."""
        return (
            CLUSTER in content
            and content.get("step") == 0
            and not content.get("user")
            and self.record is None
        )

    @property
    def user_state(self) -> Mapping[str, Any]:
        """The user state of its newest commit; empty if there is none."""
        state = (self.commit or {}).get("user")
        return state if isinstance(state, dict) else {}

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that it began with and must keep, by name; empty if they are not known."""
        options = self.user_state.get("run")
        return options if isinstance(options, dict) else {}

    @property
    def dtype(self) -> str | None:
        """What it computes in, if that is known."""
        names = {str(dtype): name for name, dtype in DTYPES.items()}
        commit = self.commit or {}
        dtype = commit.get("--dtype") or names.get(str(commit.get("dtype")))
        return dtype if dtype in DTYPES else None

    def day(self, resume: bool) -> date:
        """Return the day that chat templates write: the run's first, so that resumed runs see the same data."""
        with contextlib.suppress(ValueError, TypeError):
            if resume and TEMPLATE_DATE in self.options:
                return date.fromisoformat(self.options[TEMPLATE_DATE])
        return date.today()

    def is_finished(self, settings: Settings) -> bool:
        """Return whether it was done, its result is there as it was written, and no changed option asks for more."""
        outputs = Outputs.read(self.output)
        has_result = not settings.save or (outputs.is_whole(RESULT) and not outputs.shadows(RESULT))
        # The files in the output may be older than the commits, or newer. A store may be deleted when a run is done.
        is_last = (self.commit or {}).get("step", self.ended_after) == self.ended_after
        return self.ended_after is not None and has_result and is_last and not settings.changes

    def check_start(self, settings: Settings) -> None:
        """Refuse what would lose this run, or cannot continue it; remove a store that was never filled.

        Raises:
            UserError: says where the run is or was, and what to type.
        """
        record = self.record
        continues = settings.resume is True
        is_on_nodes = settings.nodes is not None and bool(settings.ssd)
        if settings.resume and record is not None:
            for fault in filter(None, (directory.fault for directory in record.places)):
                raise UserError(fault)
        if self.commit is not None and settings.resume:
            self._check_continued(self.commit, settings)
        elif self.commit is not None:
            if record is not None and record.ended_after is None:
                raise UserError(
                    f"{self.output} holds a run already, which is not finished: add --resume to continue it, or "
                    "--overwrite to replace it."
                )
        elif continues and is_on_nodes:
            pass  # the ranks find which node lacks what
        elif record is not None and not self.waits_for_commit(record):
            if settings.resume or record.ended_after is None:
                raise UserError(self._where_it_was(record, settings))
        elif continues:
            raise UserError(self._nothing_to_continue())
        elif is_on_nodes:
            uncommitted_directories(self.stores)  # which the ranks replace
        elif not self.in_memory:
            remove_uncommitted(self.stores)

    def _check_continued(self, commit: Mapping[str, Any], settings: Settings) -> None:
        """Refuse to continue from a commit of which a part is missing, of another run, or of another copy."""
        record = self.record
        if record is not None and self._is_in_part(record):
            raise UserError(self._where_it_was(record, settings))
        if record is not None and _is_of_another_run(record, self.stores):
            places = ", ".join(place.path for place in record.places)
            here = ", ".join(map(str, self.stores))
            raise UserError(
                f"The run in {self.output} has its store in {places}, and {here} holds the store of another run, "
                "whose output this was before. Correct --ssd, or give another --output."
            )
        if settings.save:
            self._check_not_behind_result(commit)
        step = commit.get("step", 0)
        seen = 0 if record is None else record.last_step
        is_older = isinstance(step, int) and seen < step  # the manifest may have been edited
        if is_older and (other := self._other_output()) is not None:
            raise UserError(
                f"The run was continued to step {step:,} in {other}, and {self.output} is a copy of that as it was at "
                f"step {seen:,}: give --output {other}. To continue it here, move {other} elsewhere before."
            )

    def _check_not_behind_result(self, commit: Mapping[str, Any]) -> None:
        """Refuse to replace the result of a step that an older copy of the store does not have."""
        step = commit.get("step")
        result = Outputs.read(self.output)
        if not isinstance(step, int) or step >= (self.ended_after or 0) or not result.is_whole(RESULT):
            return
        files = result.listed(RESULT)
        weights = next((file for file in files if file.endswith(".safetensors")), files[0])
        raise UserError(
            f"The result in {self.output} is that of step {self.ended_after:,}, and the run's store is at step "
            f"{step:,}, from an older copy: copy that of the result back. To continue after step "
            f"{step:,} and replace the result, move {self.output / weights} elsewhere before."
        )

    def check_replaced(self) -> None:
        """Refuse to replace the store of a run that is continued in another output.

        Raises:
            UserError: names that output.
        """
        if self.commit is not None and (other := self._other_output()) is not None:
            where = ", ".join(map(str, self.stores))
            raise UserError(
                f"{where} is the store of the run in {other}, and would be replaced: give another --output, or "
                f"another --ssd. If {other} is not needed, remove it before."
            )

    def _other_output(self) -> Path | None:
        """Return the output in which the newest commit was made, if it is another one, and has this very store."""
        name = self.user_state.get(OUTPUT)
        if not isinstance(name, str) or Path(name).resolve() == self.output.resolve():
            return None
        with contextlib.suppress(OSError):
            if self.output.samefile(name):  # mounted twice
                return None
        record = RunRecord.read(Path(name))
        here = {Path(directory.path).resolve() for directory in store_places(self.stores)}
        there = (
            {Path(directory.path).resolve() for directory in record.places} if record is not None else set()
        )
        return Path(name) if here & there else None

    def _is_in_part(self, record: RunRecord) -> bool:
        """Return whether directories of a store are gone of which others are where they should be."""
        visible = {(place.store, place.index) for place in store_places(self.stores)}
        stores = {store for store, _ in visible}
        hidden = [place for place in record.places if (place.store, place.index) not in visible]
        return any(place.store in stores and not place.is_there() for place in hidden)

    def waits_for_commit(self, record: RunRecord) -> bool:
        """Return whether it trained in memory, and was killed before its first commit: nothing is lost."""
        if record.ended_after is not None or record.last_step > self.commit_interval:
            return False
        return self.in_memory and bool(record.places) and all(place.is_there() for place in record.places)

    def _nothing_to_continue(self) -> str:
        where = ", ".join(str(folder) for folder in self.stores)
        why = ""
        if not self.in_memory and uncommitted_directories(self.stores):
            why = " It was killed before its weights were written."
        return (
            f"--resume: no step was committed in {where}.{why} Leave --resume out to begin, or use --resume auto, "
            "which resumes a run if there is one and starts one otherwise."
        )

    def _where_it_was(self, record: RunRecord, settings: Settings) -> str:
        """Return where a run is or was of which nothing is committed where it should be, and what to do."""
        begin_again = "add --overwrite" + (" in place of --resume" if settings.resume else "")
        of_steps = "" if record.steps is None else f" of {record.steps:,}"
        state = f"has begun (step {record.last_step:,}{of_steps})"
        if record.ended_after is not None:
            state = f"is finished (step {record.ended_after:,})"
        if record.ended_after is not None and settings.save:
            state += "".join(
                f"; {fault.removesuffix('.')}" for fault in Outputs.read(self.output).faults(RESULT)[:3]
            )
        paths = ", ".join(place.path for place in record.places)
        missing = ", ".join(place.path for place in record.places if not place.is_there())
        looked = ", ".join(str(folder) for folder in self.stores)
        if not paths:
            where = f"no commit of it is in {looked}. Name its drives with --ssd"
        elif missing:
            where = f"its store is not where it was: {missing}. Mount that drive, or name with --ssd where it is now"
        elif {place.path for place in record.places} <= {
            str(path.absolute()) for path in run_places(self.stores)
        }:
            where = f"its store in {paths} has no commit any more. If it moved to other drives, name these with --ssd"
        else:
            where = f"its store is in {paths}, and not in {looked}. "
            if settings.ssd and Path(record.places[0].path).parent.resolve() == self.output.resolve():
                moving = shlex.join(["mv", paths, str(self.stores[0])])
                without = " without --leave-ssd" if settings.leave_ssd else ""
                where += f"To move it there, enter `{moving}`, and then this command again{without}"
            else:
                where += "Correct --ssd, or name what it is to leave: --leave-ssd"
        return (
            f"The run in {self.output} {state}, and {where}. To give it up and begin at step 1, {begin_again}; to keep "
            "it and begin another run, give another --output."
        )


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
        now[TEMPLATE_DATE] = str(job.choice.template.day)
    now[_FILES] = files_of_result(job)
    run.user_state[OUTPUT] = str(job.output.resolve())
    before: dict[str, Any] | None = run.user_state.get("run")
    if before is None:
        run.user_state.update({"run": now, OPTIONS: plain_options(job.configuration)})
        return
    if not (isinstance(before, dict) and isinstance(before.get(_FILES, {}), dict)):
        raise UserError(
            f"--resume: the options that this run began with are damaged ({before!r:.80}). Continue from a copy of its "
            "store, or begin again with --overwrite."
        )
    _check_same_files(job, before.setdefault(_FILES, now[_FILES]), now[_FILES])
    is_extended = _is_extended(job, run, before)
    check_same_options(
        before | ({name: now[name] for name in ("--steps", "--warmup")} if is_extended else {}), now
    )
    if run.step_count > job.steps:
        raise UserError(
            f"--resume: this run has {run.step_count} steps already, more than --steps {job.steps}. Give --steps "
            f"{run.step_count} or more; for the result as it is, finetune export --output "
            f"{shlex.quote(str(job.output))}."
        )
    if is_extended:
        run.user_state["run"] = now
    run.user_state[OPTIONS] = plain_options(job.configuration)  # committed with the next step


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
            value = (
                _CONTENT[field.name](settings) if field.name in _CONTENT else getattr(settings, field.name)
            )
            fixed[spelled(field.name)] = list(value) if isinstance(value, tuple) else value
    return fixed


def check_same_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue with other options. What depends on the data is compared later (:func:`check_same_run`)."""
    options = options_in_files(parse_command_line([]))
    for name in sorted(
        name for name in before.keys() - {option.opts[0] for option in options} if name[0] == "-"
    ):
        if REMOVED.get(name[2:]) == before[name]:
            continue
        raise UserError(
            f"--resume: this run began with {name} {before[name]}, which this version does not have. Continue it with "
            "the version that began it, or begin a new run in another --output."
        )
    # What files hold may differ because of another option: that is named first.
    for option in sorted(options, key=lambda option: option.opts[0] in _BY_CONTENT):
        name = option.opts[0]
        if name not in before or name not in now or before[name] == now[name]:
            continue
        if name == "--lora-targets" and not before[name] and now[name] == [ALL_LINEAR]:
            continue  # the default of earlier versions
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
