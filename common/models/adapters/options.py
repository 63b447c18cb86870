"""Which adapters are wanted: LoRA in a few options, or a configuration of ``peft`` from a file."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftType
from safetensors import safe_open

from common.errors import UserError, did_you_mean
from common.files import read_text_file
from common.models.checkpoint.identity import weights_identity
from common.models.checkpoint.shards import StoredTensor, read_header

CONFIG = "adapter_config.json"  # Name of the configuration in an adapter directory

# Peft's word for every linear layer but the head, and experts and routers that it knows
ALL_LINEAR = "all-linear"
DENSE_LINEAR = "dense-linear"  # What is adapted by default; see :mod:`common.models.adapters.default_targets`

_HONORED = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern",
    "r", "rank_pattern", "alpha", "lora_alpha", "alpha_pattern", "use_rslora", "lora_dropout", "rank_dropout",
    "rank_dropout_scale", "bias", "lora_bias", "use_dora", "fan_in_fan_out", "init_lora_weights", "modules_to_save",
    "trainable_token_indices",
}  # fmt: skip
"""Fields of LoRA's configuration whose whole effect is in the adapted layers. All others, those that a new
version of ``peft`` brings among them, must have their defaults."""


@dataclass(frozen=True)
class AdapterOptions:
    """The usual options of LoRA; all others of ``peft`` come from a file, see :func:`load_peft_config`."""

    rank: int  # Rank of the two factors that each adapted weight gets
    alpha: float | None = None  # Scale: the product is multiplied by ``alpha / rank``; None: twice the rank
    dropout: float = 0.0  # Probability with which an input element of an adapter is dropped in training
    targets: tuple[str, ...] = (DENSE_LINEAR,)
    """Names of the adapted modules (``q_proj``) and fused experts (``gate_up_proj``); or ``dense-linear``: the linear
    layers of attention and dense feed-forward networks; or ``all-linear``: every linear layer but the head, and in
    families of mixtures that ``peft`` knows routers and experts."""
    # Whether to multiply by ``alpha / sqrt(rank)`` instead (Kalajdzievski, arXiv:2312.03732)
    rslora: bool = False
    dora: bool = False  # Whether to train magnitudes apart from directions (Liu et al., arXiv:2402.09353)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"--lora-rank must be at least 1, not {self.rank}.")
        if self.alpha is not None and self.alpha <= 0:
            raise UserError(f"--lora-alpha must be positive, not {self.alpha:g}.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--lora-dropout must be at least 0 and less than 1, not {self.dropout:g}.")
        if not self.targets:
            raise UserError(f"--lora-targets needs at least one name, {DENSE_LINEAR}, or {ALL_LINEAR}.")

    def peft_config(self) -> LoraConfig:
        """Return these options as a configuration of ``peft``, whose targets a model settles."""
        alpha = 2 * self.rank if self.alpha is None else self.alpha
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,  # type: ignore[arg-type]  # any number will do
            lora_dropout=self.dropout,
            target_modules=self.targets[0]
            if self.targets in ((ALL_LINEAR,), (DENSE_LINEAR,))
            else list(self.targets),
            use_rslora=self.rslora,
            use_dora=self.dora,
        )


def load_peft_config(path: str | os.PathLike[str], option: str = "--peft-config") -> PeftConfig:
    """Read a configuration as ``peft`` writes it: ``adapter_config.json``, or the directory that holds one.

    Args:
        path: the file or the directory.
        option: what has named it, for messages.

    Raises:
        UserError: there is none, ``peft`` cannot read it, or it asks for what cannot be done here.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / CONFIG
    try:
        content = json.loads(read_text_file(file))
        if not isinstance(content, dict):
            raise ValueError("it is not a table of settings")
        _check_types(content)
        config = PeftConfig.from_peft_type(**{"peft_type": "LORA", "task_type": "CAUSAL_LM", **content})
    except OSError as error:
        raise UserError(f"{option} {path}: {file} cannot be read: {error.strerror}.") from error
    except Exception as error:
        # Bad JSON, an unknown method, a field that the method does not have, bad values
        raise UserError(f"{option} {file} is not a configuration that peft can read: {error}") from error
    config.inference_mode = False
    try:
        _check_known(content, config)
        check_supported(config)
    except UserError as error:
        raise UserError(f"{option} {file}: {error}") from error
    return config


