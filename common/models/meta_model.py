"""Build a model without its weights: parameters on the meta device, buffers real."""

import copy
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from common.errors import FinetuneError, UserError
from common.models.bounds import bounded_construction, check_buffers, check_counts
from common.models.generation import generation_config_of
from common.models.structure import fp32_parameters, keeps_fp32
from common.models.task_type import config_for, model_class, refusal
from common.randomness import own_random_numbers


def build_meta_model(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
) -> PreTrainedModel:
    """Build a model in which only the buffers take memory, of the class that :mod:`common.models.task_type` finds.

    Parameters are on the meta device, tied where the configuration ties them. Buffers (rotary frequencies and the like)
    are on the CPU with the values that the class's own initialisation gives them. A *persistent* buffer that the
    family fills only from checkpoints is NaN until :meth:`CheckpointSource.read_buffers` has been copied into it.

    The model is in training mode and does not fill key-value caches. ``config`` is copied, not changed: export it, not
    ``model.config``.

    Args:
        dtype: the parameters' dtype. Buffers do not depend on it in most families, but some choose their values by it,
            so give the dtype that the model computes in.
        checkpoint: directory of its weights; a model that these cannot be the weights of is refused as soon as that
            is known.
    """
    chosen = model_class(config)
    if chosen is None:
        raise UserError(f"This {refusal(config)}.")
    config = config_for(chosen, copy.deepcopy(config))
    check_counts(config.to_dict(), f"This {config.model_type!r} configuration")
    try:
        with torch.device("meta"), bounded_construction(checkpoint):
            model = chosen._from_config(config, dtype=dtype)
    except UserError:
        raise
    except Exception as error:  # anything: each family checks its own fields in its own way
        raise UserError(
            f"transformers cannot build this {config.model_type!r} configuration: {error}"
        ) from error
    model.tie_weights()  # transformers 5.0 does not do it on the meta device
    widen_kept(model)
    _fill_buffers(model)
    if model.can_generate() and model.config.name_or_path:
        model.generation_config = generation_config_of(model.config)
    # After construction, so that the generation config, which is exported, keeps the family's default.
    for part in {id(part): part for part in (model.config, model.config.get_text_config())}.values():
        part.use_cache = False
    return model.train()


def widen_kept(model: PreTrainedModel) -> None:
    """Make the parameters fp32 that the family keeps so, as ``from_pretrained`` does. Tied ones stay tied."""
    parameters = {id(model.get_parameter(name)): model.get_parameter(name) for name in fp32_parameters(model)}
    for parameter in parameters.values():
        parameter.data = parameter.data.to(torch.float32)


def _fill_buffers(model: PreTrainedModel) -> None:
    """Compute all buffers on the CPU, the way ``from_pretrained`` computes those that no checkpoint holds.

    transformers builds every model on the meta device in ``from_pretrained``, so every family's ``_init_weights``
    must be able to fill its buffers. Parameters, which are on the meta device, are marked as filled meanwhile.
    """
    check_buffers(model)
    persistent = model.state_dict().keys()
    real: dict[int, torch.Tensor] = {}  # a buffer registered in two modules stays one tensor
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in real:
                full_name = f"{path}.{name}" if path else name
                keep = full_name in persistent and buffer.is_floating_point() and keeps_fp32(model, full_name)
                unset = torch.nan if buffer.is_floating_point() else 0
                dtype = torch.float32 if keep else buffer.dtype
                real[id(buffer)] = torch.full_like(buffer, unset, dtype=dtype, device="cpu")
            setattr(module, name, real[id(buffer)])
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    with own_random_numbers():
        model.initialize_weights()
    for parameter in model.parameters():
        del parameter._is_hf_initialized  # type: ignore[attr-defined]
    for name in unset_buffers(model):
        if name not in persistent:
            raise FinetuneError(
                f"transformers' {type(model).__name__} leaves its buffer {name} uninitialised when it is built without "
                "memory for its weights. This family cannot be trained out of core with this version of transformers."
            )


def unset_buffers(model: PreTrainedModel) -> list[str]:
    """Return the names of buffers that have no values yet: only a checkpoint has them."""
    return [
        name for name, buffer in model.named_buffers() if buffer.is_floating_point() and buffer.isnan().any()
    ]
