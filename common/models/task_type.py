"""Find the model class of transformers that a configuration stands for, and the task of its head."""

from enum import Enum
from typing import Any

import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)


class TaskType(Enum):
    """The task of a model's head."""

    CAUSAL_LM = "a causal language model"
    IMAGE_TEXT_TO_TEXT = "a vision-language model"
    SEQUENCE_CLASSIFICATION = "a sequence classifier"
    TOKEN_CLASSIFICATION = "a token classifier"

    @property
    def generates(self) -> bool:
        return self in (TaskType.CAUSAL_LM, TaskType.IMAGE_TEXT_TO_TEXT)

    @property
    def auto_class(self) -> str:
        """Name of transformers' class that loads such models."""
        return _TASKS[self][0]


_TASKS: dict[TaskType, tuple[str, Any]] = {
    TaskType.CAUSAL_LM: ("AutoModelForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING),
    TaskType.IMAGE_TEXT_TO_TEXT: ("AutoModelForImageTextToText", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    TaskType.SEQUENCE_CLASSIFICATION: (
        "AutoModelForSequenceClassification",
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    ),
    TaskType.TOKEN_CLASSIFICATION: (
        "AutoModelForTokenClassification",
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    ),
}


_INSTEAD = "Give a decoder such as Llama, Qwen, Mistral, Gemma or GPT-2"


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that ``config`` is to be built as; None if transformers has none that can be trained here.

    It is the one that the configuration names (``architectures``). One that names none is whole: a vision-language
    model where the family is one, or else a causal language model.
    """
    named = _named(config)
    if named is not None:
        return named
    if _lost_head(config) is not None:
        return None
    tasks = (_whole(config), TaskType.CAUSAL_LM, TaskType.IMAGE_TEXT_TO_TEXT)
    return next((kind for task in tasks for kind in _classes(config, task)), None)


def task_type_of(config: PreTrainedConfig) -> TaskType:
    """Return the task of the model that ``config`` is built as."""
    chosen = model_class(config)
    tasks = (_whole(config), *TaskType)  # a class may be in two mappings
    return next((task for task in tasks if chosen in _classes(config, task)), TaskType.CAUSAL_LM)


def refusal(config: PreTrainedConfig) -> str:
    """Return why :func:`model_class` gives None, as the rest of a sentence that begins with the model's name."""
    lost = _lost_head(config)
    if lost is not None and is_encoder_decoder(config):
        return f"is a {lost}, which has an encoder and a decoder, and models of one of them are trained. {_INSTEAD}"
    if lost is not None:
        instead = _INSTEAD
        for causal in _classes(config, TaskType.CAUSAL_LM)[:1]:
            instead = (
                "To train the rest of it as a causal language model, write "
                f'"architectures": ["{causal.__name__}"] in its config.json'
            )
        return (
            f"is a {lost}, whose head is none of those that can be trained: those of causal language models, "
            f"vision-language models, sequence and token classifiers. {instead}"
        )
    own_code = " (its code comes with the checkpoint, and is not run)" if hasattr(config, "auto_map") else ""
    return (
        f"is a {config.model_type!r} model{own_code}, which transformers cannot build as a causal language model "
        f"(AutoModelForCausalLM) nor as a vision-language model (AutoModelForImageTextToText). {_INSTEAD}"
    )


def is_encoder_decoder(config: PreTrainedConfig) -> bool:
    """Return whether models of a configuration have an encoder and a decoder."""
    return bool(getattr(config, "is_encoder_decoder", False))


def config_for(chosen: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration that ``chosen`` is built from: ``config``, or the part of it that is about text."""
    text = config.get_text_config()
    kind: Any = chosen.config_class
    return text if isinstance(text, kind) and not isinstance(config, kind) else config


def _whole(config: PreTrainedConfig) -> TaskType:
    return TaskType.IMAGE_TEXT_TO_TEXT if config.get_text_config() is not config else TaskType.CAUSAL_LM


def _classes(config: PreTrainedConfig, task: TaskType) -> tuple[type[PreTrainedModel], ...]:
    if task is TaskType.SEQUENCE_CLASSIFICATION and is_encoder_decoder(config):
        return ()  # which has both
    classes = _TASKS[task][1].get(type(config), ())
    return tuple(classes) if isinstance(classes, list | tuple) else (classes,)


def _named(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the first of the configuration's ``architectures`` that can be trained."""
    known = [kind for task in TaskType for kind in _classes(config, task)]
    names = getattr(config, "architectures", None) or ()
    return next((kind for name in names for kind in known if kind.__name__ == name), None)


def _lost_head(config: PreTrainedConfig) -> str | None:
    names = [name for name in getattr(config, "architectures", None) or () if "For" in name]
    kinds = ((name, getattr(transformers, name, None)) for name in names)
    return next(
        (name for name, kind in kinds if isinstance(kind, type) and issubclass(kind, PreTrainedModel)), None
    )
