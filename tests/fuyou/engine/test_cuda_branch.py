"""Packed rows in the branch for CUDA, on a CPU with stand-ins for CUDA's kernels: exact, and recomputed as on a CPU."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from common.data.documents import Documents, separate_documents
from common.models.attention.documents import _by_document
from fuyou.model.recompute.block_trace import Tracer
from tests.helpers.cuda_branch import cuda_branch
from tests.helpers.engines import ROWS, batches, check, directories, engine
from tests.helpers.twin import tiny_configs

CUTS = ([12, 20], [9, 16, 7], [5, 27], [30, 2])
"""Lengths of the documents of a row, by step."""


@pytest.fixture(autouse=True)
def _shared_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that stand in for CUDA's share heads behind a mask, so the plain loop repeats none."""
    monkeypatch.setattr("gpu.twin.kernels_of", lambda device: "cpu")


def save(family: str, path: Path) -> Path:
    torch.manual_seed(1)
    config = tiny_configs()[family]
    if family == "gpt2":
        # Heads of 16: CUDA's kernels pad 12, and some processors round their sums otherwise
        config.n_head = 3
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


# In fp32 CUDA's kernel shares no heads, and the gradients of repeated ones are summed in another order: gpt2 has none.
# A CPU with AVX-512 also multiplies documents of odd lengths in another order than whole rows.
@pytest.mark.parametrize(("family", "dtype"), [
    ("llama", "bf16"), ("gemma3", "bf16"), pytest.param("mixtral", "bf16", marks=pytest.mark.slow), ("gpt2", "fp32"),
])  # fmt: skip
def test_training_equals_the_plain_loop(family: str, dtype: str, tmp_path: Path) -> None:
    with cuda_branch():
        model = save(family, tmp_path / "model")
        check(model, directories(tmp_path, 1), dtype=dtype, micro_batch=2, steps=3, exact=dtype == "bf16")


def test_other_cuts_in_each_step_leave_recomputation_as_on_a_cpu(tmp_path: Path) -> None:
    model, runs = save("llama", tmp_path / "model"), {}
    for name, branch in (("cpu", nullcontext()), ("cuda", cuda_branch())):
        (tmp_path / name).mkdir()
        with (
            branch,
            engine(
                model, directories(tmp_path / name, 1), micro_batch=2, saved_activations="64KiB"
            ) as trained,
        ):
            saved = []
            for batch, cuts in zip(batches(len(CUTS), packed=False), CUTS, strict=True):
                positions = torch.cat([torch.arange(length) for length in cuts]).expand(ROWS, -1)
                trained(**batch, position_ids=positions).loss.backward()
                saved.append(trained.step().recomputation_saved)
            runs[name] = saved
    assert runs["cuda"] == runs["cpu"] and min(runs["cuda"][1:]) > 0.2


class Written(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not any(
            each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns
        ):
            self.nbytes += sum(each.nbytes for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        return result


def attend(documents: int, dropout: float = 0.0, device: str = "cpu") -> torch.Tensor:
    sizes = ((8, 64), (2, 64), (2, 64))
    inputs = [
        torch.randn(1, h, 512, w, dtype=torch.bfloat16, device=device, requires_grad=True) for h, w in sizes
    ]
    positions = torch.arange(512 // documents).repeat(documents)[None]
    with separate_documents(Documents.of(positions)):
        return _by_document(nn.Identity(), *inputs, None, dropout)[0]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_backward_pass_writes_as_much_for_many_documents(dropout: float) -> None:
    written = []
    with cuda_branch():
        for documents in (2, 4, 16, 64):
            result = attend(documents, dropout)
            with Written() as mode:
                result.sum().backward()
            written.append(mode.nbytes)
    if dropout:  # scores are written too, which are fewer in shorter documents
        assert sorted(written, reverse=True) == written
    else:
        assert max(written) <= 1.1 * min(written)


def test_what_is_recorded_without_values_is_what_runs() -> None:
    recorded = []
    for device in ("meta", "cpu"):
        with cuda_branch(), Tracer() as tracer:
            result = attend(4, device=device)
        operators = tracer.finish(result).operators
        shapes = [[(spec.shape, spec.dtype) for spec in each.outputs] for each in operators]
        recorded.append(
            [(each.name, specs, each.flops) for each, specs in zip(operators, shapes, strict=True)]
        )
    assert [each for each in recorded[0] if "fuyou" in each[0]] == [
        each for each in recorded[1] if "fuyou" in each[0]
    ]
    assert all("scaled_dot_product" not in name for each in recorded for name, *_ in each)
