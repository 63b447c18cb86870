"""What a command reads, which it never writes into."""

import contextlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from cli.job.outputs import BASE, CHECKPOINTS, FILES, HISTORY_FILE, RESULT, RESULTS, Outputs
from cli.options.run_record import REPLACED, RUN, read_description
from cli.options.settings import Settings
from common.errors import UserError
from common.models.checkpoint.shards import INDEX, SINGLE
from common.models.checkpoint.writer import TOKENIZER_FILES


def check_apart(
    settings: Settings, output: Path | None, drives: Sequence[Path] = (), *, resumes: bool = False
) -> None:
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
    words = [
        ("--model", settings.model),
        ("--adapter", settings.adapter),
        ("--peft-config", settings.peft_config),
    ]
    words += [("--chat-template", settings.chat_template)]
    words += [("--data", file) for files, _ in settings.data_sets for file in files]
    words += [("--eval-data", file) for file in settings.eval_data]
    paths = [
        (option, word, path.resolve()) for option, word in words if (path := _existing_path(word)) is not None
    ]
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


# What a result is
_COMPUTES = ("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json")


def check_whole(settings: Settings) -> list[str]:
    """Refuse a ``--model`` or ``--adapter`` that this program wrote, and whose weights or configuration have changed.

    Returns:
        Sentences about tokenizers and templates that have changed, which a user may well have edited.
    """
    warnings = _twice_there(Path(settings.model or "").expanduser())
    for option, word in (("--model", settings.model), ("--adapter", settings.adapter)):
        for output, name in _written_as(Path(word).expanduser()) if word else ():
            outputs = Outputs.read(output)
            if not outputs.has_list:
                warnings.append(
                    f"{output / RUN / FILES} is missing, damaged, or of another run, so changes of {word} since it was "
                    "written are not seen"
                )
                continue
            faults = {file: sentence for file in outputs.listed(name) if (sentence := outputs.fault(file))}
            read = _COMPUTES if option == "--model" else ("adapter_*",)
            wrong = [sentence for file, sentence in faults.items() if _is_named(file, read)]
            wrong += outputs.shadows(name) if option == "--model" else []
            if wrong:
                what = " ".join([f"{option} {word}: {' '.join(wrong[:3])}", outputs.remedy(name)]).strip()
                raise UserError(f"{what} To use the files as they are, copy them to another directory.")
            edited = [sentence for file, sentence in faults.items() if _is_named(file, TOKENIZER_FILES)]
            warnings += [
                f"{sentence.removesuffix('.')}; the tokenizer is used as it is" for sentence in edited
            ]
    return warnings


def _twice_there(model: Path) -> list[str]:
    """Return a sentence if a directory has its weights in one file, and in several: one of both may be stale."""
    with contextlib.suppress(OSError):  # a name that is too long, which others report
        if (model / SINGLE).is_file() and (model / INDEX).is_file():
            return [
                f"{model} has {SINGLE} and {INDEX}: the former is read, as transformers does. Move the other elsewhere"
            ]
    return []


def _written_as(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield the output directory whose list has the files of a directory, and the name that they have there."""
    with contextlib.suppress(OSError):  # a name that is too long, which others report
        if _has_list(directory):
            yield directory, RESULT
            return
        path = directory.resolve()
        for outer in list(path.parents)[:2]:
            name = path.relative_to(outer).as_posix()
            if _has_list(outer) and (name == BASE or name.startswith(f"{CHECKPOINTS}/")):
                yield outer, name


def _has_list(output: Path) -> bool:
    """Return whether a list of what a run has written is there, or was: such a run has an id."""
    return (output / RUN / FILES).exists() or "id" in read_description(output)


def _is_named(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(Path(file).name, pattern) for pattern in patterns)


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
    return first in (RUN, BASE, CHECKPOINTS, REPLACED) or any(
        fnmatch(first, name) for name in (*RESULTS, HISTORY_FILE)
    )
