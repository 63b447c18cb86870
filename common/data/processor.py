"""The processor of a vision-language checkpoint, which makes token ids and pixels of conversations."""

import inspect
import json
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from common.errors import UserError, on_one_line

_VIDEO = "video_processor"
# Files that may name the processor's class, as transformers looks for it.
_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def load_processor(checkpoint: Path) -> ProcessorMixin:
    """Return the processor of a checkpoint.

    Where its part for videos needs torchvision, which is not there, it is left out: training takes images alone, and
    transformers has their processors on Pillow.

    Raises:
        UserError: there is none that can be loaded; says what to install.
    """
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        try:
            processor = AutoProcessor.from_pretrained(checkpoint, **options)
        except ImportError:
            kind = _named_class(checkpoint)
            if kind is None or _VIDEO not in inspect.signature(kind.__init__).parameters:
                raise
            processor = _without_videos(kind).from_pretrained(checkpoint, **options)
        if not isinstance(processor, ProcessorMixin):
            raise OSError("no processor_config.json or preprocessor_config.json")
    except Exception as error:  # each class of processors fails in its own way
        raise UserError(
            f"{checkpoint} has no processor that transformers can load, and data with images need one: "
            f"{on_one_line(error)} (Processors need pip install 'fuyou[images]', and those of some families "
            "torchvision, built for the same CUDA version as PyTorch.)"
        ) from error
    return processor


def _named_class(checkpoint: Path) -> type[ProcessorMixin] | None:
    """Return the class of the checkpoint's processor; None if no file names one that transformers has."""
    for name in _FILES:
        file = checkpoint / name
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if isinstance(kind := getattr(transformers, str(content.get("processor_class")), None), type):
            return kind
    model_type = json.loads((checkpoint / "config.json").read_text(encoding="utf-8")).get("model_type")
    return getattr(transformers, str(PROCESSOR_MAPPING_NAMES.get(model_type)), None)


def _without_videos(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """Return a class of processors without the part for videos, which transformers finds in the signature."""
    parameters = [
        each for each in inspect.signature(kind.__init__).parameters.values() if each.name != _VIDEO
    ]
    names = [each.name for each in parameters[1:]]

    def initialize(self: ProcessorMixin, *parts: Any, **options: Any) -> None:
        kind.__init__(self, **dict(zip(names, parts, strict=False)), **options)

    method: Any = initialize
    method.__signature__ = inspect.Signature(parameters)
    return type(kind.__name__, (kind,), {"__init__": method})
