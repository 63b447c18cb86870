"""A separate environment for DeepSpeed: made once in a folder, then found there."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import transformers

from common.errors import UserError

VERSION = "0.19.8"  # The release whose settings in :mod:`peers.contenders` were tried

work_option = click.option(
    "--work", type=click.Path(file_okay=False, path_type=Path), default=Path("~/.cache/bench-peers"), show_default=True,
    help="Folder of DeepSpeed's environment; it is kept.",
)  # fmt: skip
"""The command-line option that says where the environment is."""

_BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("AsyncIOBuilder", "CPUAdamBuilder"):
    get_accelerator().create_op_builder(name).load()
"""


class DeepSpeedEnvironment:
    """Python, DeepSpeed and its compiled operators below one folder.

    Args:
        folder: where it is, or is to be.
        say: gets a line about each thing that takes time.

    Raises:
        UserError: it cannot be made; says what is missing, with pip's or the compiler's last words.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self._say = say
        self.folder = folder
        self.version = VERSION
        self.python = folder / "venv" / "bin" / "python"
        self.variables = {
            "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }  # fmt: skip
        """What its processes need in their environment."""
        done = folder / "complete"
        versions = (
            f"deepspeed {VERSION}, torch {_plain(torch.__version__)}, transformers {transformers.__version__}"
        )
        if done.exists() and done.read_text() == versions:
            return
        _check_tools()
        began = time.monotonic()
        self._say(f"Making an environment with {versions} in {folder} (stays there) ...")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._run([sys.executable, "-m", "venv", str(folder / "venv")])
        pip = [str(self.python), "-m", "pip", "install", "--quiet"]
        # The same versions as ours, exactly: the comparison is of DeepSpeed, not of PyTorch's releases.
        self._run([*pip, f"torch=={_plain(torch.__version__)}", f"transformers=={transformers.__version__}",
                   "ninja", "setuptools", "wheel", "psutil"])  # fmt: skip
        self._run([*pip, "--no-build-isolation", f"deepspeed=={VERSION}"], DS_BUILD_OPS="0")
        self._say("Compiling DeepSpeed's async_io and cpu_adam ...")
        self._run([str(self.python), "-c", _BUILD])
        done.write_text(versions)
        self._say(f"DeepSpeed is ready after {time.monotonic() - began:.0f} s.")

    def _run(self, command: list[str], **variables: str) -> None:
        done = subprocess.run(
            command, env={**os.environ, **self.variables, **variables}, capture_output=True, text=True
        )
        if done.returncode:
            words = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-12:]
            raise UserError(
                f"{' '.join(command[:6])} failed with exit status {done.returncode}:\n" + "\n".join(words)
            )


def _plain(version: str) -> str:
    """2.13.0 of 2.13.0+cpu: which build it is, is the index's business."""
    return version.split("+")[0]


def _check_tools() -> None:
    missing = [] if shutil.which("g++") else ["g++"]
    if not any(Path(folder, "libaio.h").exists() for folder in ("/usr/include", "/usr/local/include")):
        missing.append("libaio-dev")
    if missing:
        raise UserError(
            f"DeepSpeed compiles its I/O here and needs {' and '.join(missing)}: "
            f"`apt-get install {' '.join(missing)}`. "
            "Or leave its contenders out."
        )