_NAMES = ("a name or a list of names", lambda value: _is_list(value, str) or isinstance(value, str))
_SWITCH = ("true or false", lambda value: isinstance(value, bool))
_PATTERN = (
    "a number for each of some names",
    lambda value: isinstance(value, dict) and _is_list([*value.values()], float),
)
_NEVER_NULL = ("bias", "rank_pattern", "alpha_pattern")
# Types of the fields that peft reads without looking at them; each but those may also be null.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("target_modules", "exclude_modules", "modules_to_save", "target_parameters"), _NAMES),
    "layers_pattern": _NAMES,
    "layers_to_transform": ("numbers", lambda value: _is_list(value, int) or _is_list([value], int)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), _PATTERN),
    **dict.fromkeys(("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "inference_mode"), _SWITCH),
    "bias": ("a word", lambda value: isinstance(value, str)),
    "r": ("a number of at least 1", lambda value: _is_list([value], int) and value >= 1),
    "lora_alpha": ("a number other than 0", lambda value: _is_list([value], float) and value != 0),
    "lora_dropout": ("a number from 0 to 1", lambda value: _is_list([value], float) and 0 <= value < 1),
    "trainable_token_indices": ("a list of numbers", lambda value: all(
        _is_list(item, int) for item in (value.values() if isinstance(value, dict) else [value])
    )),
}  # fmt: skip


def _is_list(value: Any, kind: type) -> bool:
    if not isinstance(value, list) or any(isinstance(item, bool) for item in value):
        return False
    if kind is str:
        return all(isinstance(item, str) for item in value)
    numbers = (int, float) if kind is float else (int,)
    return all(isinstance(item, numbers) and abs(item) < 1 << 31 for item in value)


def _check_types(content: Mapping[str, Any]) -> None:
    for field, (expected, fits) in _TYPES.items():
        value = content.get(field)
        if field in content and not fits(value) and (value is not None or field in _NEVER_NULL):
            raise ValueError(f"{field} is {json.dumps(value)[:80]}, and has to be {expected}")


def _check_known(content: Mapping[str, Any], config: PeftConfig) -> None:
    """Refuse fields that ``peft`` leaves out, but for those that say nothing, as other versions of it write them."""
    known = {field.name for field in fields(config)}
    if unknown := sorted(name for name, value in content.items() if value and name not in known):
        raise UserError(
            f"peft does not know the field {unknown[0]!r}, and would leave it out: correct its name, or take it out."
            f"{did_you_mean(unknown[0], known)}"
        )


def check_supported(config: PeftConfig) -> None:
    """Refuse a configuration that cannot be trained here.

    Raises:
        UserError: the method or a field is not supported; the message names it.
    """
    if config.peft_type != PeftType.LORA:
        name = getattr(config.peft_type, "value", config.peft_type)
        raise UserError(
            f"peft_type {name} cannot be trained here: there is LORA, also with rsLoRA, DoRA, rank and alpha patterns."
        )
    defaults = vars(type(config)())
    for field, value in vars(config).items():
        if field not in _HONORED and (value or defaults.get(field)) and value != defaults.get(field):
            raise UserError(
                f"{field} in the adapter configuration is not supported: it does more than adapt single layers, or is "
                "not known here. Leave it out."
            )
    initialisation = getattr(config, "init_lora_weights", True)
    if initialisation not in (True, False, "gaussian", "orthogonal"):
        raise UserError(
            f"init_lora_weights = {initialisation!r} changes or looks at the base weights, which are only streamed: "
            "there are true, false, gaussian and orthogonal."
        )


WEIGHTS = "adapter_model.safetensors"  # Name of the file with the adapters' weights in an adapter directory
BASE = "base"  # Key in that file's metadata of the identity of the weights that they were trained on
CONFIG_DIGEST = "config"  # Key there of a hash of the configuration that they were saved with
# Settings that do not change what adapters compute
WITHOUT_EFFECT = (
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
    "auto_mapping",
    "task_type",
)
_PICKLE = "adapter_model.bin"  # Name of that file as older versions of ``peft`` have written it


def config_digest(file: Path) -> str | None:
    """Return a hash of what a configuration has adapters compute; None if it cannot be read."""
    try:
        content = json.loads(read_text_file(file))
        said = {name: value for name, value in content.items() if name not in WITHOUT_EFFECT}
    except (OSError, ValueError, AttributeError):
        return None
    # peft keeps names in sets, and writes them in any order.
    ordered = {
        name: sorted(value, key=str) if isinstance(value, list) else value for name, value in said.items()
    }
    return hashlib.sha256(json.dumps(ordered, sort_keys=True).encode()).hexdigest()[:32]


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
        # Tensors in the file, by their names there
        self.files: Mapping[str, StoredTensor] = read_header(self._file)
        with safe_open(self._file, "pt") as file:
            self._metadata: Mapping[str, str] = file.metadata() or {}
        self._check_config()

    def config(self) -> PeftConfig:
        """Return the configuration: a new one each time, since ``peft`` changes what it is given."""
        return load_peft_config(self.directory, "--adapter")

    def _check_config(self) -> None:
        """Refuse another configuration than the weights were saved with: shapes do not tell it."""
        saved_with = self._metadata.get(CONFIG_DIGEST)
        if saved_with and config_digest(self.directory / CONFIG) not in (saved_with, None):
            raise UserError(
                f"--adapter {self.directory}: {CONFIG} was changed, or is that of another adapter, since {WEIGHTS} was "
                "saved with it: copy both from one directory. If the change is meant, load the adapter with peft "
                "and save it with its save_pretrained."
            )

    @cached_property
    def digest(self) -> str:
        """Hash of configuration and weights."""
        content = hashlib.sha256((self.directory / CONFIG).read_bytes())
        with self._file.open("rb") as file:
            hashlib.file_digest(file, lambda: content)
        return content.hexdigest()[:16]

    @property
    def advice(self) -> str:
        """What to type instead of a model that they do not fit."""
        base = load_peft_config(self.directory, "--adapter").base_model_name_or_path
        return "give the --model that it was made for" + (f": --model {base}" if base else ".")

    @contextmanager
    def fitting(self, model: str) -> Iterator[None]:
        """Report errors of a model that they do not fit, by the name of its class, as what they are."""
        try:
            yield
        except UserError as error:
            why = error.as_written.partition(". ")[0].removesuffix(".")
            raise UserError(
                f"--adapter {self.directory} does not fit this {model}: {why}. So {self.advice}"
            ) from error

    def warning(self, checkpoint: Path | None) -> str:
        """Return a warning if they were trained on other weights than those of ``checkpoint``.

        Empty if not, or if that is not known, as of adapters that other tools have saved.
        """
        trained_on = self._metadata.get(BASE)
        now = weights_identity(checkpoint)
        if not trained_on or not now or trained_on == now:
            return ""
        return (
            f"the weights of {checkpoint} are not those that {self.directory} was trained on: they have changed, or "
            "are another version of them. The result may be worse than in training"
        )

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
        problems = [
            f"lacks {name}, which adapters of this model have" for name in expected if name not in self.files
        ]
        problems += [
            f"holds {name}, which no adapter of this model has" for name in self.files if name not in known
        ]
        for name, stored in self.files.items():
            if name in known and stored.shape != tuple(known[name]):
                there, here = (" x ".join(map(str, shape)) for shape in (stored.shape, known[name]))
                problems.append(f"holds {name} of {there}, and of this model it is {here}")
        if problems:
            self._refuse_other_names([name for name in self.files if name not in known], expected)
            raise UserError(f"--adapter {self.directory} {problems[0]}: {self.advice}")

    def _refuse_other_names(self, unknown: Collection[str], expected: Collection[str]) -> None:
        """Refuse names that differ from those expected in what is before the layers alone."""
        names = {_in_layer(name): name for name in expected if name not in self.files}
        if other := next((name for name in unknown if _in_layer(name) in names), None):
            raise UserError(
                f"--adapter {self.directory} holds {other}, which is {names[_in_layer(other)]} here: it was saved with "
                "another version of transformers, for the language model alone, or without save_pretrained. Rename "
                "its tensors like this."
            )


def _in_layer(name: str) -> str:
    """Return what a name has from the list of layers on, without an adapter's name; all of it if there is no number."""
    return re.sub(r"^.*?(\w+\.\d+\.)", r"\1", re.sub(r"(\.lora_\w+)\.\w+(\.weight)$", r"\1\2", name))
