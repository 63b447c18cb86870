"""A causal language model that the ranks of a cluster train together: what :class:`fuyou.Engine` is on one machine.

Every rank calls everything alike and gives the whole batch, of which it takes its rows. Losses and gradients are means
over all labels of the batch, so they do not depend on how many ranks there are, but for rounding.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from peft import PeftConfig
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from common.data import Documents, restarts
from common.data.rows import take_rows
from common.errors import UserError
from common.memory.meter import PeakMeter
from common.models.adapters.adapters import MERGED, Adapters
from common.models.attention.isolation import DocumentSeparator, takes_positions
from common.models.checkpoint.export import CheckpointWriter, copy_tokenizer_files
from common.models.checkpoint.sources import CheckpointSource, RandomSource, WeightSource
from common.models.flops import active_parameters, hardware_flops_per_token, model_flops_per_token
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from common.models.vision.towers import DEFAULT_FREEZING, TowerFreezing
from common.object_collectives import all_gather_object, broadcast_from_rank0
from fcdp.checkpoint.commits import ShardedCheckpoints
from fcdp.checkpoint.weights import gather_blocks, load, materialise, whole, widen
from fcdp.shard import fully_shard, sharding
from fcdp.strategy.strategy import Strategy
from fcdp.strategy.topology import Topology
from fuyou.layout.record import DTYPES, wants_decay
from fuyou.model.loss import cross_entropy, targets_of
from fuyou.model.router_loss import RouterPass, find_router_loss, switch_router_logits, wants_router_loss
from fuyou.model.streamed_model import StreamedModel
from fuyou.optimizer.adam import AdamConfig, check_learning_rate, check_max_grad_norm
from fuyou.optimizer.gradient_sum import sum_of_squares
from fuyou.optimizer.nonfinite import NonFinitePolicy

#: Largest shard of an exported checkpoint. Rank 0 holds one.
_SHARD_BYTES = 2_000_000_000


@dataclass(frozen=True)
class TrainerConfig:
    """Options of :class:`Trainer`."""

    strategy: Strategy | str = "fcdp"
    """One of the space, or how it is written; see :func:`fcdp.fully_shard`."""
    dtype: str = "bf16"
    """What blocks compute in and what crosses the network, gradients too; masters and moments are fp32."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    """For matrices only: biases and norms do not decay."""
    max_grad_norm: float | None = None
    micro_batch: int | None = None
    """Sequences that a rank computes at once; None: its whole part of the batch."""
    seed: int = 0
    """Of random weights and dropout."""
    host_cache_bytes: int | None = None
    """Per rank; see :func:`fcdp.fully_shard`."""
    device_cache_threshold: float = 0.9
    on_nonfinite: str = "stop"
    """Or ``skip``; see :mod:`fuyou.optimizer.nonfinite`."""
    towers: TowerFreezing = DEFAULT_FREEZING
    """What of a vision-language model is not trained."""
    router_loss: str = "auto"
    """Whether a mixture of experts' router loss is a part of the loss: ``auto`` (as the configuration has it), ``on``
    or ``off``. It is that of a micro-batch of all ranks together, on average over micro-batches."""

    def __post_init__(self) -> None:
        AdamConfig(betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)  # which checks them
        check_max_grad_norm(self.max_grad_norm)


@dataclass(frozen=True)
class ClusterStep:
    """One finished step, the same on every rank but for ``seconds``."""

    step: int
    loss: float
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    stop: bool
    """Whether any rank asked to stop after this step."""
    seconds: float
    sent_bytes: int
    """That a node sent to others, on average over nodes."""
    skipped: bool = False
    """Whether loss or gradient were not finite, and nothing was changed."""
    aux_loss: float | None = None
    """The router loss, not multiplied by its coefficient, where it is a part of the loss."""


class Trainer:
    """Trains ``model`` on all ranks of ``topology``. Making one is collective, and so is every method that computes.

    Blocks are recomputed in the backward pass where the family supports it.

    Args:
        model: checkpoint directory, which every node must be able to read, or a preset's name.
        commits: folder for commits, on a file system that all nodes share. No other run can use it until :meth:`close`.
        adapters: what to train instead of the weights, which are then frozen, in the compute dtype.

    Raises:
        UserError, FinetuneError: on every rank whose files are not what they should be.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        topology: Topology,
        config: TrainerConfig,
        commits: Path,
        adapters: PeftConfig | None = None,
    ):
        self._topology, self._options = topology, config
        self._nonfinite = NonFinitePolicy(config.on_nonfinite)
        self._dtype = DTYPES[config.dtype]
        self._device = topology.device
        self._meter = PeakMeter(self._pids_of_node())
        if topology.local_rank == 0:
            self._meter.start()
        self.config, self._checkpoint = load_config(model)
        self._plain = build_meta_model(self.config, dtype=self._dtype)
        wanted = wants_router_loss(self._plain, config.router_loss)
        stack = StreamedModel(self._plain, torch.device("cpu"))
        self._router_loss = find_router_loss(stack, config.router_loss) if wanted else None
        self._block_prefix, self._family = stack.block_prefix, stack.family
        self._stored = CheckpointSource(self._checkpoint, self._plain) if self._checkpoint else None
        self._source: WeightSource = self._stored or RandomSource(self._plain, config.seed)
        self._source.check()
        self._model: Any = build_meta_model(self.config, dtype=self._dtype)
        if adapters is not None:
            config.towers.without_adapters(adapters, self._model)
        self._adapters = None if adapters is None else Adapters(self._model, adapters, config.seed)
        for name in config.towers.frozen(self._model) if adapters is None else ():
            self._model.get_parameter(name).requires_grad_(False)
        switch_router_logits(self._model, self._router_loss is not None)
        widen(self._model)
        if self._model.supports_gradient_checkpointing:
            self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        fully_shard(
            self._model,
            topology,
            config.strategy,
            mp_policy=MixedPrecisionPolicy(self._dtype, self._dtype),
            device_cache_threshold=config.device_cache_threshold,
            host_cache_bytes=config.host_cache_bytes,
        )
        materialise(self._model, self._device)
        self._sharding = sharding(self._model)
        self._separator: DocumentSeparator | None = None
        self._optimizer = self._make_optimizer()
        self._commits = ShardedCheckpoints(commits)
        broadcast_from_rank0(self._commits.lock)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self.trainable_parameters = sum(parameter.numel() for _, parameter in self._trained())
        self.step_count = 0
        self.committed_step = 0
        self._is_committed = False
        self.user_state: dict[str, Any] = {}
        """JSON that is committed with every step."""

    # -- where the states come from ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Load the weights that training starts from. Commits of an earlier run go."""
        broadcast_from_rank0(self._commits.discard)
        load(self._model, self._source, self._adapters)
        self._sharding.invalidate()

    def resume(self) -> None:
        """Continue from the newest commit, whatever number of ranks made it.

        Raises:
            UserError: there is none, or it is not of this model, dtype or format.
            FinetuneError: it is damaged.
        """
        manifest = self._commits.read_newest()
        if manifest is None:
            raise UserError(f"There is nothing to continue: no commit in {self._commits.directory}.")
        step, saved = manifest.step, manifest.description
        for what, now in self._identity().items():
            if saved.get(what) != now:
                raise UserError(
                    f"The run in {self._commits.directory} has {what} {saved.get(what)}, and this one {now}. "
                    "Give what it began with, or begin a new run in another place."
                )
        if self._adapters is not None:  # frozen weights are no part of a commit
            load(self._model, self._source, self._adapters)
        self._commits.load(manifest, self._state())
        for name, value in self._source.read_buffers():
            self._model.get_buffer(name).copy_(value)
        for _, parameter in self._trained():
            self._optimizer.state[parameter]["step"].fill_(step - saved["skipped"])
        self._sharding.invalidate()
        self.step_count = self.committed_step = step
        self._is_committed = True
        self.user_state = saved["user"]
        self._nonfinite.skipped = saved["skipped"]

    def commit(self) -> None:
        """Put the state after the last step on the drives, unless it is there."""
        if self.step_count != self.committed_step or not self._is_committed:
            description = {**self._identity(), "user": self.user_state, "skipped": self._nonfinite.skipped}
            self._commits.save(self.step_count, self._state(), description)
            self.committed_step = self.step_count
            self._is_committed = True

    def _identity(self) -> dict[str, Any]:
        adapters = None if self._adapters is None else self._adapters.described
        weights = sum(parameter.numel() for parameter in self._plain.parameters())
        return {
            "model type": self.config.model_type,
            "parameters": weights,
            "--dtype": self._options.dtype,
            "adapters": adapters,
        }

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer changes: everything, or with adapters these."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def _state(self) -> dict[str, torch.Tensor]:
        """All that changes: trained parameters and moments. Data and dropout are functions of the step's number."""
        state = {}
        for name, parameter in self._trained():
            moments = self._optimizer.state[parameter]
            state[f"master.{name}"] = parameter.detach()
            state[f"mean.{name}"] = moments["exp_avg"]
            state[f"variance.{name}"] = moments["exp_avg_sq"]
        return state

    def _make_optimizer(self) -> torch.optim.AdamW:
        options = self._options
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": options.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, parameter in self._trained():
            groups[0 if wants_decay(name, parameter.shape) else 1]["params"].append(parameter)
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps, fused=True)
        for _, parameter in self._trained():  # as AdamW would at its first step: commits need a place to load to
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=self._device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return optimizer

    # -- training ---------------------------------------------------------------------------------------------------

    def train_step(self, batch: Mapping[str, torch.Tensor], lr: float, stop: bool = False) -> ClusterStep:
        """Forward, backward and update.

        Args:
            batch: ``input_ids`` and ``labels`` int64 ``[B, S]`` (as the family's own loss takes them) and
                ``position_ids`` ``[B, S]``, restarting at each document: of all ranks together, the same on each.
            lr: learning rate of this step.
            stop: this rank wishes to stop after this step: all ranks will know.

        Raises:
            NonFiniteLoss: loss or gradient is NaN or infinite, on every rank, and is not to be skipped; nothing was
                updated.
            UserError: fewer sequences than ranks, no label, documents that would see each other, or a learning rate
                that is not finite or negative.
        """
        check_learning_rate(lr)
        began, sent = time.monotonic(), self._sharding.traffic.across
        step, world, rank = self.step_count + 1, self._topology.world_size, self._topology.rank
        torch.manual_seed(((self._options.seed << 20) + step) * 65_537 % (1 << 62) + rank)
        if restarts(batch.get("position_ids")):  # on all ranks alike, whichever of them has such rows
            self._family.check_documents(masked=False)
        targets = targets_of(batch["labels"], self._family.shifts_labels)
        items = int((targets != -100).sum())
        if items == 0:
            raise UserError("No token of this batch has a label (all are -100): there is nothing to learn from it.")
        share = torch.tensor(items / world, device=self._device)  # FSDP2 averages gradients over ranks
        parts = self._split({**batch, "targets": targets})
        total, aux = torch.zeros((), dtype=torch.float64, device=self._device), 0.0
        for index, part in enumerate(parts):
            self._sharding.set_is_last_micro_batch(index == len(parts) - 1)
            with self._apart(part):  # in the backward pass, too: blocks are computed again there
                output = self._forward(part)
                loss, gradient = cross_entropy(output.logits, part["targets"], share, gradient=True)
                total += loss / world
                router = self._router_pass(part, output)
                if router is None:
                    output.logits.backward(gradient)
                    continue
                aux += router.value / len(parts)
                total += router.share / len(parts) / world
                losses = router.losses(0, output.router_logits)
                weights = [torch.full_like(one, world / len(parts)) for one in losses]  # of a mean over ranks, again
                torch.autograd.backward([output.logits, *losses], [gradient, *weights])
        loss_value, norm, stopping, all_sent = self._agree(total, stop, self._sharding.traffic.across - sent)
        try:
            skipped = self._nonfinite.should_skip_step(step, loss_value, norm, self.committed_step)
            if not skipped:
                self._update(norm, lr)
        finally:
            self._optimizer.zero_grad()  # or the next step would add to it
        self.step_count = step
        seconds, node_sent = time.monotonic() - began, int(all_sent / self._topology.nodes)
        return ClusterStep(
            step, loss_value, norm, stopping, seconds, node_sent, skipped, None if self._router_loss is None else aux
        )

    def _update(self, norm: float, lr: float) -> None:
        """Clip, and step."""
        limit = self._options.max_grad_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_(self._gradients(), limit / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does it
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    @torch.no_grad()
    def eval_loss(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Mean loss over all labels of a batch, the same on every rank; forward only, without dropout.

        Args:
            batch: as for :meth:`train_step`; at least one label.
        """
        if restarts(batch.get("position_ids")):  # on all ranks alike, whichever of them has such rows
            self._family.check_documents(masked=False)
        targets = targets_of(batch["labels"], self._family.shifts_labels)
        items = torch.tensor(int((targets != -100).sum()), device=self._device)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._model.eval()
        parts = self._split({**batch, "targets": targets})
        for part in parts:
            with self._apart(part):
                output = self._forward(part)
            total += cross_entropy(output.logits, part["targets"], items, gradient=False)[0]
            router = self._router_pass(part, output)
            if router is not None:
                total += router.share / len(parts) / self._topology.world_size
        self._model.train()
        self._sharding.reshard()  # some stay whole after a forward pass, expecting a backward pass
        dist.all_reduce(total)
        return float(total)

    def micro_batches(self, rows: int) -> int:
        """How many micro-batches every rank computes in a step of ``rows`` sequences."""
        most = math.ceil(rows / self._topology.world_size)
        return math.ceil(most / (self._options.micro_batch or most))

    def _split(self, batch: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """This rank's rows, in as many micro-batches as every rank has: collectives must match."""
        rows, world, rank = batch["input_ids"].shape[0], self._topology.world_size, self._topology.rank
        if rows < world:
            raise UserError(f"--batch-size {rows} is less than one sequence for each of {world} ranks.")
        first, last = rows * rank // world, rows * (rank + 1) // world
        count = self.micro_batches(rows)
        width = math.ceil(math.ceil(rows / world) / count)
        parts = []
        for start in range(first, first + count * width, width):
            stop = min(start + width, last)
            if start < stop:
                part = take_rows(batch, start, stop)
                part["counts"] = torch.ones_like(part["targets"])
            else:  # this rank has a sequence less than others: one more, that teaches nothing
                part = take_rows(batch, 0, 1)
                part["targets"] = torch.full_like(part["targets"], -100)
                part["counts"] = torch.zeros_like(part["targets"])
            parts.append({
                name: value.to(self._device, self._dtype if value.is_floating_point() else None, non_blocking=True)
                for name, value in part.items()
            })  # fmt: skip
        return parts

    def _forward(self, part: dict[str, torch.Tensor]) -> Any:
        """What the model returns: ``logits``, and ``router_logits`` if they are asked for."""
        left_out = {"targets", "labels", "counts"} | (set() if takes_positions(self._plain) else {"position_ids"})
        inputs = {name: value for name, value in part.items() if name not in left_out}
        return self._model(**inputs, use_cache=False)

    def _router_pass(self, part: dict[str, torch.Tensor], output: Any) -> RouterPass | None:
        """The router loss of this micro-batch of all ranks together, if the loss has one; collective then."""
        if self._router_loss is None:
            return None
        router = RouterPass(self._router_loss, [part["counts"].flatten().float()])
        router.add(0, output.router_logits or ())
        sums = torch.tensor(router.told(), dtype=torch.float64, device=self._device)
        dist.all_reduce(sums)
        router.settle([sums.tolist()])
        return router

    @contextlib.contextmanager
    def _apart(self, part: dict[str, torch.Tensor]) -> Iterator[None]:
        """Keep the documents of packed rows apart."""
        documents = Documents.of(part.get("position_ids"))
        if documents is not None and self._separator is None:
            assert self._family.isolation is not None
            self._separator = DocumentSeparator(self._model, self._family.isolation)
        with contextlib.nullcontext() if self._separator is None else self._separator.apart(documents):
            yield

    def _agree(self, loss: torch.Tensor, stop: bool, sent: int) -> tuple[float, float, bool, float]:
        """Loss and gradient norm of the whole batch, whether any rank asked to stop, and what all ranks have sent to
        other nodes: one small message."""
        copies = self._sharding.routes.replicas
        squares = sum((sum_of_squares(value.flatten()) for value in self._gradients()), loss.new_zeros(()))
        told = torch.stack([loss, squares / copies, loss.new_tensor(float(stop)), loss.new_tensor(float(sent))])
        dist.all_reduce(told)
        return float(told[0]), math.sqrt(float(told[1])), bool(told[2] > 0), float(told[3])

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's part of every gradient."""
        found = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        return [cast(DTensor, gradient).to_local() for gradient in found]

    # -- results ----------------------------------------------------------------------------------------------------

    def save_pretrained(self, directory: Path, *, merge: bool = False, allow_nonfinite: bool = False) -> None:
        """Export what was trained. All ranks gather, a block at a time; rank 0 writes.

        Without adapters, a Hugging Face checkpoint in the compute dtype; with them, an adapter directory of PEFT.

        Args:
            directory: shared by all nodes; files of the same names are replaced.
            merge: write the model with the adapters merged into it, too, in the folder :data:`MERGED` inside.
            allow_nonfinite: export tensors that hold a NaN or an infinity, too.

        Raises:
            FinetuneError: a tensor holds a NaN or an infinity; ``directory`` is as it was.
        """
        self._sharding.reshard()
        adapters = self._adapters
        if adapters is None:
            self._export(directory, gather_blocks(self._model, self._block_prefix, self._dtype), allow_nonfinite)
            return
        if merge:  # first: if it is refused, the adapters of before stay, too
            self._export(directory / MERGED, self._merged(adapters), allow_nonfinite)
        values = {name: whole(parameter).cpu() for name, parameter in self._trained()}
        broadcast_from_rank0(lambda: adapters.save(directory, values, allow_nonfinite))

    def _export(self, directory: Path, blocks: Iterator[dict[str, torch.Tensor]], allow_nonfinite: bool) -> None:
        leads, writer = self._topology.rank == 0, None
        if leads:
            writer = CheckpointWriter(
                directory, self._plain, self.config, self._dtype, _SHARD_BYTES, allow_nonfinite, self._stored
            )
        for named in blocks:
            if writer is not None:
                writer.add(named)

        def finish() -> None:
            assert writer is not None
            writer.finish()
            if self._checkpoint is not None:
                copy_tokenizer_files(self._checkpoint, directory)

        broadcast_from_rank0(finish)

    def _merged(self, adapters: Adapters) -> Iterator[dict[str, torch.Tensor]]:
        """Weights with their adapters added; on the first rank, which writes them. On others nothing."""
        for named in gather_blocks(self._model, self._block_prefix, None, adapters.layers):
            if self._topology.rank:
                yield {}
                continue
            merged = adapters.merge({name: value.cpu() for name, value in named.items()})
            yield merged if self._stored is None else adapters.changed(merged)

    def newest_commit(self) -> int | None:
        """The step that :meth:`resume` would continue from."""
        return self._commits.newest()

    # -- figures ----------------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> str:
        """Name of how the model is sharded."""
        return self._sharding.strategy.name

    def planned_sent_bytes(self, rows: int) -> float:
        """Bytes that a node sends to others in a step of ``rows`` sequences, not the first, by the formulas."""
        return self._sharding.bytes_across_nodes(self.micro_batches(rows))

    def model_flops_per_token(self, seq_len: int) -> float:
        """6 per parameter and token, 4 per frozen one, plus attention; recomputation not counted."""
        return model_flops_per_token(self._plain, seq_len) + self._adapter_flops

    def hardware_flops_per_token(self, seq_len: int) -> float:
        """The same with the recomputed forward pass counted, where there is one."""
        recomputed = self._model.supports_gradient_checkpointing
        count = hardware_flops_per_token if recomputed else model_flops_per_token
        return count(self._plain, seq_len) + self._adapter_flops

    @property
    def _adapter_flops(self) -> float:
        """Per token, on top of training all weights: adapters' own, less the gradients of frozen weights."""
        if self._adapters is None:
            return 0.0
        return 6.0 * self.trainable_parameters - 2.0 * active_parameters(self._plain, self._plain)

    @property
    def host_peak_bytes(self) -> int:
        """Most memory that the ranks of this node held together; for the first rank of a node."""
        return self._meter.peak_bytes

    @property
    def host_baseline_bytes(self) -> int:
        """The same before the model was touched."""
        return self._meter.baseline_bytes

    @property
    def device_peak_bytes(self) -> int:
        """Most device memory in use by this rank; 0 where the CPU computes."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _pids_of_node(self) -> Any:
        pids = [
            pid for node, pid in all_gather_object((self._topology.node, os.getpid())) if node == self._topology.node
        ]
        return lambda: pids

    def close(self) -> None:
        """Let go of host memory and of the commits. On every rank, before ``Topology.close()``."""
        self._commits.close()
        self._sharding.close()
        self._meter.stop()
