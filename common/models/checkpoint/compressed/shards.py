"""Read the files of a compressed checkpoint as if they held plain tensors."""

from collections.abc import Mapping
from pathlib import Path

import torch

from common.models.checkpoint.compressed.detection import method_of
from common.models.checkpoint.compressed.method import FoundTensor, Method
from common.models.checkpoint.compressed.tensors import CompressedTensor
from common.models.checkpoint.shards import Shards, StoredTensor


class CompressedShards(Shards):
    """A checkpoint's safetensors files, some of whose tensors are compressed.

    Args:
        directory: holds ``config.json`` and safetensors files; see :class:`Shards`.

    Attributes:
        method: how it is compressed; None if it is not: then all tensors are as they are in the files.
        compressed: the compressed ones among ``tensors``, which has the shape and dtype of their numbers.

    Raises:
        UserError, FinetuneError: as :class:`Shards`, or a compressed tensor cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.method: Method | None = method_of(directory)
        self.compressed: dict[str, FoundTensor] = {}
        if self.method is None:
            return
        self.compressed = dict(self.method.find(self))
        hidden = {name for found in self.compressed.values() for name in (*found.names.values(), *found.beside)}
        self.tensors = {name: stored for name, stored in self.files.items() if name not in hidden}
        for name, found in self.compressed.items():
            codes = self.files[found.names["codes"]]
            self.tensors[name] = StoredTensor(codes.file, found.tensor.dtype, found.tensor.model_shape, codes.name)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor, as :meth:`Shards.read`; a compressed one is dequantised."""
        found = self.compressed.get(name)
        return super().read(name) if found is None else _decoded(found.tensor, self.components(name))

    def reads_rows(self, name: str) -> bool:
        """Return whether :meth:`read_rows` reads no more than these rows: of a compressed matrix it does."""
        found = self.compressed.get(name)
        return super().reads_rows(name) if found is None else found.tensor.matrices(0, 1) is not None

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows of a tensor, as :meth:`Shards.read_rows`; all of a compressed matrix is read."""
        found = self.compressed.get(name)
        if found is None:
            return super().read_rows(name, start, stop)
        some = found.tensor.matrices(start, stop)
        if some is None:
            return self.read(name)[start:stop]
        read, read_rows = super().read, super().read_rows
        return _decoded(
            some,
            {
                role: read(one) if role == "global_scale" else read_rows(one, start, stop)
                for role, one in found.names.items()
            },
        )

    def components(self, name: str) -> dict[str, torch.Tensor]:
        """Read the components of a compressed tensor as they are in the files, by their roles."""
        read = super().read  # which knows nothing of what is compressed
        return {role: read(one) for role, one in self.compressed[name].names.items()}


def _decoded(tensor: CompressedTensor, components: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the numbers of a compressed tensor, as the model has them."""
    whole = torch.empty(tensor.model_shape, dtype=tensor.dtype)
    tensor.decode(components, whole.transpose(-1, -2) if tensor.transposed else whole)
    return whole
