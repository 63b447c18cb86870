"""Which parameters are gathered together: the units of a model, and in each the frozen apart from the trainable.

FSDP2 gathers and reduces what one ``fully_shard`` call finds unclaimed. One trainable parameter makes its whole group
dirty after each step, so frozen and trainable ones never share a group unless one module owns both. Adapters are many
and small: those of a block form one group."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@dataclass(eq=False)
class ParameterGroup:
    """Parameters that one ``fully_shard`` call takes."""

    name: str  # name in messages
    modules: list[nn.Module]  # modules that ``fully_shard`` is called with
    places: list[tuple[nn.Module, str]]  # owning module and attribute of each parameter; tied ones once
    unit: int  # index of the first unit of the model's forward pass that uses the group
    dirty: bool = True  # whether the cache is older than the parameters. Always equal on all ranks.
    # of this rank's part when the cache was filled (CUDA)
    fingerprint: torch.Tensor | None = field(default=None, repr=False)
    kept_after_forward: bool = False  # whether the backward pass gathers it no second time
    cell_numel: int = 0  # elements of one rank's part, padded as FSDP2 does
    cell_bytes: int = 0  # bytes of one rank's part in compute precision
    mixes_dtypes: bool = False  # gathered in several dtypes, as plain bytes
    reduced_cell_bytes: int = 0  # bytes of one rank's part of the gradients in reduce precision
    had_trainable: bool = False  # whether any parameter required a gradient when FSDP2 last looked
    versions: list[tuple[int, int]] | None = None  # when last looked at; see :func:`fcdp.fsdp2.versions`

    def notice(self, versions: list[tuple[int, int]]) -> None:
        """Mark the group as dirty if its parameters have other versions than when this was last called."""
        self.dirty = self.dirty or (self.versions is not None and versions != self.versions)
        self.versions = versions

    def registered(self) -> Iterator[nn.Parameter]:
        """Yield the parameters as they are registered now: sharded, or unsharded between gather and release."""
        for owner, name in self.places:
            parameter = owner._parameters.get(name)
            if parameter is not None:
                yield parameter

    def owners(self) -> list[nn.Module]:
        return list({id(owner): owner for owner, _ in self.places}.values())

    @property
    def holder(self) -> FSDPModule:
        """The module on which FSDP2 keeps the group's state, once it is sharded."""
        return cast(FSDPModule, self.modules[0])

    @property
    def trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.registered())


class Unit(NamedTuple):
    """A part of the model whose parameters are gathered while it computes: an embedding, a block, a head, the rest."""

    name: str
    module: nn.Module
    # Whether the backward pass needs it at once, so that FSDP2 should not release it
    keep_after_forward: bool = False


def find_units(model: nn.Module, blocks: list[nn.Module] | None = None) -> list[Unit]:
    """Return the units in the order of the forward pass; the last is the model, for what no other unit holds.

    ``blocks`` are the modules that are units; None: the elements of every outermost ``nn.ModuleList``."""
    names = {id(module): name for name, module in model.named_modules()}
    if blocks is None:
        blocks = list(_outermost_list_elements(model))
    blocks = [block for block in blocks if any(True for _ in block.parameters())]
    units = [Unit(names[id(block)], block) for block in blocks]
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    embedding = _module_of(model, "get_input_embeddings")
    head = _module_of(model, "get_output_embeddings")
    outer = [module for module in (embedding, head) if module is not None]
    owned = [{id(parameter) for parameter in module.parameters()} for module in outer]
    shared = set.intersection(*owned) if len(owned) == 2 else set()
    for module, parameters in zip(outer, owned, strict=True):
        # A tied head needs its weight at both ends of the model: it stays with the root, which is always there.
        if not parameters or parameters & (shared | in_blocks) or module is model:
            continue
        unit = Unit(names[id(module)], module, keep_after_forward=module is head)
        units.insert(0, unit) if module is embedding else units.append(unit)
    return [*units, Unit("", model, keep_after_forward=True)]


