"""A run that goes on: whether there is one, and whether it is the same run."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from cli.job.job import ADAPTER, ADAPTERS, LONG_RECORDS, TEMPLATE_DATE
from cli.options.adapters import adapter_digest
from cli.options.removed import did_nothing, instead_of
from cli.options.settings import COMMITS, Settings
from common.errors import FinetuneError, UserError
from common.store import load_manifest
from fuyou.engine.computing_dtype import RANK_FOLDERS

_BY_CONTENT = {"--data": "other or changed texts, or another tokenizer", ADAPTER: "other or changed adapters"}
"""How options may differ that are compared by what they name."""


def decided(settings: Settings) -> Settings:
    """Return settings in which ``--resume auto`` has become ``--resume``, or nothing where there is no run."""
    if not settings.resume_auto:
        return settings
    resumed = replace(settings, resume_auto=False, resume=True)
    return resumed if committed(resumed) is not None else replace(settings, resume_auto=False)


def committed(settings: Settings) -> Mapping[str, Any] | None:
    """Return the newest commit of the run that ``settings`` would resume, as its manifest has it; None: there is none.

    Of several ranks out of core, that of one of this node's.
    """
    if settings.nodes is not None and not settings.ssd:
        from fcdp.checkpoint.commits import ShardedCheckpoints

        commits = ShardedCheckpoints(settings.output_directory / COMMITS)
        with contextlib.suppress(FinetuneError, OSError):  # whoever opens it says what is wrong
            newest = commits.newest()
            return None if newest is None else commits.describe(newest)
        return {}
    for folder in _folders(settings):
        for place in (folder, *sorted(folder.glob(RANK_FOLDERS))):
            try:
                content = load_manifest(place)
            except (FinetuneError, OSError):  # damaged: whoever opens it says so
                return {}
            if content is not None:
                return content
    return None


def _folders(settings: Settings) -> list[Path]:
    drives = [Path(word).expanduser() for word in (*settings.ssd, *settings.leave_ssd)]
    return [drive / settings.store_name for drive in drives or [settings.output_directory]]


def check_there_is_one(settings: Settings) -> None:
    """Refuse ``--resume`` where nothing was committed, and settings that differ from those of the run that is there.

    What depends on the data is compared when they are there (:func:`check_same`).

    Raises:
        UserError: there is nothing to continue, or another run.
    """
    if not settings.resume or settings.nodes is not None:  # several nodes say together which one lacks what
        return
    found = committed(settings)
    if found is None and not any(place.exists() for folder in _folders(settings) for place in _parts(folder)):
        where = ", ".join(str(folder) for folder in _folders(settings))
        raise UserError(
            f"--resume: there is nothing to continue: no step was committed in {where}. Leave --resume out to begin, "
            "or give --resume auto, which continues what there is and begins where there is nothing."
        )
    fixed = (found or {}).get("user", {}).get("run")
    if isinstance(fixed, dict):
        check_same(fixed, known_before_data(settings))


def _parts(folder: Path) -> list[Path]:
    """Return a run's folder, and those beside it in which a move to other drives was interrupted."""
    return [folder, *folder.parent.glob(f"{folder.name}.*")]


def template_date(settings: Settings) -> date:
    """Return the day that chat templates write: the first of the run, so that resumed runs see the same data."""
    run = ((committed(settings) if settings.resume else None) or {}).get("user", {}).get("run", {})
    return date.fromisoformat(run[TEMPLATE_DATE]) if TEMPLATE_DATE in run else date.today()


def known_before_data(settings: Settings) -> dict[str, Any]:
    """Return those of a job's fixed settings that are known before its data are read, by option."""
    return {
        "--batch-size": settings.batch_size,
        "--seed": settings.seed,
        "--schedule": settings.schedule,
        ADAPTERS: settings.adapters_in_words,
        **({} if settings.adapter is None else {ADAPTER: adapter_digest(settings)}),
    }


def check_same(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare settings that must not change, as far as both sides have them.

    Args:
        then: what the run began with.
        now: what is asked for.

    Raises:
        UserError: something differs, or the run began with an option that this version does not have.
    """
    for option, before in then.items():
        instead = instead_of(option)
        if instead is not None and not did_nothing(option, before):
            raise UserError(f"--resume: this run began with {option} {before}. {instead} Begin a new run.")
    for option in now:
        before, after = then.get(option), now[option]
        if before == after or option not in then:
            continue
        if option in _BY_CONTENT:
            raise UserError(
                f"--resume: {option} is not what this run began with: {_BY_CONTENT[option]} "
                f"({before} then, {after} now). Give what it began with, or begin a new run in another --output."
            )
        if option in (LONG_RECORDS, ADAPTERS):
            raise UserError(
                f"--resume: this run began with {before}, and now it is {after}. Give {before}, or begin a new run in "
                "another --output."
            )
        raise UserError(
            f"--resume: this run began with {option} {before}, and now it is {after}. Give {option} {before}, "
            "or begin a new run in another --output."
        )
