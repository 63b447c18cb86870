"""The entry point: reads the command line, runs it, and turns whatever happens into one message and an exit status.

0: done. 1: something failed. 2: what was asked for cannot be done as asked. 130: stopped by Ctrl-C (or SIGTERM).
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from cli.interrupts import Interrupts, Stopped
from cli.options import build_command, expand_pattern
from cli.settings import Settings
from common.errors import FinetuneError, UserError

INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``finetune`` with ``argv`` (default: the process's own). Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    # Nothing is ever downloaded: checkpoints, tokenizers and data are local.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    interrupts = Interrupts()

    def run(**options: Any) -> None:
        _run(interrupts, tuple(arguments), **options)

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


def _run(interrupts: Interrupts, arguments: tuple[str, ...], demo: bool, **options: Any) -> None:
    if demo:
        _refuse_with_demo(options)
        from cli.demo import run_demo

        run_demo(options["output"], options["report"], options["debug"], interrupts)
        return
    settings = settings_of(arguments, options)
    if settings.nodes is not None:
        from cli.launch import launch

        launch(settings)
        return

    from cli.train import finetune

    finetune(settings, interrupts)


def settings_of(arguments: tuple[str, ...], options: dict[str, Any]) -> Settings:
    """What the parsed ``options`` of a command line ask for.

    Raises:
        UserError: they do not go together.
    """
    if options["model"] is None:
        raise UserError("Give the model to fine-tune with --model DIR or --model PRESET, or try --demo.")
    given = {name: value for name, value in options.items() if name != "demo"}
    for name in ("ssd", "data"):
        given[name] = tuple(path for word in options[name] for path in expand_pattern(f"--{name}", word))
    return Settings(**given, arguments=arguments)


def _refuse_with_demo(options: dict[str, Any]) -> None:
    for name in ("model", "data", "ssd", "resume", "nodes"):
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
