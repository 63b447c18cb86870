"""The state that a training resumes from: trained weights and moments, in commits that say what they belong to."""

from pathlib import Path
from typing import Any

import torch

from common.communication import broadcast_from_rank0
from common.errors import UserError
from common.models.structure import decayed_parameters
from fcdp.checkpoint.commits import ShardedCheckpoints
from fcdp.checkpoint.shard_files import Manifest
from fcdp.model.model import ClusterModel


class TrainingCheckpoints(ShardedCheckpoints):
    """The commits of one training. Making it is collective, and keeps other runs out until :meth:`close`."""

    def __init__(self, directory: Path, model: ClusterModel, optimizer: torch.optim.Optimizer, dtype: str):
        super().__init__(directory)
        self._model, self._optimizer = model, optimizer
        adapters = model.adapters
        self._identity = {  # what must be equal in a run and in the one that resumes it, by name in messages
            "model type": model.config.model_type,
            "parameters": sum(parameter.numel() for parameter in model.meta.parameters()),
            "--dtype": dtype,
            "adapters": None if adapters is None else adapters.described,
            "parameters with weight decay": len(decayed_parameters(model.module)),
        }
        broadcast_from_rank0(self.lock)

    def commit(self, step: int, skipped: int, user_state: dict[str, Any]) -> None:
        """Commit the state of all ranks after ``step``, ``skipped`` of which changed nothing, and the caller's JSON.

        Collective; on return it is on the drives.
        """
        self.save(step, self.state(), {**self._identity, "user": user_state, "skipped": skipped})

    def resume(self) -> Manifest:
        """Read the newest commit, made by any number of ranks, into model and optimizer. Collective."""
        manifest = self.read_newest()
        if manifest is None:
            raise UserError(f"Nothing to resume: there is no commit in {self.directory}.")
        saved, model = manifest.description, self._model
        for name, now in self._identity.items():
            if saved.get(name, now) != now:
                raise UserError(
                    f"The run in {self.directory} has {name} {saved.get(name)}, and this one {now}. Give what it began "
                    "with, or begin a new run in another directory."
                )
        if model.adapters is not None:  # frozen weights are no part of a commit
            model.load()
        self.load(manifest, self.state())
        for name, value in model.source.read_buffers():
            model.module.get_buffer(name).copy_(value)
        for _, parameter in model.trained():
            self._optimizer.state[parameter]["step"].fill_(manifest.step - saved["skipped"])
        return manifest

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that changes: trained parameters and moments. Data and dropout follow from the step's number."""
        state = {}
        for name, parameter in self._model.trained():
            moments = self._optimizer.state[parameter]
            state[f"master.{name}"] = parameter.detach()
            state[f"mean.{name}"] = moments["exp_avg"]
            state[f"variance.{name}"] = moments["exp_avg_sq"]
        return state
