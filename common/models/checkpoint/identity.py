"""The identity of a checkpoint's weights, by which others of the same shapes are noticed."""

import hashlib
import json
import math
from pathlib import Path

from common.errors import FinetuneError
from common.files import read_text_file
from common.models.checkpoint.shards import Shards

_WITHOUT_EFFECT = {"transformers_version", "_name_or_path"}  # Keys of config.json that say who wrote it
# Most tensors of which values are read, and bytes of each
_SAMPLES = 1024
_SAMPLE_BYTES = 4096


def weights_identity(directory: Path | None) -> str:
    """Return a hash of a checkpoint's configuration, of the names, dtypes, and shapes of all tensors, and of samples of
    their values.

    It reads at most 4 MiB, from the middle of up to 1,024 tensors, and does not depend on how they are divided among
    files. Training changes nearly every tensor; a change of a few values can go unnoticed. Empty if there are no
    weights, or they cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        tensors = {} if directory is None else Shards(directory).files
        names = sorted(tensors)
        if directory is not None and (directory / "config.json").exists():
            digest.update(_configuration(directory / "config.json"))
        for name in names:
            digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}\n".encode())
        for name in names[:: max(1, -(-len(names) // _SAMPLES))]:
            stored = tensors[name]
            nbytes = math.prod(stored.shape) * stored.dtype.itemsize
            with stored.file.open("rb") as file:
                file.seek(stored.start + max(0, nbytes - _SAMPLE_BYTES) // 2)
                digest.update(file.read(min(nbytes, _SAMPLE_BYTES)))
    except (FinetuneError, OSError, ValueError):
        return ""
    return digest.hexdigest() if tensors else ""


def _configuration(file: Path) -> bytes:
    """Return what a configuration says of the model, for a hash: the same weights compute otherwise with another."""
    content = json.loads(read_text_file(file))
    said = {name: value for name, value in content.items() if name not in _WITHOUT_EFFECT}
    return json.dumps(said, sort_keys=True).encode()
