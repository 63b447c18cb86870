"""PEFT adapters on a model whose weights are not in memory.

``peft`` itself injects them, decides their names, and draws their initial values; here it does so on the meta device,
to which it moves what it has drawn, layer by layer. So nothing large is made, and the random numbers are those of
``peft.get_peft_model`` on the real model. A layer's are drawn again when they are needed.
"""

import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from common.errors import UserError, on_one_line
from common.hub import snapshot_name
from common.models.adapters.default_targets import has_routed_experts, settle_targets
from common.models.adapters.gguf_adapter import FILE as GGUF
from common.models.adapters.gguf_adapter import GgufAdapter
from common.models.adapters.options import (
    ALL_LINEAR,
    BASE,
    CONFIG,
    CONFIG_DIGEST,
    WEIGHTS,
    SavedAdapter,
    check_supported,
    config_digest,
)
from common.models.adapters.targets import (
    named_targets,
    near_targets,
    possible_targets,
    refuse_copies_by_the_way,
    refuse_overlooked,
    refuse_unknown_copies,
    refuse_unknown_targets,
    refuse_unmatched,
    refuse_unmatched_parameters,
    separate_tied_rows,
    target_fused_experts,
    trained_copies,
)
from common.models.checkpoint.compressed.parameters import Components
from common.models.checkpoint.gguf import source_of
from common.models.checkpoint.sources import WeightSource
from common.models.checkpoint.writer import (
    CHAT_TEMPLATE,
    NonFiniteWeights,
    copy_tokenizer_files,
    first_nonfinite,
    make_staging_folder,
    move_into_place,
    refuse_shadowing,
    save_tensors,
)
from common.randomness import own_random_numbers
from common.store.errors import described

# Name of the folder inside an adapter directory for the model with these adapters merged into it
MERGED = "merged"


