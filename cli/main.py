"""The entry point: reads the command line, runs it, and turns whatever happens into one message and an exit status.

0: done. 1: something failed. 2: what was asked for cannot be done as asked. 130: stopped by Ctrl-C.
SIGTERM ends a run with 0, since the run is in order; SIGHUP with 129.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cli.config import effective_config
from cli.grouped import WRITTEN, expand_pattern
from cli.interrupts import Interrupts, Stopped
from cli.options import build_command
from cli.settings import Settings
from common.errors import FinetuneError, UserError

DEFAULT_PROFILE_MODEL = "gpt3-1.3b"
"""For --profile without --model: a block large enough to show what a device can do, and quick on a CPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``finetune`` with ``argv`` (default: the process's own). Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    # Nothing is ever downloaded: checkpoints, tokenizers and data are local.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    interrupts = Interrupts()

    def run(**options: Any) -> int:
        nonlocal debug
        debug = options["debug"]  # a file may say so, too
        return _run(interrupts, tuple(arguments), **options)

    try:
        with interrupts:
            status = build_command(run).main(arguments, prog_name="finetune", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        return _fail(f"{error.format_message()} (finetune --help lists all options)", 2)
    except Stopped as stopped:
        _say(f"\n{stopped}")
        return interrupts.status(stopped)
    except (KeyboardInterrupt, click.Abort):
        _say("\nstopped before training began.")
        return interrupts.status()
    except FinetuneError as error:
        return _fail(" ".join([str(error), *getattr(error, "__notes__", [])]), error.exit_status, debug)
    except Exception as error:
        notes = [] if debug else ["Run again with --debug for the traceback."]
        notes += getattr(error, "__notes__", [])
        return _fail(" ".join([f"{type(error).__name__}: {_one_line(error)}.", *notes]), 1, debug)


#: What only --plan takes: for one machine, and for a cluster.
PLAN_OPTIONS = ("drive", "ssds", "network", "scheme", "max_model", "json")
CLUSTER_PLAN_OPTIONS = ("trainable",)
#: What --demo takes; it is always replaced.
DEMO_OPTIONS = ("output", "report", "debug", "overwrite")
#: What says which cluster a plan is for; training over nodes takes it, too.
CLUSTER_OPTIONS = ("cluster", "levels", "quantise")
#: What says that adapters are trained; a plan for a cluster knows their share only.
ADAPTERS = ("lora_rank", "peft_config", "frozen_dtype")
#: What is chosen for training in memory, and there is no choice of it out of core.
ONLY_IN_MEMORY = ("trainable", "strategy", "quantise", "device_cache_threshold")
#: What changes a run or a plan for one machine, and no plan for a cluster: that assumes bf16, fp32 moments, and the
#: hardware that --cluster describes.
NOT_OF_CLUSTERS = (
    "gpu", "device_memory", "host_memory", "host_cache", "dtype", "optimizer_dtype", "io", "single_slot",
    "device_cache_threshold", "trace",
)  # fmt: skip


def _run(
    interrupts: Interrupts,
    arguments: tuple[str, ...],
    demo: bool,
    profile: bool,
    plan: bool,
    check: bool,
    verify: tuple[str, ...],
    config: Path | None,
    write_config: bool,
    **options: Any,
) -> int:
    if write_config:
        print(effective_config(click.get_current_context()), end="")
        return 0
    if verify:
        others = ("demo", "profile", "plan", "check", "model", "data", "eval_data", "resume", "overwrite", "report",
                  "trace")  # fmt: skip
        modes = {"demo": demo, "profile": profile, "plan": plan, "check": check}
        _refuse_with("--verify", "trains nothing", {**options, **modes}, others)
        from cli.verify import run_verify

        return run_verify([path for word in verify for path in expand_pattern("--verify", word)])
    plans = {name: options.pop(name) for name in PLAN_OPTIONS}
    clusters = {name: options.pop(name) for name in CLUSTER_PLAN_OPTIONS}
    if not plan:
        for name, value in (plans | clusters).items():
            if value and value != "ours":
                raise UserError(f"--{name.replace('_', '-')} belongs to --plan: add that.")
    else:
        _refuse_with(
            "--plan", "trains nothing", {**options, "demo": demo, "profile": profile},
            ("demo", "profile", "data", "eval_data", "resume", "overwrite", "report"),
        )  # fmt: skip
    if profile:
        _refuse_with(
            "--profile", "trains nothing", {**options, "demo": demo}, ("demo", "data", "eval_data", "resume", "trace")
        )  # fmt: skip
        options["model"] = options["model"] or DEFAULT_PROFILE_MODEL
    if check:
        _refuse_with(
            "--check", "trains nothing", {**options, "demo": demo, "profile": profile, "plan": plan},
            ("demo", "profile", "plan", "data", "eval_data", "nodes", "resume", "trace"),
        )  # fmt: skip
        from cli.check import run_check

        run_check(settings_of(arguments, {**options, "model": options["model"] or ""}))
        return 0
    if demo:
        own = [name for name in options if name not in DEMO_OPTIONS and _typed(name)]
        _refuse_with("--demo", "brings everything with it", dict.fromkeys(own, True), own)
        from cli.demo import run_demo

        run_demo(options["output"], options["report"], options["debug"], interrupts)
        return 0
    if plan and options["nodes"] and plans["drive"] and not (options["cluster"] or options["levels"]):
        return _plan_ranks(arguments, plans, {**options, **clusters})
    if plan and (options["nodes"] or options["cluster"] or options["levels"]):
        return _plan_cluster(plans, clusters, options)
    if plan and plans["network"]:
        raise UserError("--network connects several nodes: add --nodes N.")
    if plan:
        for name in (*CLUSTER_PLAN_OPTIONS, *CLUSTER_OPTIONS):
            if {**clusters, **options}[name]:
                raise UserError(f"--{name} belongs to plans for a cluster: add --cluster.")
        return _plan(arguments, plans, options)
    if options["model"] is None:
        raise UserError("Give the model to fine-tune with --model DIR or --model PRESET, or try --demo.")
    settings = settings_of(arguments, options)
    if profile and settings.nodes is not None:
        from cli.launch import launch

        launch(settings, trains=False)
        return 0
    if profile:
        from cli.profile import run_profile

        run_profile(settings)
        return 0
    if settings.nodes is not None:
        from cli.launch import launch

        launch(settings)
        return 0

    from cli.train import finetune

    finetune(settings, interrupts)
    return 0


def settings_of(arguments: tuple[str, ...], options: dict[str, Any]) -> Settings:
    """What the parsed ``options`` of a command line ask for.

    Raises:
        UserError: they do not go together.
    """
    given = {field.name: options[field.name] for field in fields(Settings) if field.name in options}
    for name in ("ssd", "leave_ssd", "data", "eval_data"):
        given[name] = tuple(
            path for word in options[name] for path in expand_pattern(f"--{name.replace('_', '-')}", word)
        )
    given["lora_targets"] = tuple(options["lora_targets"])
    return Settings(**given, arguments=arguments)


def _plan(arguments: tuple[str, ...], plans: dict[str, Any], options: dict[str, Any]) -> int:
    if plans["max_model"] == bool(options["model"]):
        raise UserError(
            "--max-model looks for the model itself: leave --model out."
            if plans["max_model"]
            else "Give the model to plan for, --model DIR or --model PRESET, or ask for the largest with --max-model."
        )
    from cli.plan import PlanOptions, run_plan

    return run_plan(settings_of(arguments, options), PlanOptions(**plans))


def _plan_ranks(arguments: tuple[str, ...], plans: dict[str, Any], options: dict[str, Any]) -> int:
    """Out of core on several nodes of one kind."""
    if plans["max_model"] or plans["scheme"] != "ours" or not options["model"]:
        raise UserError("A plan for several nodes is for one model and this program: --model, without --max-model.")
    _refuse_with("A plan with --drive", "is for training out of core", options, ONLY_IN_MEMORY)
    from cli.plan import PlanOptions, run_plan

    among = {name: options[name] for name in ("nodes", "gpus_per_node")}
    single = settings_of(arguments, {**options, "nodes": None, "gpus_per_node": None})
    return run_plan(single, PlanOptions(**plans, **among))


def _plan_cluster(plans: dict[str, Any], clusters: dict[str, Any], options: dict[str, Any]) -> int:
    if options["ssd"]:
        raise UserError(
            "A plan for several nodes with SSDs is for hardware by name: --gpu NAME --drive NAME --ssds N --network "
            "25Gbit/s instead of --ssd. For training in memory, leave --ssd out."
        )
    if options["model"] is None:
        raise UserError("Give the model to plan for, --model DIR or --model PRESET.")
    for name, value in plans.items():
        if name != "json" and value and value != "ours":
            raise UserError(f"--{name.replace('_', '-')} belongs to plans for one machine, not for a cluster.")
    for name in ADAPTERS:
        if options[name]:
            raise UserError(
                f"--{name.replace('_', '-')} changes nothing in a plan for a cluster: say which part of the parameters "
                "adapters are, --trainable 0.01."
            )
    for name in NOT_OF_CLUSTERS:
        if _typed(name):
            raise UserError(
                f"--{name.replace('_', '-')} changes nothing in a plan for a cluster (bf16, with the hardware that "
                "--cluster describes): leave it out."
            )
    from cli.plan_cluster import ClusterSettings, plan_cluster

    shared = {
        name: options[name]
        for name in ("model", "nodes", "gpus_per_node", "micro_batch", "seq_len", "strategy", *CLUSTER_OPTIONS)
    }
    batch = options["batch_size"] if _typed("batch_size") else None
    return plan_cluster(ClusterSettings(**shared, **clusters, batch_size=batch, as_json=plans["json"]))


def _typed(name: str) -> bool:
    """Whether an option was given: on the command line, be it with its default, or in a file with another value.

    Files that ``--write-config`` made have all options.
    """
    context = click.get_current_context()
    source = context.get_parameter_source(name)
    if source is not ParameterSource.DEFAULT_MAP:
        return source is not ParameterSource.DEFAULT
    default = next(option.to_info_dict()["default"] for option in context.command.params if option.name == name)
    return str(context.meta[WRITTEN][name]) != str(default)


def _refuse_with(option: str, why: str, options: dict[str, Any], others: Iterable[str]) -> None:
    for name in others:
        if options[name]:
            raise UserError(f"{option} {why} and cannot be combined with --{name.replace('_', '-')}.")


def _say(message: str) -> None:
    """Print to a terminal that may be gone."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _fail(message: str, status: int, debug: bool = False) -> int:
    """Print one message; with ``debug``, the traceback of the exception being handled before it."""
    if debug:
        traceback.print_exc()
    _say(f"finetune: error: {message}")
    return status


def _one_line(error: BaseException) -> str:
    """An exception's text with line breaks taken out, without its last full stop."""
    return " ".join(str(error).split()).removesuffix(".") or "no message"


if __name__ == "__main__":
    sys.exit(main())
