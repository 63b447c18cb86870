"""What a command reads, which it never writes into."""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from cli.job.outputs import BASE, CHECKPOINTS, HISTORY_FILE, RESULTS
from cli.options.run_record import REPLACED, RUN
from cli.options.settings import Settings
from common.errors import UserError


def check_apart(settings: Settings, output: Path | None, drives: Sequence[Path] = (), *, resumes: bool = False) -> None:
    """Refuse to write into what is to be read, or into drives inside what is written.

    What is read may lie in a directory that is written, but not where a run writes.

    Args:
        settings: of any command: what its options name is read.
        output: the output directory, if the command writes one.
        drives: directories of ``--ssd`` that it writes.
        resumes: whether a run that did write there continues; then it may be inside.
    """
    if output is not None and not resumes:
        _check_drives(settings, output)
    words = [("--model", settings.model), ("--adapter", settings.adapter), ("--peft-config", settings.peft_config)]
    words += [("--chat-template", settings.chat_template)]
    words += [("--data", file) for files, _ in settings.data_sets for file in files]
    words += [("--eval-data", file) for file in settings.eval_data]
    paths = [(option, word, path.resolve()) for option, word in words if (path := _existing_path(word)) is not None]
    directories = [("--output", output)] if output is not None else []
    for option, directory in [*directories, *(("--ssd", drive) for drive in drives)]:
        written = directory.expanduser().resolve()
        for source, word, read in paths:
            if read.is_dir() and (written == read or (written.is_relative_to(read) and not resumes)):
                where = "is" if written == read else "lies in"
                raise UserError(
                    f"{option} {directory} {where} {source} {word}, which is to be read: give another {option}."
                )
            if read.is_relative_to(written) and _is_written(read.relative_to(written)):
                raise UserError(
                    f"{source} {word} lies in {option} {directory}, where the run would write: give another {option}."
                )


def _check_drives(settings: Settings, output: Path) -> None:
    written = output.expanduser().resolve()
    for drive in settings.drives:
        folder = drive.expanduser().resolve()
        if folder.is_relative_to(written) and _is_written(folder.relative_to(written)):
            raise UserError(
                f"--ssd {drive} lies in --output {output}, where the run writes and removes files: give --ssd a "
                "directory outside it."
            )


def _existing_path(word: object) -> Path | None:
    """Return the path that a word names, if it is there: of data it may also be a directory with a split."""
    text = str(word or "")
    paths = [Path(name).expanduser() for name in (text, text.partition(":")[0]) if name]
    return next((path for path in paths if path.exists()), None)


def _is_written(path: Path) -> bool:
    """Return whether a run may write, or remove, what is at a path inside its output directory."""
    first = path.parts[0] if path.parts else ""
    return first in (RUN, BASE, CHECKPOINTS, REPLACED) or any(fnmatch(first, name) for name in (*RESULTS, HISTORY_FILE))
