"""A student learns from a teacher out of core what it learns from whole logits in memory."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

import fuyou
from common.models.adapters.options import AdapterOptions
from fuyou.objectives.distillation import TEACHER, student_head, teacher_head

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LR, TEMPERATURE = 1e-3, 2.0


def divergence(logits: torch.Tensor, teacher: torch.Tensor, kept: int) -> torch.Tensor:
    """Of each token, ``[N]``, from whole logits ``[N, V]``; what the teacher finds less likely is one class."""
    own, theirs = ((values / TEMPERATURE).softmax(-1) for values in (logits, teacher))
    places = theirs.topk(kept).indices
    both = [torch.cat([one.gather(-1, places), 1 - one.gather(-1, places).sum(-1, keepdim=True)], -1)
            for one in (own, theirs)]  # fmt: skip
    if kept == logits.shape[-1]:
        both = [one[:, :-1] for one in both]
    return TEMPERATURE**2 * functional.kl_div(both[0].log(), both[1], reduction="none").sum(-1)


@pytest.mark.parametrize("kept", [96, 8])
def test_a_student_learns_from_a_teacher(kept: int, tmp_path: Path) -> None:
    for name, layers, seed in (("teacher", 3, 1), ("student", 2, 2)):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_hidden_layers=layers)).save_pretrained(
            tmp_path / name
        )
        (tmp_path / f"{name}-ssd").mkdir()
    batch = {"input_ids": torch.randint(3, 96, (4, 16), generator=torch.Generator().manual_seed(0))}
    memory = {name: AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("teacher", "student")}
    optimizer = torch.optim.AdamW(memory["student"].parameters(), lr=LR, weight_decay=0.0)
    common = {"dtype": "fp32", "host_memory": "400MiB", "lr": LR, "weight_decay": 0.0}
    frozen = {**common, "adapters": AdapterOptions(1)}
    with (
        fuyou.Engine(tmp_path / "teacher", ssd=[tmp_path / "teacher-ssd"], **frozen) as teacher,
        fuyou.Engine(tmp_path / "student", ssd=[tmp_path / "student-ssd"], micro_batch=2, **common) as student,
    ):
        for _ in range(3):
            with torch.no_grad(), teacher.disable_adapters():
                best = teacher.tokens(**batch, outputs=(), head=teacher_head(kept, TEMPERATURE))
            inputs = {name: best[name] for name in TEACHER}
            out = student.tokens(**batch, head=student_head(TEMPERATURE), inputs=inputs)
            loss = (out.divergence * out.mask).sum() / out.mask.sum()
            student.backward(loss)
            student.step()
            with torch.no_grad():
                theirs = memory["teacher"](**batch).logits[:, :-1].flatten(0, 1)
            logits = memory["student"](**batch).logits[:, :-1].flatten(0, 1)
            expected = divergence(logits, theirs, kept).mean()
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        values = dict(memory["student"].named_parameters())
        for name, value in student.named_parameters():
            torch.testing.assert_close(value, values[name].data, rtol=1e-5, atol=1e-5, msg=name)
