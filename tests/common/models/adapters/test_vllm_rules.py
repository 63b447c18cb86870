"""What vLLM's LoRA loader requires of an adapter directory, checked here on ours. vLLM itself is not run.

The rules are those of its vllm/lora/{peft_helper,lora_model,utils}.py as of 2026 (which refuse what they cannot serve),
written again from what they say: which settings are read and refused, how tensors are named, which modules they may
belong to, and what a rank and a scaling are where patterns report it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftConfig
from safetensors import safe_open
from torch import nn

from common.models.adapters.adapters import Adapters
from common.models.adapters.options import CONFIG, WEIGHTS, AdapterOptions
from common.models.meta_model import build_meta_model
from tests.helpers.twin import tiny_configs

LARGEST_RANK = 16
"""``--max-lora-rank`` of vLLM by default."""

REFUSED = (
    "modules_to_save", "use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora",
    "use_qalora", "trainable_token_indices",
)  # fmt: skip
"""Settings that must be absent, null, false or empty."""

TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<rows>[AB]))"
)


def pattern_value(patterns: dict[str, float], module: str, default: float) -> float:
    """Of the first pattern that is the end of a module's name, from a dot on."""
    found = (value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module))
    return next(found, default)


def read(directory: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """Factors A and B and the scaling of every adapted module.

    Raises:
        ValueError: vLLM would not load this.
    """
    config = json.loads((directory / CONFIG).read_text())
    missing = {"r", "lora_alpha", "target_modules"} - config.keys()
    refused = [name for name in REFUSED if config.get(name)]
    init = config.get("init_lora_weights", True)
    ranks = [config.get("r", 0), *(config.get("rank_pattern") or {}).values()]
    if (
        missing
        or refused
        or config.get("bias", "none") != "none"
        or max(ranks) > LARGEST_RANK
        or min(ranks) < 1
    ):
        raise ValueError(f"settings: {missing}, {refused}, bias {config.get('bias')}, ranks {ranks}")
    if isinstance(init, str) and init not in ("gaussian", "orthogonal"):
        raise ValueError(f"init_lora_weights {init}")
    factors: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(directory / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no dictionary
            match = TENSOR.fullmatch(name)
            if match is None:
                raise ValueError(f"tensor {name}")
            factors.setdefault(match["module"], {})[match["linear"] or match["rows"]] = file.get_tensor(name)
    result = {}
    for module, pair in factors.items():
        rank = pattern_value(config.get("rank_pattern") or {}, module, config["r"])
        alpha = pattern_value(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != rank or pair["B"].shape[1] != rank:
            raise ValueError(f"{module}: {[tuple(factor.shape) for factor in pair.values()]} for rank {rank}")
        result[module] = pair["A"], pair["B"], alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return result


def write(
    family: str, config: PeftConfig, directory: Path
) -> tuple[Adapters, dict[str, torch.Tensor], nn.Module]:
    """An adapter directory with values that are not zero; and the model as it was."""
    base = build_meta_model(tiny_configs()[family], dtype=torch.float32)
    adapters = Adapters(build_meta_model(tiny_configs()[family], dtype=torch.float32), config, seed=3)
    generator = torch.Generator().manual_seed(1)
    values = {
        name: torch.randn(adapters.model.get_parameter(name).shape, generator=generator)
        for name in adapters.trainable_names
    }
    adapters.save(directory, values)
    return adapters, values, base


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "make"), [
    ("llama", AdapterOptions(16).peft_config),
    ("llama", AdapterOptions(3, alpha=5, rslora=True, dropout=0.1, targets=("q_proj", "down_proj")).peft_config),
    ("gemma3", lambda: LoraConfig(r=4, target_modules="all-linear", rank_pattern={"q_proj": 2},
                                  alpha_pattern={"layers.1.mlp.up_proj": 3}, init_lora_weights="gaussian")),
    ("gpt2", lambda: LoraConfig(r=4, target_modules="all-linear", fan_in_fan_out=True)),
    ("llama-tied", lambda: LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])),
])  # fmt: skip
def test_what_it_reads_is_what_was_trained(
    family: str, make: Callable[[], PeftConfig], tmp_path: Path
) -> None:
    """Names lead to modules of the model as it was, and the weights that vLLM would serve are the merged ones."""
    adapters, values, base = write(family, make(), tmp_path)
    found = read(tmp_path)
    assert len(found) == len(adapters.layers) and len(values) == 2 * len(found)
    zeros = {
        name: torch.zeros(adapters.model.get_parameter(name).shape)
        for name in adapters.base_names
        if ".base_layer.weight" in name
    }
    merged = adapters.merge({**zeros, **values})
    for module, (a, b, scaling) in found.items():
        weight = base.get_submodule(module).get_parameter("weight")
        served = scaling * (b @ a)
        transposed = served.shape != weight.shape or family == "gpt2" or module.endswith("embed_tokens")
        torch.testing.assert_close(served.T if transposed else served, merged[f"{module}.weight"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "said"), [
    (AdapterOptions(4, dora=True).peft_config, "use_dora"),
    (AdapterOptions(32).peft_config, "ranks"),
    (lambda: LoraConfig(r=4, target_modules=["q_proj"], bias="all"), "bias all"),
])  # fmt: skip
def test_what_it_rejects(make: Callable[[], PeftConfig], said: str, tmp_path: Path) -> None:
    """As docs/limits.md says; merge these."""
    write("llama", make(), tmp_path)
    with pytest.raises(ValueError, match=said):
        read(tmp_path)
