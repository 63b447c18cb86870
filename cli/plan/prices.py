"""Prices of parts, and what a plan gives for a dollar (Fuyou, arXiv 2403.06504, section 5.7 and figure 10)."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean
from common.files.presets import preset_files

DEFAULT = "fuyou-table-5"
"""Prices of plans that name no others."""


@dataclass(frozen=True)
class Prices:
    """Prices in US dollars, with their source."""

    title: str
    """Where they come from, and of when they are."""
    server: float
    """A server without GPUs and drives."""
    gpus: dict[str, float]
    """By the names of presets."""
    drives: dict[str, float]

    @classmethod
    def load(cls, name: str | None) -> "Prices":
        """Load a preset, or a file of the same form; None: the preset that comes with the program.

        Raises:
            UserError: there is neither, or it is of another form.
        """
        presets = preset_files("prices")
        try:
            text = presets[name or DEFAULT].read_text() if (name or DEFAULT) in presets else Path(str(name)).read_text()
            content: dict[str, Any] = tomllib.loads(text)
            gpus, drives = (
                {str(one): float(price) for one, price in content[kind].items()} for kind in ("gpus", "drives")
            )
            return cls(str(content["title"]), float(content["server"]), gpus, drives)
        except OSError as error:
            raise UserError(f"--prices {name}: {error.strerror}.{did_you_mean(str(name), presets)}") from error
        except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"--prices {name} is no file of prices ({type(error).__name__}: {error}): see configs/prices."
            ) from error

    def of_machine(
        self, gpu: str, drive: str, drives: int, nodes: int = 1, gpus_per_node: int = 1
    ) -> "MachinePrice | None":
        """Return the price of a machine by the presets of its parts; None: one of them has no price.

        Args:
            gpu: name of the GPU's preset.
            drive: name of the drives' preset.
            drives: drives of a node.
            nodes: number of servers.
            gpus_per_node: GPUs of each.
        """
        if gpu not in self.gpus or drive not in self.drives:
            return None
        parts = gpus_per_node * self.gpus[gpu] + drives * self.drives[drive]
        return MachinePrice(nodes * parts, nodes * (parts + self.server))


@dataclass(frozen=True)
class MachinePrice:
    """What a machine costs, in US dollars."""

    parts: float
    """GPUs and drives alone."""
    whole: float
    """With the servers."""
