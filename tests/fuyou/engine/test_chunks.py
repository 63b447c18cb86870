"""Rows in chunks of tokens give the losses and gradients of whole rows, in less memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    OpenAIGPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3NextConfig,
)

import fuyou
from common.activity import current_activity
from common.errors import UserError
from fuyou.layout.record import Precision
from fuyou.model import chunks
from fuyou.model.open_model import OpenModel
from fuyou.preflight.proof import prove_divided
from fuyou.preflight.twins import SmallStep
from fuyou.runtime.compute.step_computation import StepComputation
from fuyou.schedule.tasks import ComputeTask
from tests.helpers.engines import SCARCE, batches, give_buffers, train
from tests.helpers.own_loss import dpo, pairs
from tests.helpers.rounding import fp32_sum_rounding
from tests.helpers.twin import tiny_configs

COMMON: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def hybrid() -> PreTrainedConfig:
    """Linear attention next to ordinary attention, and experts."""
    return Qwen3NextConfig(
        **COMMON, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
    )  # fmt: skip


def configs() -> dict[str, PreTrainedConfig]:
    """Families with windows, sinks, latent attention, ranges of attention, rotations that depend on length, indices of
    keys, and states of convolutions, linear attention, and Mamba."""
    tiny = tiny_configs()
    few = {name: tiny[name] for name in ("llama", "qwen3", "gemma3", "gpt2", "opt", "neox", "qwen3-moe")}
    latent = {
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    }
    routed = {"moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    return few | {
        "bloom": BloomConfig(vocab_size=211, hidden_size=48, n_layer=2, n_head=4),  # a bias of positions
        "mistral": MistralConfig(**COMMON, sliding_window=8),
        "gpt-oss": GptOssConfig(**COMMON, **EXPERTS, **SLIDING, head_dim=16),
        "deepseek-v3": DeepseekV3Config(
            **COMMON | {"num_key_value_heads": 4}, **latent, **routed, num_experts_per_tok=2, first_k_dense_replace=1
        ),
        "deepseek-v32": DeepseekV32Config(
            **COMMON | {"num_key_value_heads": 4}, **latent, **routed, num_experts_per_tok=2, first_k_dense_replace=1,
            index_topk=8, index_n_heads=16, index_head_dim=16,
        ),
        "qwen3-next": hybrid(),
        "mamba2": Mamba2Config(
            vocab_size=211, hidden_size=48, num_hidden_layers=2, num_heads=8, head_dim=12, state_size=8, n_groups=2,
            chunk_size=16,
        ),
        "llama4": Llama4TextConfig(
            **COMMON, head_dim=16, intermediate_size_mlp=72, num_local_experts=2, attention_chunk_size=16,
            no_rope_layers=[1, 1, 0],
        ),
        "phi3": Phi3Config(
            **COMMON, original_max_position_embeddings=16,
            rope_parameters={**rope, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
        ),
    }  # fmt: skip


OTHERS_STAND_FOR = ("gpt2", "llama4", "mistral", "neox", "opt", "qwen3", "qwen3-moe")
"""Families whose positions, windows, and experts others here have, too."""


def opened(config: PreTrainedConfig, adapters: LoraConfig | None = None) -> tuple[OpenModel, torch.nn.Module]:
    """Return a model for the engine, and the same in memory, trained as transformers trains it."""
    model = OpenModel(config, Precision(torch.float32), torch.device("cpu"), adapters)
    implementation = model.stack.model.config._attn_implementation
    torch.manual_seed(1)
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation=implementation).train()
    return model, plain


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in OTHERS_STAND_FOR)) for name in sorted(configs())],
)
def test_losses_and_gradients_are_those_of_whole_rows(family: str) -> None:
    model, plain = opened(configs()[family])
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    tokens = torch.randint(4, 200, (2, 61), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": tokens, "labels": tokens}
    expected = plain(**batch, use_cache=False).loss
    expected.backward()
    largest = max(float(value.grad.abs().max()) for value in parameters.values() if value.grad is not None)
    step = SmallStep(model, parameters)
    for chunk in (12, 27, 27):
        # Of 12: the last two; the second time, blocks recompute by the trace of the first
        assert step.run(batch, 1, chunk) == pytest.approx(float(expected.detach()), rel=1e-6)
        for name, gradient in step.gradients.items():
            there = parameters[name].grad
            assert (gradient is None) == (there is None)
            if gradient is not None:
                torch.testing.assert_close(gradient, there, rtol=0, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "phi3"])
def test_documents_that_share_a_row_stay_apart(family: str) -> None:
    """In windows, with sinks, and with rotations that depend on a document's length."""
    model, plain = opened(configs()[family])
    step = SmallStep(model, dict(plain.named_parameters(remove_duplicate=False)))
    tokens = torch.randint(4, 200, (2, 61), generator=torch.Generator().manual_seed(2))
    lengths = ((31, 30), (20, 3, 38))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    batch = {
        "input_ids": tokens,
        "labels": tokens.masked_fill(positions == 0, -100),
        "position_ids": positions,
    }
    expected, gradients = step.run(batch, 1), dict(step.gradients)
    largest = max(float(value.abs().max()) for value in gradients.values() if value is not None)
    for chunk in (9, 27):
        assert step.run(batch, 1, chunk) == pytest.approx(expected, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(step.gradients[name], gradient, rtol=0, atol=1e-5 * largest, msg=name)


def test_chunks_take_no_more_operations_than_a_whole_row() -> None:
    """Keys and values are not computed again, and every pair of tokens is counted once."""
    model, plain = opened(configs()["llama"])
    step = SmallStep(model, dict(plain.named_parameters(remove_duplicate=False)))
    tokens = torch.randint(4, 200, (1, 64))
    counts = []
    for chunk in (None, 16):
        step.run({"input_ids": tokens, "labels": tokens}, 1, chunk)
        with FlopCounterMode(display=False) as counter:
            step.run({"input_ids": tokens, "labels": tokens}, 1, chunk)
        counts.append(
            {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
        )
    whole, chunked = counts
    assert 0.9 * whole["aten.mm"] < chunked["aten.mm"] <= whole["aten.mm"]
    layers, heads, width, passes = 3, 4, 12, 2
    assert chunked["fuyou.attention_by_chunk"] == passes * layers * heads * 2 * 64 * 64 * 2 * width


def engine(path: Path, config: PreTrainedConfig, **options: Any) -> fuyou.Engine:
    path.mkdir(exist_ok=True)
    usual = {"host_memory": "600MiB", "host_cache": 0, "batch_shape": (4, 32), "dtype": "fp32", "lr": 1e-3}
    return fuyou.Engine(config, ssd=[path], **usual | {"prove": False} | options)


@pytest.mark.parametrize("options", [
    {},
    {"config": hybrid(), "router_loss": "off"},
    {"packed": True},
    pytest.param({"packed": True, "config": configs()["gpt-oss"]}, marks=pytest.mark.slow),
    pytest.param({"max_grad_norm": 0.3}, marks=pytest.mark.slow),
    {"adapters": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")},
    {"adapters": LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1, 2]), "frozen_dtype": "nf4"},
    pytest.param({"trainable": ["model.layers.2.*"]}, marks=pytest.mark.slow),
], ids=["all", "hybrid", "packed", "sinks", "clipped", "lora", "nf4", "part"])  # fmt: skip
def test_steps_and_evaluation_through_all_tiers(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row's keys and values on the device, two in host memory, and the others on the drives."""
    feed = batches(3, packed=options.get("packed", False))
    # A small one turns what rounding leaves of a zero gradient into whole updates
    options = options | {"eps": 1e-2}
    config = options.pop("config", tiny_configs()["llama"])
    seen = []
    for chunk in (None, 12):
        if chunk:
            scarce = SCARCE | {"ssd_activations": 80, "device_saved": 1, "host_saved": 2, "ssd_saved": 12}
            give_buffers(monkeypatch, scarce)
        with engine(tmp_path / str(chunk), config, chunk=chunk, **options) as trained:
            losses = [*train(trained, feed), trained.eval_loss(**feed[0])]
            seen.append((losses, dict(trained.named_parameters())))
            assert trained._run.runtime.memory_plan.batch.chunks == (3 if chunk else 1)
    (whole, masters), (chunked, others) = seen
    assert chunked == pytest.approx(whole, rel=1e-6)
    for name, master in masters.items():
        torch.testing.assert_close(others[name], master, rtol=0, atol=1e-6, msg=name)


def test_preferences_and_their_reference_pass_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DPO: the head runs again with gradients, and the reference keeps the keys of one row at a time."""
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    seen = []
    for chunk in (None, 12):
        if chunk:
            give_buffers(monkeypatch, {"device_saved": 1, "host_saved": 2, "ssd_saved": 13})
        with engine(
            tmp_path / str(chunk), tiny_configs()["llama"], chunk=chunk, adapters=adapters, eps=1e-2
        ) as trained:
            losses = []
            for batch in pairs(2):
                out = trained.tokens(**batch, reference=True)
                trained.backward(dpo({"log_probs": out.log_probs}, out.reference.log_probs))
                losses.append(trained.step().loss)
            with torch.no_grad():
                losses.append(float(trained.tokens(**batch).log_probs.sum()))
            seen.append((losses, dict(trained.named_parameters())))
            assert trained._run.runtime.memory_plan.batch.chunks == (3 if chunk else 1)
    (whole, masters), (chunked, others) = seen
    # The loss of a pair is computed from four sums over a row's tokens, each with a weight of about a quarter.
    rows, tokens = batch["input_ids"].shape
    apart = fp32_sum_rounding(whole[-1] / rows, tokens)
    assert (
        chunked[:-1] == pytest.approx(whole[:-1], rel=0, abs=apart) and abs(whole[0] - whole[1]) > 4 * apart
    )
    assert chunked[-1] == pytest.approx(whole[-1], rel=0, abs=rows * apart)
    for name, master in masters.items():
        torch.testing.assert_close(others[name], master, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(("chunk", "shown"), [(12, True), (None, False)])
def test_a_step_in_chunks_shows_how_far_it_is(chunk: int | None, shown: bool, tmp_path: Path) -> None:
    """When it has ended, nothing is shown."""
    shares = []

    def computed(self: StepComputation, task: ComputeTask) -> None:
        compute(self, task)
        doing = current_activity()
        shares.append(0.0 if doing is None else doing.share())

    compute = StepComputation._run
    (batch,) = batches(1, packed=False)
    with (
        engine(tmp_path, tiny_configs()["llama"], chunk=chunk) as trained,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(StepComputation, "_run", computed)
        train(trained, [batch])
        assert current_activity() is None
    assert shares == sorted(shares) and len(shares) > 8
    assert shares[-1] == (1.0 if shown else 0.0)


def test_a_continued_run_has_the_same_losses(tmp_path: Path) -> None:
    feed = batches(4, packed=False)
    with engine(tmp_path / "whole", tiny_configs()["llama"], chunk=12) as trained:
        expected = train(trained, feed)
    with engine(tmp_path / "parts", tiny_configs()["llama"], chunk=12) as trained:
        losses = train(trained, feed[:2])
    with engine(tmp_path / "parts", tiny_configs()["llama"], chunk=12, resume=True) as trained:
        assert losses + train(trained, feed[2:]) == expected


def test_rows_that_fit_stay_whole_to_the_bit(tmp_path: Path) -> None:
    feed = batches(2, packed=False)
    losses = []
    for chunk in (None, 32):
        with engine(tmp_path / str(chunk), tiny_configs()["llama"], chunk=chunk) as trained:
            losses.append(train(trained, feed))
            assert trained._run.runtime.memory_plan.batch.micro_rows == 4
    assert losses[0] == losses[1]


LONG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1 << 20,
)  # fmt: skip


def test_the_largest_chunk_that_fits_is_taken(tmp_path: Path) -> None:
    with engine(tmp_path, LONG, batch_shape=(1, 65536), host_memory="300MiB", prove=True) as trained:
        batch = trained._run.runtime.memory_plan.batch
        assert (
            batch.chunk is not None and 1024 <= batch.chunk < 32768 and batch.chunk & (batch.chunk - 1) == 0
        )
    with pytest.raises(UserError, match=rf"1 x {2 * batch.chunk} of 65536 tokens needs .* A smaller chunk"):
        engine(
            tmp_path,
            LONG,
            batch_shape=(1, 65536),
            host_memory="300MiB",
            chunk=2 * batch.chunk,
            overwrite=True,
        )


def test_models_without_a_cache_are_rejected(tmp_path: Path) -> None:
    config = OpenAIGPTConfig(vocab_size=211, n_positions=128, n_embd=48, n_layer=2, n_head=4)
    words = r"in chunks through this model, .* of earlier tokens\. Leave chunk out\."
    with pytest.raises(UserError, match=words):
        engine(tmp_path, config, chunk=16)


def test_what_does_not_pass_in_chunks_is_rejected(tmp_path: Path) -> None:
    llama = tiny_configs()["llama"]
    for options, words in (
        ({"padded": True}, "behind a mask that hides tokens"),
        ({"piece_size": "12KiB"}, "through blocks in pieces"),
    ):
        with pytest.raises(UserError, match=f"cannot pass in chunks {words}"):
            engine(tmp_path, llama, chunk=16, **options)
    classifier = LlamaConfig(**COMMON, architectures=["LlamaForSequenceClassification"], num_labels=3)
    with pytest.raises(UserError, match="cannot pass in chunks with one label for each"):
        engine(tmp_path, classifier, chunk=16)
    (batch,) = batches(1, packed=True)
    with pytest.raises(UserError, match=r"chunks of 16, in which nothing keeps the documents of a row apart"):
        engine(tmp_path, hybrid(), chunk=16, packed=True, router_loss="off")
    words = r"in chunks of 16, which cannot have position_ids of several documents"
    with (
        engine(tmp_path, hybrid(), chunk=16, router_loss="off") as trained,
        pytest.raises(UserError, match=words),
    ):
        trained(**batch)
    with engine(tmp_path, llama, chunk=16, overwrite=True) as trained:
        hidden = torch.ones_like(batch["input_ids"])
        hidden[:, -1] = 0
        with pytest.raises(
            UserError, match=r"cannot pass in chunks behind a mask|an attention_mask that hides tokens"
        ):
            trained(input_ids=batch["input_ids"], labels=batch["labels"], attention_mask=hidden)
        train(trained, batches(1, packed=False))


def test_a_state_does_not_meet_a_chunk_of_one_token(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="chunks of fewer than 3 tokens through this model, "):
        engine(tmp_path, hybrid(), chunk=2, router_loss="off")


def test_a_lost_gradient_of_earlier_keys_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prove_divided(LONG, chunks=True, packed=True)

    def backward(ctx: Any, given: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, start, first, end = ctx.places
        return given[..., start - first : end - first, :], None, None, None, None

    monkeypatch.setattr(chunks._Attended, "backward", backward)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"with rows in chunks: .* gradient of .*(k|v)_proj"):
        prove_divided(LONG, chunks=True)
