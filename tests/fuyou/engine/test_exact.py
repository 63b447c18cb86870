"""The engine equals a plain in-memory loop, bit for bit: losses of every step, masters at the end."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, RoFormerConfig

from common.errors import UserError
from tests.helpers import bits
from tests.helpers.engines import (
    ONE_OF_EACH,
    OPTIONS,
    ROWS,
    SCARCE,
    STEPS,
    TOKENS,
    batches,
    check,
    compare,
    directories,
    engine,
    give_buffers,
    train,
)
from tests.helpers.twin import Twin, tiny_configs


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint per family."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, config in tiny_configs().items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return root


def test_a_callers_autocast_changes_nothing(checkpoints: Path, tmp_path: Path) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained = engine(checkpoints / "llama", directories(tmp_path, 1), "fp32")
        twin = Twin(str(checkpoints / "llama"), bf16=False, max_grad_norm=None, **OPTIONS)
    with trained:
        (batch,) = batches(1, packed=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = trained(**batch)
        out.loss.backward()
        trained.step()
        assert out.loss.item() == twin.step(batch, ROWS)
        compare(trained, twin)


# fp32 weights are not split nor rounded: what they add to bf16 does not depend on the family. More of it is below,
# and so are the two Llamas and GPT-2. The slow ones differ from a Llama in their attention alone.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "bf16") for family in ("gemma3", "opt", "mixtral", "qwen3-moe")),
     *(pytest.param(family, "bf16", marks=pytest.mark.slow) for family in ("qwen3", "neox")),
     pytest.param("mixtral", "fp32", marks=pytest.mark.slow)],
)  # fmt: skip
def test_families(family: str, dtype: str, checkpoints: Path, tmp_path: Path) -> None:
    check(checkpoints / family, directories(tmp_path, 1), dtype=dtype, micro_batch=1)


def test_what_a_family_itself_never_trains_stays_next_to_what_is_trained(tmp_path: Path) -> None:
    """RoFormer's positions, in the embedding's record, are parameters without gradients; gradients would flow there."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        RoFormerConfig(
            vocab_size=211, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=72,
            max_position_embeddings=TOKENS, is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    positions = model.roformer.encoder.embed_positions.weight
    torch.nn.init.normal_(positions, std=0.5)
    model.save_pretrained(tmp_path / "model")
    twin = Twin(str(tmp_path / "model"), bf16=True, max_grad_norm=0.5, **OPTIONS)
    with engine(tmp_path / "model", directories(tmp_path, 2), micro_batch=2, max_grad_norm=0.5) as trained:
        assert trained.parameters - trained.trainable_parameters == positions.numel()
        for batch in batches(3, packed=False):
            out = trained(**batch)
            out.loss.backward()
            trained.step()
            assert out.loss.item() == twin.step(batch, 2)
        compare(trained, twin)
        assert torch.equal(
            dict(trained.named_parameters())["roformer.encoder.embed_positions.weight"], positions
        )


@pytest.mark.parametrize(("drives", "micro_batch", "clip", "family", "dtype"), [
    (3, 4, 0.5, "llama", "bf16"),
    (3, 3, 0.5, "gpt2", "bf16"),
    (3, 1, 0.5, "llama", "fp32"),
    (1, 3, None, "gpt2", "fp32"),
])  # fmt: skip
def test_drives_micro_batches_and_clipping(
    drives: int,
    micro_batch: int,
    clip: float | None,
    family: str,
    dtype: str,
    checkpoints: Path,
    tmp_path: Path,
) -> None:
    check(
        checkpoints / family, directories(tmp_path, drives), dtype=dtype, micro_batch=micro_batch, clip=clip
    )


def test_two_threads(checkpoints: Path, tmp_path: Path) -> None:
    """What is summed by several threads is summed in another order, by both alike."""
    torch.set_num_threads(2)
    try:
        check(checkpoints / "gpt2", directories(tmp_path, 1), dtype="bf16", micro_batch=3, clip=0.5)
    finally:
        torch.set_num_threads(bits.threads())


@pytest.mark.parametrize(
    ("fraction", "commit_every"), [pytest.param(0.67, 1, marks=pytest.mark.slow), (1.0, 2)]
)
def test_updates_deferred_into_the_next_forward_pass(
    fraction: float, commit_every: int, checkpoints: Path, tmp_path: Path
) -> None:
    ssd = directories(tmp_path, 1)
    options = {"deferred_fraction": fraction, "commit_every": commit_every}
    check(checkpoints / "llama", ssd, dtype="bf16", micro_batch=1, steps=STEPS, **options)


@pytest.mark.parametrize(("family", "cache", "options"), [
    ("llama", None, {}),
    pytest.param("gpt2", None, {"commit_every": 3, "max_grad_norm": 0.5}, marks=pytest.mark.slow),
    ("llama", 250_000, {"commit_every": 2, "deferred_fraction": 0.5}),
], ids=["all", "all, clipped, committed seldom", "some, half deferred"])  # fmt: skip
def test_states_that_live_in_host_memory(
    family: str, cache: int | None, options: dict, checkpoints: Path, tmp_path: Path
) -> None:
    """With anything kept on the host, masters (read from SSD) are those of the last step, and reads are saved."""
    twin = Twin(str(checkpoints / family), bf16=True, max_grad_norm=options.get("max_grad_norm"), **OPTIONS)
    ssd = directories(tmp_path, 1)
    with engine(checkpoints / family, ssd, host_cache=cache, micro_batch=2, **options) as trained:
        resident, records = trained.memory_plan.resident, trained._run.layout.records
        assert len(resident) == len(records) if cache is None else 0 < len(resident) < len(records)
        for batch in batches(STEPS, packed=True):
            out = trained(**batch)
            out.loss.backward()
            report = trained.step()
            assert out.loss.item() == twin.step(batch, 2)
        if cache is None:
            assert report.planned_read_bytes == 0
        compare(trained, twin)
        assert trained.io_bytes() == trained.planned_io_bytes()
        trained(**batch).loss.backward()  # from host memory, after what was on SSD has been read by others
        trained.step()
        twin.step(batch, 2)
        compare(trained, twin)
    with engine(checkpoints / family, ssd, host_cache=0, micro_batch=2, resume=True, **options) as trained:
        assert trained.step_count == STEPS + 1
        compare(trained, twin)


