"""The entry point: reads the command line, runs it, and turns whatever happens into one message and an exit status.

0: done. 1: something failed. 2: what was asked for cannot be done as asked. 130: stopped by Ctrl-C (or SIGTERM).
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cli.interrupts import Interrupts, Stopped
from cli.options import build_command, expand_pattern
from cli.settings import Settings
from common.errors import FinetuneError, UserError

if TYPE_CHECKING:
    from cli.plan_cluster import ClusterSettings

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``finetune`` with ``argv`` (default: the process's own). Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    # Nothing is ever downloaded: checkpoints, tokenizers and data are local.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    interrupts = Interrupts()

    def run(**options: Any) -> int | None:
        return _run(interrupts, tuple(arguments), **options)

    try:
        with interrupts:
            status = build_command(run).main(arguments, prog_name="finetune", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        return _fail(f"{error.format_message()} (finetune --help lists all options)", 2)
    except Stopped as stopped:
        print(f"\n{stopped}", file=sys.stderr)
        return INTERRUPTED
    except (KeyboardInterrupt, click.Abort):
        print("\nstopped before training began.", file=sys.stderr)
        return INTERRUPTED
    except FinetuneError as error:
        return _fail(" ".join([str(error), *getattr(error, "__notes__", [])]), error.exit_status, debug)
    except Exception as error:
        notes = [] if debug else ["Run again with --debug for the traceback."]
        notes += getattr(error, "__notes__", [])
        return _fail(" ".join([f"{type(error).__name__}: {_one_line(error)}.", *notes]), 1, debug)


def _run(interrupts: Interrupts, arguments: tuple[str, ...], demo: bool, **options: Any) -> int | None:
    if demo:
        _refuse_with_demo(options)
        from cli.demo import run_demo

        run_demo(options["output"], options["report"], options["debug"], interrupts)
        return None
    if options["model"] is None:
        raise UserError("Give the model to fine-tune with --model DIR or --model PRESET, or try --demo.")
    clustered = _take_cluster_options(options)
    if clustered is not None:
        from cli.plan_cluster import plan_cluster

        return plan_cluster(clustered)
    for name in ("ssd", "data"):
        found = [path for word in options[name] for path in expand_pattern(f"--{name}", word)]
        options[name] = tuple(found)
    settings = Settings(**options, arguments=arguments)

    from cli.train import finetune

    finetune(settings, interrupts)
    return None


_CLUSTER = ("cluster", "nodes", "gpus_per_node", "levels", "strategy", "trainable", "quantise", "as_json")


def _take_cluster_options(options: dict[str, Any]) -> "ClusterSettings | None":
    """What a plan for a cluster needs, taken out of ``options``; None: one machine trains."""
    source = click.get_current_context().get_parameter_source
    given = {name for name in options if source(name) is not ParameterSource.DEFAULT}
    taken = {name: options.pop(name) for name in _CLUSTER}
    if not options.pop("plan"):
        if given & set(_CLUSTER):
            names = ", ".join(
                sorted(f"--{name.removeprefix('as_').replace('_', '-')}" for name in given & set(_CLUSTER))
            )
            raise UserError(f"{names}: this only plans so far. Add --plan.")
        return None
    from cli.plan_cluster import ClusterSettings

    batch = options["batch_size"] if "batch_size" in given else None
    shared = {name: options[name] for name in ("model", "micro_batch", "seq_len")}
    return ClusterSettings(batch_size=batch, **shared, **taken)


def _refuse_with_demo(options: dict[str, Any]) -> None:
    for name in ("model", "data", "ssd", "resume"):
        if options[name]:
            raise UserError(f"--demo brings everything with it and cannot be combined with --{name}.")


def _fail(message: str, status: int, debug: bool = False) -> int:
    """Print one message; with ``debug``, the traceback of the exception being handled before it."""
    if debug:
        traceback.print_exc()
    print(f"finetune: error: {message}", file=sys.stderr)
    return status


def _one_line(error: BaseException) -> str:
    """An exception's text with line breaks taken out, without its last full stop."""
    return " ".join(str(error).split()).removesuffix(".") or "no message"


if __name__ == "__main__":
    sys.exit(main())
