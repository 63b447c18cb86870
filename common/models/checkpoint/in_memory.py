"""Load a whole model into memory as transformers does, also from a GGUF file."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from common.models.checkpoint.compressed.formats import CompressedShards
from common.models.checkpoint.gguf_table import TABLE
from common.models.generation import generation_config_of
from common.models.task_type import model_class


def load_in_memory(checkpoint: Path) -> tuple[Any, list[str]]:
    """Return the language model of a checkpoint, and the names of the parameters that it lacks.

    It is in the dtype of its files; of a GGUF file, in fp32.
    """
    options: dict[str, Any] = {"local_files_only": True, "output_loading_info": True}
    if not (checkpoint / TABLE).is_file():
        loader: Any = AutoModelForCausalLM
        model, info = loader.from_pretrained(checkpoint, dtype="auto", **options)
        return model, sorted(info["missing_keys"])
    shards = CompressedShards(checkpoint)
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    chosen: Any = model_class(config)
    tensors = {name: shards.read(name) for name in shards.tensors}
    model, info = chosen.from_pretrained(None, config=config, state_dict=tensors, output_loading_info=True)
    model.generation_config = generation_config_of(config, checkpoint)
    return model, sorted(info["missing_keys"])