@pytest.mark.parametrize(("counts", "clip"), [
    ({"device_activations": 30, "host_activations": 0}, None),  # all on the device
    # Most on the host
    pytest.param({"device_activations": 4, "host_activations": 30}, None, marks=pytest.mark.slow),
    pytest.param({**SCARCE, **ONE_OF_EACH}, None, marks=pytest.mark.slow),  # most on SSD
    ({**SCARCE, **ONE_OF_EACH}, 0.5),
    ({**SCARCE, "device_blocks": 3, "host_blocks": 2, "host_activations": 5}, 0.5),
], ids=["device", "host", "one of each", "one of each, clipped", "deep prefetch, clipped"])  # fmt: skip
def test_tiers_and_prefetch_depths(
    counts: dict[str, int],
    clip: float | None,
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_buffers(monkeypatch, counts)
    check(checkpoints / "llama-tied", directories(tmp_path, 1), dtype="bf16", micro_batch=1, clip=clip)


@pytest.mark.parametrize("options", [
    {"max_grad_norm": 0.5, "commit_every": 2}, {"deferred_fraction": 0.5},
], ids=["clipped, commit every 2", "half deferred"])  # fmt: skip
def test_resume_in_the_middle(options: dict, checkpoints: Path, tmp_path: Path) -> None:
    """Three steps, a resume, and two more equal five; the drives may be named in another order."""
    feed = batches(5, packed=True)
    twin = Twin(str(checkpoints / "gpt2"), bf16=True, max_grad_norm=options.get("max_grad_norm"), **OPTIONS)
    expected = [twin.step(batch, 2) for batch in feed]
    drives = directories(tmp_path, 2)
    with engine(checkpoints / "gpt2", drives, micro_batch=2, **options) as trained:
        losses = train(trained, feed[:3])
    with engine(checkpoints / "gpt2", drives[::-1], micro_batch=2, resume=True, **options) as trained:
        assert trained.step_count == 3
        assert trained.user_state == {"seen": 3}
        losses += train(trained, feed[3:])
        assert losses == expected
        compare(trained, twin)


def test_moments_of_8_bits(checkpoints: Path, tmp_path: Path) -> None:
    """Two steps, a resume, and two more equal the twin's four, bit for bit; another optimizer cannot continue."""
    feed = batches(4, packed=True)
    twin = Twin(str(checkpoints / "gpt2"), bf16=True, max_grad_norm=None, optimizer="adamw8bit", **OPTIONS)
    expected, losses = [twin.step(batch, 4) for batch in feed], []
    drives = directories(tmp_path, 2)
    for first in (0, 2):
        options = {"micro_batch": 4, "optimizer": "adamw8bit", "resume": first > 0}
        with engine(checkpoints / "gpt2", drives, **options) as trained:
            losses += train(trained, feed[first : first + 2])
            if first:
                compare(trained, twin)
    assert losses == expected
    with pytest.raises(UserError, match=r"another optimizer \(adamw8bit, now adamw"):
        engine(checkpoints / "gpt2", drives, micro_batch=4, resume=True)


def test_export_and_evaluation(checkpoints: Path, tmp_path: Path) -> None:
    """The exported checkpoint is the model that was trained; training continues after an export."""
    batch = batches(2, packed=False)
    twin = Twin(str(checkpoints / "mixtral"), bf16=True, max_grad_norm=None, **OPTIONS)
    with engine(checkpoints / "mixtral", directories(tmp_path, 1), micro_batch=2) as trained:
        trained(**batch[0]).loss.backward()
        trained.step()
        twin.step(batch[0], 2)
        trained.save_pretrained(tmp_path / "out")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
        for name, value in model.named_parameters():
            assert torch.equal(value, twin.model.get_parameter(name)), name
        with torch.no_grad():
            mean = float(model(**batch[1]).loss)
        assert math.isclose(trained.eval_loss(**batch[1]), mean, rel_tol=1e-5)
        out = trained(**batch[1])
        out.loss.backward()
        trained.step()
        assert out.loss.item() == twin.step(batch[1], 2)
        compare(trained, twin)


def test_dropout_continues_where_it_stopped(tmp_path: Path) -> None:
    """Four steps with dropout are the same with a resume in the middle."""
    config = tiny_configs()["gpt2"]
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.2
    feed, runs = batches(4, packed=False), []
    for name, breaks in (("whole", (0, 4)), ("broken", (0, 2, 4))):
        (tmp_path / name).mkdir()
        ssd, losses = directories(tmp_path / name, 1), []
        for first, last in pairwise(breaks):
            with engine(config, ssd, micro_batch=2, resume=first > 0) as trained:  # type: ignore[arg-type]
                losses += train(trained, feed[first:last])
        runs.append(losses)
    assert runs[0] == runs[1]