def gathered_again(groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """Return those of ``groups`` that are gathered in the backward pass, too: not those that stay gathered, and of
    units before the first trainable one only the last, which FSDP2 fetches ahead."""
    # An embedding is used first, also where it is tied to the head, in the last unit.
    first = [
        0 if any(isinstance(owner, nn.Embedding) for owner in group.owners()) else group.unit
        for group in groups
        if group.trainable
    ]
    begin = min(first, default=0) - 1
    return [group for group in groups if not group.kept_after_forward and group.unit >= begin]


def split_units(units: list[Unit], apart: bool = True) -> list[ParameterGroup]:
    """Return the groups in the order in which ``fully_shard`` must take them: inner before outer, adapters first.

    ``apart``: frozen parameters apart from trainable ones; else one group per unit, as plain FSDP2 has them."""
    claimed: set[int] = set()
    groups: list[ParameterGroup] = []
    for index, unit in enumerate(units):
        name = unit.name or "root"
        modules = [unit.module]
        if apart:
            groups += split_modules(name, modules, claimed, index, units[-1].module)
        else:
            groups += _claim(name, modules, modules, claimed, index)
    return groups


def split_modules(
    name: str, modules: list[nn.Module], claimed: set[int], unit: int, model: nn.Module
) -> list[ParameterGroup]:
    """Return the groups of what ``modules`` hold and is not in ``claimed``, which grows: one, or up to three if
    mixed."""
    groups = []
    owners = [
        owner
        for module in modules
        for owner in _trainable_owners(module)
        if any(parameter.requires_grad and id(parameter) not in claimed for parameter in owner.parameters())
    ]
    left = (
        parameter for module in modules for parameter in module.parameters() if id(parameter) not in claimed
    )
    if owners and any(not parameter.requires_grad for parameter in left):
        groups += _mixed_groups(name, owners, claimed, unit, model)
    return groups + _claim(name, modules, modules, claimed, unit)


def _mixed_groups(
    name: str, owners: list[nn.Module], claimed: set[int], unit: int, model: nn.Module
) -> list[ParameterGroup]:
    """Return a group of what ``owners`` hold, after a group of the frozen modules below them and the modules tied to
    these, which ``fully_shard`` would take into the first one otherwise."""
    below = [
        module
        for owner in owners
        for module in owner.modules()
        if module is not owner and _own(module) and not any(p.requires_grad for p in _own(module).values())
    ]
    below = [module for module in below if _unclaimed([module], claimed)]
    below += [holder for module in below for holder in _sharing(module, model) if holder not in below]
    groups = _claim(f"{name}/frozen", below, _outermost(below), claimed, unit)
    return groups + _claim(f"{name}/trainable", owners, _outermost(owners), claimed, unit)


def _trainable_owners(module: nn.Module) -> list[nn.Module]:
    """Return modules at or below ``module`` that own trainable parameters, and are called, so that hooks fire."""
    owners: dict[int, nn.Module] = {}
    parents = {id(child): parent for parent in module.modules() for child in parent.children()}
    for candidate in module.modules():
        if any(p.requires_grad for p in _own(candidate).values()):
            while isinstance(candidate, nn.ParameterList | nn.ParameterDict) and id(candidate) in parents:
                candidate = parents[id(candidate)]
            owners[id(candidate)] = candidate
    return list(owners.values())


def _sharing(module: nn.Module, model: nn.Module) -> list[nn.Module]:
    ids = {id(parameter) for parameter in _own(module).values()}
    return [
        m
        for m in model.modules()
        if m is not module and ids & {id(parameter) for parameter in _own(m).values()}
    ]


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}


def _unclaimed(modules: list[nn.Module], claimed: set[int]) -> list[tuple[nn.Module, str]]:
    """Return the places of parameters in ``modules`` that no group has yet, each parameter once."""
    seen = set(claimed)
    places = []
    for top in modules:
        for module in top.modules():
            for name, parameter in _own(module).items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    places.append((module, name))
    return places


def _claim(
    name: str, modules: list[nn.Module], holders: list[nn.Module], claimed: set[int], unit: int
) -> list[ParameterGroup]:
    """Return a group of what ``modules`` hold and no group has yet, which it claims; none if they hold nothing."""
    places = _unclaimed(modules, claimed)
    if not places:
        return []
    group = ParameterGroup(name, holders, places, unit)
    claimed.update(id(parameter) for parameter in group.registered())
    group.had_trainable = group.trainable
    return [group]


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not below another one of them, each once, in order."""
    below = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    return list({id(module): module for module in modules if id(module) not in below}.values())


def _outermost_list_elements(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _outermost_list_elements(child)


def _module_of(model: nn.Module, getter: str) -> nn.Module | None:
    """Return what a Hugging Face model's ``getter`` does; None where it has none, or for another model."""
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return module if isinstance(module, nn.Module) else None
