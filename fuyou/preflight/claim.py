"""What a proof is about: everything of a run that its result depends on."""

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers import PreTrainedConfig

from common.models.miniature import miniature
from fuyou.model.open_model import same_text


@dataclass(frozen=True)
class Claim:
    """A statement that is to be proven.

    Args:
        config: of the run's model; its small one is used.
        adapters: that are trained, if any.
        trainable: names of what is trained, if not everything.
        packed: whether rows hold several documents, with position ids that start again.
        router_loss: of a mixture of experts: ``"on"``, ``"off"``, or ``"auto"``, which leaves it to the configuration.
        dtype: that is computed in.
        pieces: whether blocks are cut into pieces, as small as can be.
    """

    config: PreTrainedConfig
    adapters: PeftConfig | None = None
    trainable: tuple[str, ...] | None = None
    packed: bool = False
    router_loss: str = "auto"
    dtype: torch.dtype = torch.float32
    pieces: bool = False

    def small_config(self) -> PreTrainedConfig:
        """Return the small configuration, with the router loss that is asked for."""
        small = miniature(self.config)
        if small.num_labels == 1:  # a reward: its head is that of classes, and its loss is the caller's
            small.num_labels = 2
        if self.router_loss != "auto":
            for part in config_parts(small):
                if hasattr(part, "output_router_logits"):
                    part.output_router_logits = self.router_loss == "on"
        return small

    def key(self, small: PreTrainedConfig) -> dict[str, Any]:
        """Return everything that the proof depends on, as JSON can carry it."""
        fields = {name: value for name, value in small.to_dict().items() if name not in ("_name_or_path",)}
        adapters = None if self.adapters is None else self.adapters.to_dict()
        settled: dict[str, Any] = {
            "config": fields,
            "adapters": adapters,
            "trainable": self.trainable,
            "packed": self.packed,
            "router_loss": self.router_loss,
            "dtype": str(self.dtype),
            **({"pieces": True} if self.pieces else {}),
        }
        return {
            "claim": json.loads(json.dumps(settled, sort_keys=True, default=same_text)),
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "peft")},
            "code": own_code(),
        }


def config_parts(config: PreTrainedConfig) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Return a configuration and the one of its language model, which may be the same."""
    return config, config.get_text_config(decoder=True)


@cache
def own_code() -> str:
    """Return a digest of the code that the proof is about."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in ("fuyou", "common/models", "common/data"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:24]
