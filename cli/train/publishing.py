"""Push an exported model to a hub."""

import shlex

from cli.job.job import Job
from common.activity import activity
from common.errors import FinetuneError, on_one_line

_PUSHED = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.md"]
_KEPT = ["*/*"]  # Files of the output directory that are pushed, and those below it, which are the run's, that are not


def push(job: Job) -> str:
    """Push what was exported to the repository of ``--push-to-hub``, and return a line about it for people.

    Raises:
        FinetuneError: if it failed; says how to try again.
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
