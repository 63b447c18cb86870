"""Random weights from a family's own initialisation, in the memory of one module or of the rows that are read."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby

import torch
from torch import nn
from transformers import PreTrainedModel

from common.errors import FinetuneError
from common.models.checkpoint.random_rows import RowDraws, RowRecorder
from common.models.meta_model import unset_buffers
from common.models.structure import stored_names


class RandomSource:
    """Weights from a family's own initialisation, as ``from_config`` applies it, one module at a time.

    Values depend on ``seed`` and the module's name, not on the order of reading. All are fp32.

    Args:
        model: from :func:`common.models.meta_model.build_meta_model`. It holds a module's values while they are made.

    Memory: the parameters of one module that holds parameters itself (a linear layer, a layer's fused experts), or the
    rows that are read.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        self.seed = seed
        self._stored_name = stored_names(model)
        self._by_rows: dict[str, bool] = {}
        self._draws: tuple[str, dict[str, RowDraws]] = "", {}
        """The module whose rows were read last, and how its parameters are made."""

    def check(self) -> None:
        """Raise a FinetuneError for a persistent buffer that only a checkpoint has values for."""
        for name in unset_buffers(self.model):
            raise FinetuneError(
                f"transformers does not initialise {name} of {type(self.model).__name__}: start from a checkpoint."
            )

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read parameters; see :meth:`WeightSource.read`."""
        for path, group in groupby(names, key=lambda name: self._stored_name[name].rpartition(".")[0]):
            values = self._initialise(path)
            for name in group:
                yield name, values.pop(self._stored_name[name])

    def reads_rows(self, name: str) -> bool:
        """Return whether rows can be read alone; see :meth:`WeightSource.reads_rows`."""
        stored = self._stored_name[name]
        if stored not in self._by_rows:
            path = stored.rpartition(".")[0]
            recorder = self._record(path)
            prefix = f"{path}." if path else ""
            self._by_rows |= {prefix + own: recorder.possible and it.by_rows for own, it in recorder.made.items()}
        return self._by_rows[stored]

    def read_rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        """Read rows; see :meth:`WeightSource.read_rows`."""
        path, _, own = self._stored_name[name].rpartition(".")
        if self._draws[0] != path:
            self._draws = path, self._record(path).made
        made = self._draws[1][own]
        if not made.is_set:
            raise self._not_initialised(path, own)
        return made.rows(first, stop)

    def read_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read nothing: the model has all its buffers."""
        return iter(())

    def read_compressed(self, name: str, parts: Sequence[int] | None = None) -> Iterator[Mapping[str, torch.Tensor]]:
        """Read nothing: random numbers are not compressed."""
        return iter(())

    def _initialise(self, path: str) -> dict[str, torch.Tensor]:
        # NaN, so that a parameter that is not initialised is found.
        real = {
            name: nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=torch.float32), requires_grad=False)
            for name, parameter in self._parameters(path).items()
        }
        self._run(path, real)
        for name, parameter in real.items():
            if parameter.flatten()[:: max(1, parameter.numel() // 4096)].isnan().any():
                raise self._not_initialised(path, name)
        prefix = f"{path}." if path else ""
        return {prefix + name: parameter.detach() for name, parameter in real.items()}

    def _record(self, path: str) -> RowRecorder:
        """Return what the initialisation does to a module's parameters."""
        fake = {
            name: nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)
            for name, parameter in self._parameters(path).items()
        }
        recorder = RowRecorder(fake)
        self._run(path, fake, recorder)
        return recorder

    def _parameters(self, path: str) -> dict[str, nn.Parameter]:
        return dict(self.model.get_submodule(path).named_parameters(recurse=False))

    def _run(self, path: str, values: Mapping[str, nn.Parameter], recorder: RowRecorder | None = None) -> None:
        """Initialise a module with ``values`` as its parameters."""
        module, on_meta = self.model.get_submodule(path), self._parameters(path)
        try:
            for name, parameter in values.items():
                setattr(module, name, parameter)
            with torch.random.fork_rng(devices=[]), torch.no_grad(), recorder or nullcontext():
                torch.default_generator.manual_seed(self._seed_of(path))
                for owner, ancestor in self._initialisers(path):
                    # From the leaf upwards, as transformers does: a block may scale its projections once more (GPT-2).
                    # All other parameters are on the meta device, where this costs nothing.
                    owner._init_weights(ancestor)
        finally:
            for name, parameter in on_meta.items():
                setattr(module, name, parameter)

    def _not_initialised(self, path: str, name: str) -> FinetuneError:
        whole = f"{path}.{name}" if path else name
        return FinetuneError(
            f"transformers does not initialise {whole} of {type(self.model).__name__}: start from a checkpoint."
        )

    def _seed_of(self, path: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{path}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _initialisers(self, path: str) -> list[tuple[PreTrainedModel, nn.Module]]:
        """Return a module and all around it, innermost first, each with the (sub-)model that initialises it."""
        chain: list[tuple[PreTrainedModel, nn.Module]] = [(self.model, self.model)]
        module: nn.Module = self.model
        for part in path.split(".") if path else ():
            module = module.get_submodule(part)
            chain.append((module if isinstance(module, PreTrainedModel) else chain[-1][0], module))
        return chain[::-1]
