"""Where an exported model goes next: to a hub, and into the format of llama.cpp."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cli.job.job import Job
from cli.options.adapters import ADAPTER_CONFIG
from common.activity import activity
from common.errors import FinetuneError, on_one_line
from common.models.adapters.adapters import MERGED

LLAMA_CPP = "LLAMA_CPP"
"""Environment variable with the directory of llama.cpp's source."""
_PUSHED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.md", "*.gguf"]
_KEPT = ["*/*"]
"""Files of the output directory that are pushed, and those below it, which are the run's, that are not."""


def convert_to_gguf(job: Job) -> str:
    """Write what was exported in llama.cpp's format, too, and return a line about it for people.

    The converter is llama.cpp's own: its scripts are looked for on the search path and in the directory that the
    variable ``LLAMA_CPP`` names. Without them, the line has the command to run where they are.

    Raises:
        FinetuneError: the converter has failed.
    """
    command, file = _conversion(job)
    script = _script(command[0])
    if script is None:
        shown = shlex.join(["python", f"llama.cpp/{command[0]}", *command[1:]])
        return f"gguf     llama.cpp's converter is not here (set {LLAMA_CPP} to its directory); run it: {shown}"
    with activity(f"converting to {file.name}", announced=True):
        done = subprocess.run([sys.executable, str(script), *command[1:]], capture_output=True, text=True)
    if done.returncode or not file.exists():
        raise FinetuneError(
            f"The model was exported, and {script} could not convert it (status {done.returncode}): "
            f"{(done.stderr.strip().splitlines() or ['it says nothing'])[-1]}"
        )
    return f"gguf     {file}"


def _conversion(job: Job) -> tuple[Sequence[str], Path]:
    """Return the script's name with its arguments, and the file that it writes."""
    kind = job.settings.gguf
    assert kind is not None
    directory = job.output / MERGED if job.settings.merge else job.output
    file = job.output / f"{job.output.name}-{kind}.gguf"
    options = ["--outfile", str(file), "--outtype", kind]
    if (directory / ADAPTER_CONFIG).exists():
        base = [] if job.checkpoint is None else ["--base", str(job.checkpoint)]
        return ["convert_lora_to_gguf.py", *base, *options, str(directory)], file
    return ["convert_hf_to_gguf.py", *options, str(directory)], file


def _script(name: str) -> Path | None:
    folder = os.environ.get(LLAMA_CPP)
    if folder is not None and (Path(folder).expanduser() / name).is_file():
        return Path(folder).expanduser() / name
    found = shutil.which(name)
    return None if found is None else Path(found)


def push(job: Job) -> str:
    """Push what was exported to the repository of ``--push-to-hub``, and return a line about it for people.

    Raises:
        FinetuneError: it was not; says how to try again.
    """
    import huggingface_hub

    name = job.settings.push_to_hub
    assert name is not None
    api = huggingface_hub.HfApi()
    try:
        with activity(f"pushing to {name}", announced=True):
            api.create_repo(name, private=True, exist_ok=True)
            done = api.upload_folder(
                repo_id=name, folder_path=job.output, allow_patterns=_PUSHED, ignore_patterns=_KEPT,
                commit_message="Fine-tuned with fuyou",
            )  # fmt: skip
    except Exception as error:  # the hub's, the network's and the library's own errors
        raise FinetuneError(
            f"The model was exported to {job.output}, and not pushed: {type(error).__name__}: "
            f"{on_one_line(error)} Push it with `hf upload {name} {shlex.quote(str(job.output))} . "
            "--include '*.safetensors' '*.json' '*.jinja' '*.md' --exclude '*/*'`."
        ) from error
    return f"pushed   {getattr(done, 'repo_url', None) or name}"
