"""Options of a run: said once, by their names alone or in their groups."""

import dataclasses
from pathlib import Path

import pytest
import torch

import fuyou
from common.errors import UserError
from fuyou.config import EngineConfig, MemoryConfig, OptimizerConfig, StoreConfig, WeightsConfig
from fuyou.optimizer.clipping import ClipBy


def test_groups_and_names_alone_say_the_same() -> None:
    grouped = EngineConfig(
        store=StoreConfig(ssd=["a", "b"], run_name="tuned"), optimizer=OptimizerConfig(lr=1e-4, max_grad_norm=1.0),
        memory=MemoryConfig(host_cache="1MiB"), weights=WeightsConfig(trainable=["head.*"]), seed=3,
    )  # fmt: skip
    named = EngineConfig.of(
        ssd=["a", "b"],
        run_name="tuned",
        lr=1e-4,
        max_grad_norm=1.0,
        host_cache="1MiB",
        trainable=["head.*"],
        seed=3,
    )
    assert grouped == named
    assert named.store.folders == [Path("a/tuned"), Path("b/tuned")]
    assert (named.adam.lr, named.host_cache, named.trainable) == (1e-4, 1 << 20, ("head.*",))
    assert named.clips_by is ClipBy.DEFERRAL and not named.update_policy.speculative


def test_other_values_by_name_leave_the_rest() -> None:
    config = EngineConfig.of(ssd=["a"], clip_by="auto", max_grad_norm=1.0, micro_batch=2)
    changed = config.with_options(clip_by="speculation", dtype="fp32")
    assert changed.update_policy.speculative and str(changed.precision.dtype) == "torch.float32"
    assert changed.memory == config.memory and changed.store == config.store


def test_nothing_is_filled_by_position() -> None:
    for group in (EngineConfig, StoreConfig, OptimizerConfig, MemoryConfig, WeightsConfig):
        assert all(one.kw_only for one in dataclasses.fields(group))


def test_unknown_and_missing_options_are_those_of_the_engine() -> None:
    with pytest.raises(
        TypeError, match=r"Engine.__init__\(\) got an unexpected keyword argument 'learning_rate'"
    ):
        fuyou.Engine("llama-10m", ssd=["a"], learning_rate=1e-4)
    with pytest.raises(
        TypeError, match=r"Engine.__init__\(\) missing 1 required keyword-only argument: 'ssd'"
    ):
        fuyou.Engine("llama-10m", lr=1e-4)
    with pytest.raises(TypeError, match="not both: lr"):
        fuyou.Engine("llama-10m", EngineConfig.of(ssd=["a"]), lr=1e-4)


@pytest.mark.parametrize(("options", "message"), [
    ({"micro_batch": 0}, "micro_batch must be positive, not 0."),
    ({"commit_every": 0}, "commit_every must be positive, not 0."),
    ({"deferred_fraction": 1.5}, "deferred_fraction must be positive, not 1.5."),
    ({"lr": -1.0}, "lr must be a finite number"),
    ({"clip_by": "luck"}, "clip_by must be auto, deferral or speculation"),
    ({"dtype": torch.float32}, "dtype must be bf16 or fp32, not torch.float32"),
    ({"adapters": {"r": 8}}, "adapters takes a peft configuration or a directory, not a dict"),
    ({"trainable": "model.*"}, r"trainable takes a list of names: trainable=\['model"),
    ({"batch_shape": "4,32"}, "batch_shape takes .sequences, tokens., two positive integers, not '4,32'"),
    ({"batch_shape": (0, 32)}, "batch_shape takes"),
    ({"run_name": "a/b"}, "run_name is the name of a folder in each directory of ssd, not 'a/b'"),
    ({"run_name": ".."}, "run_name"),
])  # fmt: skip
def test_impossible_values_are_rejected_before_anything_is_opened(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fuyou.Engine("no such model", ssd=["/no/such/drive"], **options)


def test_a_model_object_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes a checkpoint's directory or a configuration, not a Linear"):
        fuyou.Engine(torch.nn.Linear(1, 1), ssd=[tmp_path])  # type: ignore[arg-type]
