"""An adapter that somebody has trained before, as ``peft`` saves it: a directory to begin with."""

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from peft import PeftConfig
from safetensors import safe_open

from common.errors import UserError
from common.models.adapters.options import CONFIG, load_peft_config
from common.models.checkpoint.shards import StoredTensor, read_header

WEIGHTS = "adapter_model.safetensors"
"""Name of the file with the adapters' weights in an adapter directory."""
_PICKLE = "adapter_model.bin"
"""Name of that file as older versions of ``peft`` have written it."""


class SavedAdapter:
    """An adapter directory: its configuration, and its weights one at a time.

    Args:
        directory: with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        UserError: there is none, or it asks for what cannot be trained here.
        FinetuneError: the file of its weights is damaged.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).expanduser()
        if not (self.directory / CONFIG).is_file():
            raise UserError(
                f"--adapter {directory} holds no {CONFIG}: give the directory that peft's save_pretrained has written."
            )
        self._file = self.directory / WEIGHTS
        if not self._file.is_file():
            pickled = (self.directory / _PICKLE).is_file()
            raise UserError(
                f"--adapter {directory} holds {_PICKLE}, which is not read, as a pickle can run any code: load it with "
                "peft, and save it with its save_pretrained."
                if pickled
                else f"--adapter {directory} holds no {WEIGHTS}: it is a configuration alone, for --peft-config."
            )
        self.files: Mapping[str, StoredTensor] = read_header(self._file)
        """Tensors in the file, by their names there."""

    def config(self) -> PeftConfig:
        """Return the configuration: a new one each time, since ``peft`` changes what it is given."""
        return load_peft_config(self.directory, "--adapter")

    @cached_property
    def digest(self) -> str:
        """Hash of configuration and weights."""
        content = hashlib.sha256((self.directory / CONFIG).read_bytes())
        with self._file.open("rb") as file:
            hashlib.file_digest(file, lambda: content)
        return content.hexdigest()[:16]

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor in its own dtype."""
        with safe_open(self._file, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def check(self, expected: Mapping[str, torch.Size], also: Mapping[str, torch.Size]) -> None:
        """See whether the file holds what a model's adapters are.

        Args:
            expected: shapes by name of what must be there.
            also: of what may be there.

        Raises:
            UserError: it does not, or more.
        """
        known = {**also, **expected}
        lacking = next((name for name in expected if name not in self.files), None)
        foreign = next((name for name in self.files if name not in known), None)
        if lacking is not None or foreign is not None:
            what = f"lacks {lacking}" if lacking is not None else f"holds {foreign}, which"
            has = "which adapters of this model have" if lacking is not None else "no adapter of this model has"
            raise UserError(
                f"--adapter {self.directory} {what}{',' if lacking else ''} {has}: give the --model that it was made "
                "for."
            )
        for name, stored in self.files.items():
            if stored.shape != tuple(known[name]):
                there, here = (" x ".join(map(str, shape)) for shape in (stored.shape, known[name]))
                raise UserError(
                    f"--adapter {self.directory} holds {name} of {there}, and of this model it is {here}: give the "
                    "--model that it was made for."
                )
