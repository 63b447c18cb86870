"""Save files of a checkpoint or an adapter: they get their names when all are complete and on the drive."""

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import FinetuneError
from common.store.errors import described, opened

STAGING_FOLDER = ".export-incomplete"  # Name of the folder for unfinished files, inside the directory that they are for


class NonFiniteWeights(FinetuneError):
    """Weights to export hold a NaN or an infinity; no file was put in place."""

    def __init__(self, name: str):
        self.name = name
        super().__init__(
            f"Nothing was exported, and what was there before is as it was: {name} holds a NaN or an infinity. Train "
            "again with a lower --lr or with --max-grad-norm, or export it in Python with allow_nonfinite=True."
        )


def first_nonfinite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor that holds a NaN or an infinity; None: none does."""
    for name, value in tensors.items():
        if value.is_floating_point() and value.numel():
            wide = value.to(torch.bfloat16) if value.element_size() == 1 else value  # fp8 cannot be compared
            # One pass and no copy: aminmax propagates NaN.
            if not all(torch.isfinite(bound) for bound in torch.aminmax(wide)):
                return name
    return None


def make_staging_folder(directory: Path) -> Path:
    """Make the empty folder in which files for ``directory`` are made, and that directory if need be."""
    discard_staging_folder(directory)
    folder = directory / STAGING_FOLDER
    folder.mkdir(parents=True)
    return folder


def discard_staging_folder(directory: Path) -> None:
    """Remove unfinished files, of this process or of one that was killed."""
    shutil.rmtree(directory / STAGING_FOLDER, ignore_errors=True)


def save_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a new safetensors file.

    ``safetensors`` (0.8) makes files that only their owner may read, by way of a temporary file next to them, which it
    leaves there if it is killed. So use it in the folder of :func:`make_staging_folder`; the user's umask decides.

    Raises:
        StoreError: the file system refused.
    """
    with described("writing", file):
        file.touch()
        mode = file.stat().st_mode & 0o777
        try:
            save_file({name: value.contiguous() for name, value in tensors.items()}, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise _os_error(error) from error
        file.chmod(mode)


def move_into_place(directory: Path, replaced: Iterable[Path], last: Sequence[str]) -> None:
    """Sync what the folder of ``directory`` holds, move it to ``directory``, and remove the folder.

    Args:
        directory: the directory that was given to :func:`make_staging_folder`.
        replaced: older files, if they exist; removed before anything is moved.
        last: names of files that are moved after all others, in this order: without them nobody loads the rest.

    Raises:
        StoreError: the file system refused.
    """
    folder = directory / STAGING_FOLDER
    with described("writing", folder):
        names = [*sorted({file.name for file in folder.iterdir()} - set(last)), *last]
        for name in names:
            _sync(folder / name)
        for file in replaced:
            file.unlink(missing_ok=True)
        for name in names:
            (folder / name).replace(directory / name)
        folder.rmdir()
        _sync(directory)


def _os_error(error: SafetensorError) -> Exception:
    """Return the system's error, which only the text of ``error`` tells; else the error itself."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else error


def _sync(path: Path) -> None:
    with opened(path, "syncing", os.O_RDONLY) as descriptor:
        os.fsync(descriptor)
