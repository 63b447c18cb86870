"""The Python API as notebooks use it: cells that run again, values typed by hand, scripts that just end."""

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import xLSTMConfig

import fuyou
from common.docstrings import attribute_docstrings
from fuyou.option_groups import OPTION_NAMES, StoreConfig
from tests.helpers.small_engine import BATCH, small_engine, train

ROOT = Path(__file__).parents[2]


def test_what_the_package_shows_completes_and_explains() -> None:
    assert dir(fuyou) == sorted([*fuyou.__all__, "__version__"]) and fuyou.__version__[0].isdigit()
    assert all(hasattr(fuyou, name) for name in fuyou.__all__)
    assert {"UserError", "FinetuneError", "NonFiniteLoss", "NonFiniteWeights", "StoreError"} <= set(
        fuyou.__all__
    )
    parameters = inspect.signature(fuyou.Engine).parameters
    assert set(parameters) == {"model", "config", *OPTION_NAMES}
    assert parameters["ssd"].default is inspect.Parameter.empty and parameters["lr"].default == 1e-5
    shown = " ".join((inspect.getdoc(fuyou.Engine) or "").split())
    assert f"commit_every: {attribute_docstrings(StoreConfig)['commit_every']}" in shown
    assert not [name for name in OPTION_NAMES if f" {name}: " not in shown]


@pytest.mark.slow  # mypy reads PyTorch's types
def test_a_type_checker_sees_misspelled_options(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import fuyou\n"
        'fuyou.Engine("m", ssd=".", lr=1e-4, batch_shape=(4, 32))\n'
        'fuyou.Engine("m", ssd=".", learning_rate=1e-4)\n'
        'fuyou.Engine("m", ssd=".", lr="high")\n'
        'fuyou.Engine("m")\n'
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(script)]
    out = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=500, check=False).stdout
    assert set(re.findall(r"mine\.py:(\d+): error", out)) == {"3", "4", "5"}, out
    assert "learning_rate" in out and (ROOT / "fuyou" / "py.typed").is_file()


def test_a_cell_that_runs_again_closes_what_the_first_one_left(tmp_path: Path) -> None:
    first = small_engine(tmp_path, lr=1e-3, prove=False)
    assert repr(first).startswith("<fuyou.Engine LlamaForCausalLM, ") and f", step 0, in {tmp_path}" in repr(
        first
    )
    losses = train(first, 2)
    second = small_engine(tmp_path, lr=1e-3, prove=False, resume=True)
    assert ", closed, in " in repr(first) and second.step_count == 2
    second(**BATCH)  # interrupted in a step
    with small_engine(tmp_path, lr=1e-3, prove=False, overwrite=True) as third:
        assert train(third, 2) == losses
        with pytest.raises(fuyou.FinetuneError, match="The engine has been closed"):
            second(**BATCH)


def test_values_typed_by_hand_are_accepted_or_rejected_in_a_sentence(tmp_path: Path) -> None:
    with small_engine(tmp_path, lr=1e-3, prove=False) as engine:
        ids = BATCH["input_ids"]
        for value in (ids.numpy(), ids.float(), 3):
            with pytest.raises(fuyou.UserError, match=r"input_ids.*tensor"):
                engine(input_ids=value, labels=ids)
        engine(input_ids=ids.int(), labels=ids.int()).loss.backward()
        report = engine.step()
        assert report.step == 1 and len(repr(report)) < 200 and "busy" not in repr(report)


def test_writes_to_what_is_read_of_the_weights_are_rejected(tmp_path: Path) -> None:
    with small_engine(tmp_path, lr=1e-3, prove=False) as engine:
        name, weight = next(iter(engine.named_parameters()))
        before = weight.clone()
        for write in (weight.zero_, lambda: weight.__setitem__(0, 1.0), lambda: weight.add_(1)):
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor"), torch.no_grad():
                write()
        assert torch.equal(dict(engine.named_parameters())[name], before) and before.zero_().sum() == 0


@pytest.mark.slow  # each process imports everything
@pytest.mark.real_start
def test_a_script_that_ends_without_close_loses_no_step(tmp_path: Path) -> None:
    """Neither steps that wait for a commit, nor, where it ends in a step or with an exception, those before it."""
    script = """
        import sys
        from pathlib import Path
        from tests.helpers.small_engine import BATCH, small_engine, train
        engine = small_engine(Path(sys.argv[1]), lr=1e-3, prove=False, commit_every=int(sys.argv[2]))
        train(engine, 3)
        if sys.argv[2] == "1":
            engine(**BATCH)
            raise SystemError
    """
    for commit_every, status in ((5, 0), (1, 1)):
        folder = tmp_path / str(status)
        folder.mkdir()
        command = [sys.executable, "-c", textwrap.dedent(script), str(folder), str(commit_every)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(
            command, cwd=ROOT, text=True, capture_output=True, timeout=300, env=environment
        )
        assert ended.returncode == status, ended.stderr
        with small_engine(folder, lr=1e-3, prove=False, resume=True) as engine:
            assert engine.step_count == 3


def test_rows_that_xlstm_evaluates_in_parts_are_evaluated_as_in_training(tmp_path: Path) -> None:
    config = xLSTMConfig(
        vocab_size=97, hidden_size=32, num_heads=2, num_hidden_layers=2, num_blocks=2, chunk_size=8,
        autocast_kernel_dtype="float32", inference_state_dtype="float32", return_last_states=True,
        max_inference_chunksize=16,
    )  # fmt: skip
    ids = torch.arange(64).view(2, 32)
    options: dict[str, Any] = {
        "ssd": tmp_path,
        "batch_shape": (2, 32),
        "host_memory": "600MiB",
        "dtype": "fp32",
    }
    with fuyou.Engine(config, device="cpu", prove=False, **options) as engine:
        evaluated = engine.eval_loss(input_ids=ids, labels=ids)
        assert engine(input_ids=ids, labels=ids).loss.item() == pytest.approx(evaluated, rel=1e-6)
        assert engine.config.max_inference_chunksize == 16
