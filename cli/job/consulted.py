"""The model of ``--teacher`` and ``--reference``: whether it fits the one that is trained."""

import hashlib
from pathlib import Path

from transformers import PreTrainedConfig

from cli.options.naming import naming
from cli.options.settings import Settings
from common.errors import UserError
from common.models.presets import load_config
from common.models.task_type import task_type_of


def check_consulted(settings: Settings, config: PreTrainedConfig, checkpoint: Path | None) -> None:
    """See whether the other model, if there is one, knows the same tokens.

    Args:
        settings: of the run.
        config: of the model that is trained.
        checkpoint: its directory; None: a preset.

    Raises:
        UserError: it does not, or it is no checkpoint of a language model.
    """
    if settings.consulted is None:
        return
    option, name = settings.consulted
    with naming(option):
        other, directory = load_config(name)
    if directory is None:
        raise UserError(f"{option} {name} is a preset, whose weights are random: give a checkpoint.")
    if not task_type_of(other).generates:
        raise UserError(f"{option} {name} is {task_type_of(other).value}: give a model that writes text.")
    own, theirs = (one.get_text_config().vocab_size for one in (config, other))
    if own != theirs:
        raise UserError(
            f"{option} {name} has a vocabulary of {theirs:,} tokens, and --model {settings.model} one of {own:,}: give "
            "a model of the same vocabulary."
        )
    if checkpoint is not None and _differ(checkpoint, directory):
        raise UserError(
            f"{option} {name} and --model {settings.model} have different tokenizers: give a model of the same "
            "vocabulary."
        )


def _differ(one: Path, other: Path) -> bool:
    """Return whether both directories have a tokenizer, and the same texts are other tokens."""
    from transformers import AutoTokenizer

    try:
        vocabularies = [AutoTokenizer.from_pretrained(path, local_files_only=True).get_vocab() for path in (one, other)]
    except Exception:  # each tokenizer class fails in its own way; a model to compare with needs none
        return False
    return vocabularies[0] != vocabularies[1]


def identity_of(name: str) -> str:
    """Return a hash that differs between checkpoints: of their configuration, and of their weights' sizes and times."""
    _, directory = load_config(name)
    assert directory is not None
    files = sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin"))
    weights = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256((directory / "config.json").read_bytes() + repr(weights).encode()).hexdigest()[:16]
