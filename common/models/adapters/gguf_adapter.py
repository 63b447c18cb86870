"""Write LoRA adapters as llama.cpp reads them (``llama-cli --lora``, Ollama's ADAPTER), as its own converter does.

Factors have the names of the weights in a GGUF file of the model. llama.cpp scales each product by alpha over its rank.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PreTrainedConfig

from common.models.checkpoint.gguf_table import (
    architecture_of,
    file_order,
    gguf_names,
    order_of,
    processor_of,
)

FILE = "adapter.gguf"
_EMBEDDING = "token_embd.weight"


class GgufAdapter:
    """The factors of a model's adapters by their names in a GGUF file.

    Args:
        model: the adapted model.
        config: the model's configuration.
        prefix: beginning of the names of what is below its head.
        base_names: the names of all other parameters before they were adapted, by their names now.
        trained: names of what is trained.

    Attributes:
        obstacle: why there can be none, in words; empty if there can.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PreTrainedConfig,
        prefix: str,
        base_names: Mapping[str, str],
        trained: tuple[str, ...],
    ) -> None:
        self._layers: list[tuple[str, LoraLayer, str, int]] = []
        self.obstacle = self._plan(model, config, prefix, base_names, set(trained))

    def _plan(
        self,
        model: nn.Module,
        config: PreTrainedConfig,
        prefix: str,
        base_names: Mapping[str, str],
        trained: set[str],
    ) -> str:
        """Find the weight of each adapted layer; return why it cannot be found."""
        if importlib.util.find_spec("gguf") is None:
            return "the package gguf is not installed"
        if config.get_text_config() is not config:
            return "the names of adapters in llama.cpp are known of language models alone"
        self._architecture = architecture_of(config) or ""
        if not self._architecture:
            return f"how llama.cpp stores the weights of {config.model_type} is not known here"
        fields = config.to_dict()
        processor = processor_of(self._architecture, fields)
        names = {
            name: stored
            for stored, name in gguf_names(
                self._architecture, config, base_names.values(), prefix, processor
            ).items()
        }
        for path, layer in model.named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            (adapter,) = layer.r
            factors = [f"{path}.{kind}" for kind in _factors(layer, adapter)]
            before = base_names.get(f"{path}.base_layer.weight", "")
            if before not in names or not trained.issuperset(factors):
                return f"llama.cpp has no adapters for {path}"
            if names[before] == _EMBEDDING and config.tie_word_embeddings:
                return "llama.cpp adapts embeddings as the head, too, where they are one tensor"
            order = order_of(
                processor, names[before], model.get_parameter(f"{path}.base_layer.weight").shape, fields
            )
            if order is None:
                return f"transformers computes {before} from what a GGUF file has"
            trained = trained.difference(factors)
            self._layers.append((path, layer, names[before], order.heads))
        return f"llama.cpp has no adapters for {min(trained)}" if trained else ""

    def write(self, file: Path, values: Mapping[str, torch.Tensor]) -> None:
        """Write the factors among ``values``, by their names in the adapted model, in fp32."""
        import gguf

        writer = gguf.GGUFWriter(file, self._architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        alphas = [
            layer.scaling[adapter] * layer.r[adapter] for _, layer, *_ in self._layers for adapter in layer.r
        ]
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alphas[0])
        for (path, layer, name, heads), alpha in zip(self._layers, alphas, strict=True):
            (adapter,) = layer.r
            a, b = (values[f"{path}.{kind}"].detach().float().numpy() for kind in _factors(layer, adapter))
            b = file_order(b, heads) if heads else b
            writer.add_tensor(f"{name}.lora_a", (a.T if name == _EMBEDDING else a).copy())
            writer.add_tensor(f"{name}.lora_b", b * (alpha / alphas[0]))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _factors(layer: Any, adapter: str) -> tuple[str, str]:
    """Return the names of a layer's two factors within it."""
    if layer.lora_embedding_A:
        return f"lora_embedding_A.{adapter}", f"lora_embedding_B.{adapter}"
    return f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight"