class Adapters:
    """Adapters that have been injected into a model; ``model`` is changed in place and used from then on.

    Args:
        model: from :func:`common.models.meta_model.build_meta_model`, in the dtype that its weights compute in.
        config: the method's configuration. Filled in as ``peft`` does.
        seed: chooses the initial values: those of ``torch.manual_seed(seed); peft.get_peft_model(model, config)``.
        draw: whether to find out what the initial values are, which takes minutes where every expert of a large mixture
            has adapters; if not, only names and shapes are known afterwards, for a plan.
        saved: an adapter of this configuration to begin with, whose values then are the initial ones.

    Attributes:
        model: the adapted model. Its weights are frozen and on the meta device, as are those of the adapters, which
            are fp32 in any model (``peft``'s own rule).
        names: names of the adapters' parameters, in the model's order.
        base_names: the name of every other parameter before adapters were injected, by its name now.
        unties: whether merging gives different values to parameters that the model ties.
        buffer_names: the name of every buffer now, by its name before.
        base: identity of the weights that they are trained on (:func:`weights_identity`), which is saved with them;
            empty if that is not known.

    Raises:
        UserError: the configuration or the saved adapter does not fit the model, or cannot be trained here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: PeftConfig,
        seed: int,
        draw: bool = True,
        saved: SavedAdapter | None = None,
    ) -> None:
        check_supported(config)
        assert isinstance(config, LoraConfig)
        self.model = model
        self.config = config
        self.base = ""
        self._config = model.config
        self._prefix = model.base_model_prefix
        if config.task_type == TaskType.CAUSAL_LM and not hasattr(model, "prepare_inputs_for_generation"):
            config.task_type = None  # of a classifier: peft would look for what a model generates with
        texts = TaskType.SEQ_2_SEQ_LM if model.config.is_encoder_decoder else TaskType.CAUSAL_LM
        writes_text = hasattr(model, "prepare_inputs_for_generation")
        if writes_text and config.task_type not in (None, texts, TaskType.CAUSAL_LM):
            raise UserError(
                f"The adapter configuration has task_type {TaskType(config.task_type).value}, and "
                f"{type(model).__name__} writes text: leave task_type out, or give the --objective that it is for."
            )
        self._dtype = model.dtype
        before: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            before.setdefault(id(parameter), []).append(name)
        modules = [name for name, _ in model.named_modules()]
        self._possible = possible_targets(model)
        with nullcontext() if saved is None else saved.fitting(type(model).__name__):
            refuse_unknown_copies(modules, config)
        settle_targets(model, config)
        requested = set(config.target_parameters or ())
        target_fused_experts(model, config)
        buffers = dict(model.named_buffers(remove_duplicate=False))
        with (
            _generator_states() as states,
            nullcontext() if saved is None else saved.fitting(type(model).__name__),
        ):
            self._wrapped = self._inject(seed, on_meta=not draw or saved is not None)
        layers = ((path, layer) for path, layer in model.named_modules() if layer in states)
        self._first_draws = {path: _FirstDraw.of(layer, states[layer]) for path, layer in layers}
        # All names of every other parameter before, by its names now, by the first of them.
        self._aliases: dict[str, dict[str, str]] = {}
        now: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in before:
                now.setdefault(id(parameter), []).append(name)
        for identity, names in now.items():  # modules stay in order, so tied names do
            self._aliases[names[0]] = dict(zip(names, before[identity], strict=True))
        self.base_names = {name: aliases[name] for name, aliases in self._aliases.items()}
        if config.modules_to_save:  # to which peft adds its names of heads each time
            config.modules_to_save = sorted(set(config.modules_to_save))
        with nullcontext() if saved is None else saved.fitting(type(model).__name__):
            refuse_unknown_targets(modules, self._possible, config)
        if saved is None:
            tuner: Any = self._wrapped.base_model
            names = [*modules, *(name for names in before.values() for name in names)]
            refuse_copies_by_the_way(modules, config)
            refuse_unmatched_parameters(requested, tuner.targeted_parameter_names)
            adapted = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
            refuse_unmatched(names, adapted, config)
            refuse_overlooked(adapted, tuner.targeted_parameter_names, config)
        buffers_now = {id(buffer): name for name, buffer in model.named_buffers()}
        self.buffer_names = {name: buffers_now[id(buffer)] for name, buffer in buffers.items()}
        ties = {
            alias: first for first, aliases in self._aliases.items() for alias in aliases if len(aliases) > 1
        }
        shared = separate_tied_rows(model)
        # What a parameter begins as a copy of: a name now, and rows; None: all
        self._copied = trained_copies(model)
        # A tied weight that one of its modules adapts: the others use it as it is, or with other adapters.
        self._adapted_ties = {
            layer: first
            for alias, first in ties.items()
            for layer in self.layers
            if alias.startswith(f"{layer}.") and layer not in shared
        }
        self.unties = bool(self._adapted_ties)
        self.names = tuple(name for name, _ in model.named_parameters() if name not in self.base_names)
        self._saved, self._saved_names = saved, {} if saved is None else self._names_in(saved)

    @property
    def trainable_names(self) -> tuple[str, ...]:
        """Names of what is trained: the adapters, and with ``bias = "all"`` or ``"lora_only"`` the model's biases."""
        return tuple(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)

    @property
    def trained_count(self) -> int:
        """Number of trained elements."""
        return sum(self.model.get_parameter(name).numel() for name in self.trainable_names)

    @property
    def where(self) -> str:
        """What is adapted, by the last names of modules and fused experts, in words."""
        tuner: Any = self._wrapped.base_model
        adapted = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
        names = ", ".join(sorted({name.rpartition(".")[2] for name in adapted}))
        if not has_routed_experts(self.model) or any(".experts." in f".{name}." for name in adapted):
            return names
        return f"{names} (--lora-targets {ALL_LINEAR} adapts routed experts, too)"

    @cached_property
    def own_names(self) -> tuple[str, ...]:
        """Names of what does not begin as the model's weights do: the adapters, and biases of a saved adapter."""
        return tuple(
            name for name in self.trainable_names if name in self._saved_names or name not in self.base_names
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the adapted modules, and of those that are trained as a whole next to them."""
        kinds = BaseTunerLayer | ModulesToSaveWrapper
        return tuple(name for name, module in self.model.named_modules() if isinstance(module, kinds))

    @property
    def described(self) -> dict[str, Any]:
        """The configuration for JSON, without fields that have ``peft``'s defaults."""
        defaults = type(self.config)().to_dict()
        changed = {key: value for key, value in self.config.to_dict().items() if value != defaults.get(key)}
        for key in ("base_model_name_or_path", "inference_mode", "auto_mapping", "peft_version"):
            changed.pop(key, None)
        result: dict[str, Any] = json.loads(json.dumps(changed, default=sorted, sort_keys=True))
        return result

    @cached_property
    def gguf(self) -> GgufAdapter:
        """The adapters as llama.cpp has them."""
        names = {now: before for aliases in self._aliases.values() for now, before in aliases.items()}
        return GgufAdapter(self.model, self._config, self._prefix, names, self.trainable_names)

    def source(self, weights: WeightSource) -> WeightSource:
        """Return a source of ``weights`` (of the model before) and the adapters' initial values, by their names now."""
        return _AdaptedSource(self, weights)

    def initial_value(self, name: str, weights: WeightSource) -> torch.Tensor:
        """Return the initial value of a parameter in :attr:`own_names`, in its dtype."""
        if self._saved is not None:
            return self._saved.read(self._saved_names[name]).to(self.model.get_parameter(name).dtype)
        if name in self._copied:
            original, rows = self._copied[name]
            first = next(name for name, aliases in self._aliases.items() if original in aliases)
            ((_, weight),) = weights.read([self.base_names[first]])
            return weight if rows is None else weight[rows]
        path, prefix, factor = name.rpartition(".lora_")
        layer: Any = self.model.get_submodule(path)
        factors = self._first_draws[path].repeat(layer, self.config.init_lora_weights)
        if (value := factors.get(f"{prefix[1:]}{factor}")) is not None:
            return value
        # DoRA's magnitude is a norm of the adapted weight, and is made when that is read.
        (adapter,) = layer.lora_magnitude_vector
        ((_, weight),) = weights.read([self.base_names[f"{path}.base_layer.weight"]])
        lora_a, lora_b = (value.to(self._dtype) for value in factors.values())  # dense layers' or embeddings'
        # As peft.tuners.lora.dora.DoraLinearLayer.update_layer, in the model's dtype.
        norm = layer.lora_magnitude_vector[adapter].get_weight_norm(
            weight.to(self._dtype), lora_b @ lora_a, layer.scaling[adapter]
        )
        return norm.to(layer.lora_magnitude_vector[adapter].weight.dtype)

    def check_saved(self, weights: WeightSource) -> None:
        """See whether weights that a saved adapter holds in addition are those of the model that it is given to.

        ``peft`` saves whole embeddings where their layers are adapted, in case there are new tokens in them.

        Raises:
            UserError: they are others.
        """
        if self._saved is None:
            return
        trained = set(self.own_names)
        untrained = {
            self.base_names[name]: stored for name, stored in self._saved_names.items() if name not in trained
        }
        for before, value in weights.read(list(untrained)):
            stored = untrained[before]
            if not torch.equal(self._saved.read(stored).to(self._dtype), value.to(self._dtype)):
                raise UserError(
                    f"--adapter {self._saved.directory} holds {stored} with other values than the weights that it is "
                    "to adapt: give the --model that it was made for."
                )

    def save(
        self,
        directory: Path,
        values: Mapping[str, torch.Tensor],
        allow_nonfinite: bool = False,
        checkpoint: Path | None = None,
    ) -> None:
        """Write an adapter directory, for ``PeftModel.from_pretrained`` (and for vLLM's and others' LoRA loaders).

        Args:
            directory: made if it does not exist; an adapter in it is replaced.
            values: all trained parameters, by name in the model.
            allow_nonfinite: whether they may hold NaNs and infinities.
            checkpoint: directory of the adapted model, which is named, and whose tokenizer is copied.

        Raises:
            NonFiniteWeights: they do, and may not; the directory is left as it was.
        """
        if not allow_nonfinite and (name := first_nonfinite(values)) is not None:
            raise NonFiniteWeights(name)
        refuse_shadowing(
            directory, "config.json", "transformers would load weights that the adapter was not made for"
        )
        state = self._as_peft_saves(values)
        folder = make_staging_folder(directory)
        replaced = [directory / CONFIG, directory / GGUF]  # an older adapter's may not fit the new weights
        if not self.gguf.obstacle:
            with described("writing", folder / GGUF):
                self.gguf.write(folder / GGUF, values)
        if checkpoint is not None:
            base = source_of(checkpoint) or checkpoint.absolute()
            self.config.base_model_name_or_path = snapshot_name(checkpoint) or str(base)
            copy_tokenizer_files(checkpoint, folder)
            replaced.append(directory / CHAT_TEMPLATE)  # it would win over that in tokenizer_config.json
        self.config.inference_mode = True
        try:
            with described("writing", folder / CONFIG):
                self.config.save_pretrained(str(folder))
        finally:
            self.config.inference_mode = False
        metadata = {CONFIG_DIGEST: config_digest(folder / CONFIG) or "", BASE: self.base}
        save_tensors(folder / WEIGHTS, state, **{key: value for key, value in metadata.items() if value})
        move_into_place(directory, replaced, last=[WEIGHTS, CONFIG])

    def merge(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return weights with their adapters added, under the names that they had before.

        Args:
            values: parameters on the CPU, those of a :meth:`merge_group` at a time: the weights and all their adapters.
                The weights are changed in place.
        """
        values = dict(values)
        if self.unties:  # peft would add the adapters of one module to the weight that both use
            for name in [name for name in values if name in self.base_names]:
                values |= {alias: values[name].clone() for alias in self._aliases[name] if alias != name}
        layers = [
            layer
            for path, layer in self.model.named_modules()
            if isinstance(layer, BaseTunerLayer) and any(name.startswith(f"{path}.") for name in values)
        ]
        for layer in layers:
            if (
                getattr(self.config, "lora_bias", False)
                and getattr(layer.get_base_layer(), "bias", None) is None
            ):
                raise UserError(
                    "The adapters have biases (lora_bias), and the model's layers have none to merge them into: use "
                    "them as adapters, with peft."
                )
        meta = {name: self.model.get_parameter(name) for name in values}
        try:
            for name, value in values.items():
                _set_parameter(self.model, name, nn.Parameter(value, requires_grad=False))
            for layer in layers:
                layer.merge()
            before = {alias: old for aliases in self._aliases.values() for alias, old in aliases.items()}
            merged = {
                before[name]: self.model.get_parameter(name).detach() for name in values if name in before
            }
            copies = {name: values[name] for name in values if self._copied.get(name, ("", ()))[1] is None}
            return merged | {before[self._copied[name][0]]: value for name, value in copies.items()}
        finally:
            for layer in layers:
                layer.merged_adapters.clear()
            for name, parameter in meta.items():
                _set_parameter(self.model, name, parameter)

    def merge_group(self, name: str) -> str:
        """Return a key that is the same for all parameters that have to be merged in one call, by their names now."""
        layer = next((layer for layer in self.layers if name.startswith(f"{layer}.")), name)
        return self._adapted_ties.get(layer, layer)

    def _as_peft_saves(
        self, values: Mapping[str, torch.Tensor], embeddings: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return values by the names that they have in an adapter's file."""
        state: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self._wrapped,
            {f"base_model.model.{name}": value for name, value in values.items()},
            save_embedding_layers=embeddings,
        )
        return state

    def _names_in(self, saved: SavedAdapter) -> dict[str, str]:
        """Return the names that a saved adapter has for parameters of the model, by their names now."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        trained = {name: parameters[name] for name in self.trainable_names}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        expected = self._as_peft_saves(trained)
        everything = self._as_peft_saves(parameters, embeddings=True)
        saved.check(
            *({name: value.shape for name, value in state.items()} for state in (expected, everything))
        )
        return {names[id(everything[stored])]: stored for stored in saved.files}

    def _inject(self, seed: int, on_meta: bool) -> PeftModel:
        try:
            with own_random_numbers(seed), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that fan_in_fan_out is set where a family needs it
                return get_peft_model(self.model, self.config, low_cpu_mem_usage=on_meta)
        except (ValueError, LookupError, TypeError, RuntimeError, NotImplementedError) as error:
            reason = on_one_line(error)
            if reason.startswith("Target module ") and "is not supported" in reason:
                # It prints all that the module holds
                reason = f"{reason.partition('(')[0]} is not supported."
            raise UserError(
                f"peft cannot adapt this {type(self.model).__name__}: {reason}{self._near(error)}"
            ) from error

    def _near(self, error: Exception) -> str:
        if ParamWrapper.__name__ in str(error):
            return (
                " This model's experts are fused into single parameters, which cannot have it: leave it out, or name "
                "other layers with --lora-targets."
            )
        targets = named_targets(self.config)
        unknown = sorted(targets - set(self._possible))
        return f" {near_targets(unknown[0], self._possible)}" if unknown else ""


class _AdaptedSource(WeightSource):
    """A source of an adapted model. Buffers are read before adapters change the modules' names."""

    def __init__(self, adapters: Adapters, weights: WeightSource) -> None:
        self._adapters = adapters
        self._weights = weights
        self._own = frozenset(adapters.own_names)

    def check(self) -> None:
        self._weights.check()

    def read_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._weights.read_buffers()

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        base = self._adapters.base_names
        extra = self._own
        now = {base[name]: name for name in names if name not in extra}
        for before, value in self._weights.read(list(now)):
            yield now[before], value
        for name in names:
            if name in extra:
                yield name, self._adapters.initial_value(name, self._weights)

    def reads_rows(self, name: str) -> bool:
        return name not in self._own and self._weights.reads_rows(self._adapters.base_names[name])

    def read_rows(self, name: str, first: int, stop: int) -> torch.Tensor:
        return self._weights.read_rows(self._adapters.base_names[name], first, stop)

    def read_compressed(self, name: str, parts: Sequence[int] | None = None) -> Iterator[Components]:
        return self._weights.read_compressed(self._adapters.base_names[name], parts)


@contextmanager
def _generator_states() -> Iterator[dict[nn.Module, torch.Tensor]]:
    """Collect the state of PyTorch's generator (5 kB) from which each layer of adapters draws its factors."""
    states: dict[nn.Module, torch.Tensor] = {}

    def add(parent: nn.Module, name: str, _: nn.Module | None) -> None:
        if isinstance(parent, LoraLayer) and name == "lora_A":  # registered before anything is drawn
            states[parent] = torch.get_rng_state()

    handle = nn.modules.module.register_module_module_registration_hook(add)
    try:
        yield states
    finally:
        handle.remove()


@dataclass(frozen=True)
class _FirstDraw:
    """What is needed to draw a layer's factors again, also when these are sharded or elsewhere."""

    state: torch.Tensor  # State of PyTorch's generator
    base_dtype: torch.dtype  # Dtype of the adapted weight
    factors: dict[str, nn.Module | nn.Parameter]  # The factors on the meta device, by the layer's attribute

    @classmethod
    def of(cls, layer: Any, state: torch.Tensor) -> "_FirstDraw":
        base = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
        (adapter,) = layer.r
        kinds = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
        factors = {kind: getattr(layer, kind)[adapter] for kind in kinds if adapter in getattr(layer, kind)}
        return cls(state, base.dtype, copy.deepcopy(factors))

    def repeat(self, layer: Any, initialization: bool | str) -> dict[str, torch.Tensor]:
        """Return the factors' values by their names in the layer, drawn in the order of ``LoraLayer.update_layer``."""
        (adapter,) = layer.r
        now = {kind: getattr(layer, kind)[adapter] for kind in self.factors}
        drawn: dict[str, torch.Tensor] = {}
        try:
            with own_random_numbers(), torch.no_grad():
                torch.set_rng_state(self.state)
                for kind, factor in self.factors.items():
                    if isinstance(factor, nn.Module):
                        first: Any = copy.deepcopy(factor).to_empty(device="cpu")
                        first.reset_parameters()
                    else:
                        first = nn.Parameter(torch.randn(factor.shape))
                    getattr(layer, kind)[adapter] = first
                if initialization == "orthogonal":
                    layer.orthogonal_init(adapter)
                elif initialization:
                    layer.reset_lora_parameters(adapter, initialization)
            for kind in self.factors:
                first = getattr(layer, kind)[adapter]
                parameters = first.named_parameters() if isinstance(first, nn.Module) else [("", first)]
                drawn |= {f"{kind}.{adapter}.{name}".rstrip("."): value for name, value in parameters}
        finally:
            for kind, factor in now.items():
                getattr(layer, kind)[adapter] = factor
        # peft rounds to the base weight's dtype, before it widens adapters to fp32.
        return {name: value.detach().to(self.base_dtype).float() for name, value in drawn.items()}


def _set_parameter(model: nn.Module, name: str, value: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    model.get_submodule(path)._parameters[attribute] = value
