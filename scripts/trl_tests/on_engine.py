"""TRL's trainers given an engine wherever a test gives them a model: what a user does by hand, done from outside.

Of each trainer, the model becomes a checkpoint, which an engine opens; the trainer gets ``as_model`` of it,
``EngineOptimizer``, and as reference ``as_reference``: of the same engine where adapters are trained, else of a second
one, frozen. Where a test reads weights of ``trainer.model``, it reads them from the engine's store.
"""

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from peft import PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoProcessor, PreTrainedModel

import fuyou
from common.models.adapters.options import AdapterOptions
from fuyou.integrations import EngineOptimizer, as_model, as_reference
from fuyou.integrations import model as facades

TRAINERS = (trl.SFTTrainer, trl.DPOTrainer, trl.KTOTrainer, trl.RewardTrainer)
WITH_REFERENCE = (trl.DPOTrainer, trl.KTOTrainer)
HOST_MEMORY = DEVICE_MEMORY = "2GiB"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Engines:
    """Engines of one test, which are closed behind it.

    Args:
        folder: for checkpoints and stores.
    """

    def __init__(self, folder: Path):
        self._folder, self._numbers = folder, itertools.count()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def of(self, model: PreTrainedModel, adapters: Any, **options: Any) -> fuyou.Engine:
        """Open an engine on what ``model`` is now.

        Args:
            model: in memory.
            adapters: that are trained; None: the weights.
            options: of the engine.
        """
        number = next(self._numbers)
        checkpoint, ssd = self._folder / f"model-{number}", self._folder / f"ssd-{number}"
        ssd.mkdir()
        model.save_pretrained(checkpoint)
        engine = fuyou.Engine(
            checkpoint, ssd=[ssd], host_memory=HOST_MEMORY, device_memory=DEVICE_MEMORY, device="cpu",
            adapters=adapters, dtype=DTYPES.get(model.dtype, str(model.dtype).removeprefix("torch.")), **options,
        )  # fmt: skip
        return self._open.enter_context(engine)


@contextlib.contextmanager
def trainers_on_engines(folder: Path) -> Iterator[None]:
    """Let all trainers that are made meanwhile train engines.

    Args:
        folder: for what the engines have on the drives.
    """
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(Engines(folder))
        for kind in TRAINERS:
            stack.enter_context(mock.patch.object(kind, "__init__", _on_an_engine(kind, engines)))
        for name in ("named_parameters", "get_parameter", "parameters"):
            stack.enter_context(mock.patch.object(facades._Facade, name, _read_by_tests(name), create=True))
        yield


def _on_an_engine(kind: type, engines: Engines) -> Any:
    """Return a constructor of a trainer that gives it an engine in place of its model."""
    original: Any = kind.__init__  # type: ignore[misc]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        options = given.get("args")
        if given.get("train_dataset") is not None and given.get("model") is not given.get("ref_model"):
            _replace(kind, given, options, engines)
        given.pop("self")
        original(self, **given)

    return constructor


def _replace(kind: type, given: dict[str, Any], args: Any, engines: Engines) -> None:
    """Put an engine where the model is in the arguments of a trainer."""
    model, adapters = given["model"], given.get("peft_config")
    name = model if isinstance(model, str) else model.config._name_or_path
    if args is None:
        args = given["args"] = getattr(trl, kind.__name__.replace("Trainer", "Config"))(f"{name.split('/')[-1]}")
    if given.get("processing_class") is None:
        given["processing_class"] = AutoProcessor.from_pretrained(
            name, trust_remote_code=getattr(args, "trust_remote_code", False)
        )
    if isinstance(model, str):
        model = _loaded(kind, model, args)
    elif isinstance(model, PeftModel) and adapters is None:
        adapters = model.peft_config["default"]
        model = model.get_base_model() if adapters.is_prompt_learning else model.unload()
    given.pop("peft_config", None)
    if kind is trl.RewardTrainer:  # as it does itself, when the engine is there already
        _name_padding(model, getattr(given["processing_class"], "tokenizer", given["processing_class"]), args)
    common: dict[str, Any] = {
        "lr": args.learning_rate, "weight_decay": args.weight_decay, "max_grad_norm": args.max_grad_norm or None,
        "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon,
    }  # fmt: skip
    routed = hasattr(model.config.get_text_config(), "output_router_logits")
    if routed and getattr(args, "router_aux_loss_coef", 0) != 0:  # None, too: the family's own coefficient
        common["router_loss"] = "on"
    engine = engines.of(model, adapters, **common)
    given["model"] = as_model(engine)
    if kind in WITH_REFERENCE and not args.precompute_ref_log_probs:
        other = given.get("ref_model")
        if other is None and adapters is not None:
            given["ref_model"] = as_reference(engine)
        else:
            given["ref_model"] = as_reference(engines.of(model if other is None else other, AdapterOptions(rank=1)))
    optimizer, schedule = given.get("optimizers", (None, None))
    given["optimizers"] = (optimizer or EngineOptimizer(given["model"], lr=args.learning_rate), schedule)


def _name_padding(model: PreTrainedModel, tokenizer: Any, args: Any) -> None:
    """Write into a configuration which token pads, by which a classifier finds where a text ends."""
    token = getattr(args, "pad_token", None) or tokenizer.pad_token or tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.convert_tokens_to_ids(token)


def _loaded(kind: type, name: str, args: Any) -> PreTrainedModel:
    """Load a model as the trainer would."""
    options = {
        "trust_remote_code": getattr(args, "trust_remote_code", False),
        **(getattr(args, "model_init_kwargs", None) or {}),
    }
    if kind is trl.RewardTrainer:
        options = {"num_labels": 1, "dtype": torch.float32, **options}
        return AutoModelForSequenceClassification.from_pretrained(name, **options)
    create = getattr(sys.modules[kind.__module__], "create_model_from_path")  # noqa: B009 - which TRL may move
    return create(name, **options)


def _read_by_tests(name: str) -> Any:
    """Return a method of the facade that reads the engine's store where a test calls it."""
    original = getattr(facades._Facade, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not sys._getframe(1).f_globals["__name__"].startswith("tests."):
            return original(self, *args, **kwargs)
        engine: fuyou.Engine = self._streamed.engine
        prefix = "base_model.model." if engine._asked.weights.adapters is not None else ""
        parameters = {prefix + key: nn.Parameter(value.clone()) for key, value in engine.named_parameters()}
        if self._is_reference:  # under the names that a model without adapters has
            start = len(prefix)
            parameters = {
                key[start:].replace("base_layer.", ""): parameter
                for key, parameter in parameters.items()
                if ".lora_" not in key
            }
        match name:
            case "named_parameters":
                return iter(parameters.items())
            case "parameters":
                return iter(parameters.values())
        return parameters[args[0]]

    return method
