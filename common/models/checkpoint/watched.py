"""Files of checkpoints and adapters that are replaced while they are read: two models would be mixed."""

import os
from pathlib import Path

from common.errors import UserError

# What a model is made of: weights, configuration, tokenizer, processor, templates.
_PATTERNS = (
    "*.safetensors", "*.safetensors.index.json", "*.gguf", "config.json", "adapter_config.json", "token*.json",
    "vocab.*", "special_tokens_map.json", "added_tokens.json", "merges.txt", "*.model", "*.tiktoken", "*.jinja",
    "*processor_config.json",
)  # fmt: skip

_State = tuple[int, int, int, int]  # Of a file: its file system, inode, size, and time in ns


class WatchedFiles:
    """The state of the files in directories, to be taken before the first of them is read.

    Args:
        directories: of checkpoints and adapters, or files of models; what does not exist is left out.
    """

    def __init__(self, *directories: str | os.PathLike[str] | None) -> None:
        paths = [Path(directory).expanduser() for directory in directories if directory]
        self._states = {path: _states(path) for path in paths if path.exists()}

    def changed(self) -> str:
        """Return a sentence about the first file that is another one now; empty if all are as they were."""
        for directory, before in self._states.items():
            now = _states(directory)
            names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            if names:
                return (
                    f"{directory} was changed or replaced while it was read ({', '.join(names[:3])}), and old and new "
                    "files would be mixed: start again once nothing writes there."
                )
        return ""

    def check(self) -> None:
        """Refuse what was read since the files were first looked at, if they have changed.

        Raises:
            UserError: names the directory.
        """
        if sentence := self.changed():
            raise UserError(sentence)


def _states(directory: Path) -> dict[str, _State | None]:
    """Return the state of each file by its name: of a link, of the file that it leads to."""
    states: dict[str, _State | None] = {}
    files = [directory] if directory.is_file() else []
    for path in {*files, *(path for pattern in _PATTERNS for path in directory.glob(pattern))}:
        try:
            status = path.stat()
            states[path.name] = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        except OSError:
            states[path.name] = None
    return states
