"""Find the presets that come with the package: files of facts in ``configs``, by kind and name."""

from importlib.resources import files
from importlib.resources.abc import Traversable


def preset_files(kind: str, extension: str = ".toml") -> dict[str, Traversable]:
    """Return the file of every preset in ``configs/<kind>``, by name; they are data of the installed package."""
    folder = files("configs").joinpath(kind)
    return {file.name.removesuffix(extension): file for file in folder.iterdir() if file.name.endswith(extension)}
