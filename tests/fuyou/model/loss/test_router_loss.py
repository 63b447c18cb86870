"""Router losses are those of the model in memory with ``output_router_logits`` on, which sees whole batches at once."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, DogeConfig, PreTrainedConfig

import fuyou
from common.errors import UserError
from fuyou.layout.record import Precision
from fuyou.model.loss.router_loss import RouterLoss
from fuyou.model.open_model import OpenModel
from fuyou.schedule.workspace import ROUTER_BYTES
from tests.helpers.engines import ROWS, TOKENS, compare, directories
from tests.helpers.models.routers import config_of
from tests.helpers.twin import Twin, tiny_configs

#: With Adam's ordinary epsilon, gradients that are rounding alone would make updates of the learning rate's size.
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3}
STEPS = 3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for family in ("mixtral", "qwen3-moe", "gpt-oss"):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config_of(family))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "router" in name or "gate.weight" in name:
                    parameter.mul_(20)  # experts are far from balanced
        model.save_pretrained(root / family)
    return root


def feed(count: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Random tokens; in every second batch, rows end in padding, by their own lengths."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for number in range(count):
        tokens = torch.randint(3, 211, (ROWS, TOKENS), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens}
        if number % 2:
            mask = (torch.arange(TOKENS) < torch.tensor([TOKENS, 20, 9, 27])[:, None]).long()
            batch |= {"labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}
        result.append(batch)
    return result


def engine(model: Path | PreTrainedConfig, ssd: list[Path], **options: Any) -> fuyou.Engine:
    options = {
        "dtype": "fp32", "host_memory": "600MiB", "host_cache": 0, "batch_shape": (ROWS, TOKENS), **OPTIONS, **options
    }  # fmt: skip
    return fuyou.Engine(model, ssd=ssd, **options)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss"])
@pytest.mark.slow
def test_equals_the_model_in_memory(
    family: str, micro_batches: int, checkpoints: Path, tmp_path: Path
) -> None:
    """Which never splits its batch: to the bit where the engine does not either, else but for rounding."""
    twin = Twin(str(checkpoints / family), bf16=False, max_grad_norm=None, **OPTIONS)
    without = Twin(str(checkpoints / family), bf16=False, max_grad_norm=None, **OPTIONS)
    without.model.config.output_router_logits = False
    whole = micro_batches == 1
    with engine(checkpoints / family, directories(tmp_path, 1), micro_batch=ROWS // micro_batches) as trained:
        for batch in feed():
            out = trained(**batch)
            out.loss.backward()
            report = trained.step()
            expected, plain = twin.step(batch, ROWS), without.step(batch, ROWS)
            assert (
                out.loss.item() == expected
                if whole
                else math.isclose(out.loss.item(), expected, rel_tol=1e-6)
            )
            assert math.isclose(report.grad_norm, twin.grad_norm, rel_tol=1e-12 if whole else 1e-6)
            assert not math.isclose(report.grad_norm, without.grad_norm, rel_tol=1e-2)
            assert report.aux_loss == out.aux_loss and expected - plain == pytest.approx(
                0.5 * out.aux_loss, rel=1e-2
            )
        if whole:
            compare(trained, twin)
        for name, value in trained.named_parameters():
            assert (value - twin.masters[name]).abs().max() <= 1e-6, name
        assert max((without.masters[name] - value).abs().max() for name, value in twin.masters.items()) > 1e-4
        with torch.no_grad():
            expected = float(twin.model.eval()(**batch).loss)
        assert math.isclose(trained.eval_loss(**batch), expected, rel_tol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_bf16_and_activations_that_are_kept(family: str, checkpoints: Path, tmp_path: Path) -> None:
    """Recomputation takes its short cuts around what the router loss needs."""
    twin = Twin(str(checkpoints / family), bf16=True, max_grad_norm=None, **OPTIONS)
    drives = directories(tmp_path, 1)
    with engine(
        checkpoints / family, drives, dtype="bf16", micro_batch=ROWS, saved_activations="1MiB"
    ) as trained:
        for batch in feed(4):
            out = trained(**batch)
            out.loss.backward()
            report = trained.step()
            assert out.loss.item() == twin.step(batch, ROWS)
        assert report.recomputation_saved > 0.5 and report.saved_activation_bytes > 0
        compare(trained, twin)


def test_adapters_below_a_frozen_router(checkpoints: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    batch = feed(2)[1]
    with engine(checkpoints / "mixtral", directories(tmp_path, 1), adapters=config, micro_batch=1) as trained:
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoints / "mixtral"), config).train()
        values = dict(trained.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name.removeprefix("base_model.model.")])
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        trained_ones = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        norm = float(nn.utils.get_total_norm(trained_ones))
        out = trained(**batch)
        out.loss.backward()
        assert math.isclose(out.loss.item(), loss.item(), rel_tol=1e-6)
        assert math.isclose(trained.step().grad_norm, norm, rel_tol=1e-5)


def open_model(config: PreTrainedConfig, router_loss: str = "auto") -> OpenModel:
    return OpenModel(config, Precision.named("fp32"), torch.device("cpu"), router_loss=router_loss)


def test_what_is_requested() -> None:
    on, off = config_of("mixtral"), config_of("mixtral", output_router_logits=False)
    expected = RouterLoss(0.5, 4, 2)
    for config, choice in ((on, "auto"), (on, "on"), (off, "on")):
        opened = open_model(config, choice)
        assert opened.router_loss == expected
        assert opened.config.output_router_logits is (config is on), "what is exported"
        assert not opened.stack.model.config.output_router_logits, "the model itself collects nothing"
        assert opened.layout.router_experts == 4
    for config, choice in ((on, "off"), (off, "off"), (off, "auto"), (tiny_configs()["llama"], "auto")):
        assert open_model(config, choice).router_loss is None
    with pytest.raises(UserError, match="LlamaForCausalLM has no router loss"):
        open_model(tiny_configs()["llama"], "on")
    with pytest.raises(UserError, match=r"router_loss is auto, on or off, not 'of'. Did you mean 'off'\?"):
        open_model(on, "of")


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "output_router_logits": True,
}  # fmt: skip


def test_a_family_whose_loss_does_not_change() -> None:
    config = DeepseekV3Config(
        **SMALL, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    assert open_model(config).router_loss is None
    with pytest.raises(UserError, match="has no router loss"):
        open_model(config, "on")


def test_a_loss_of_another_kind_is_rejected() -> None:
    """Doge's experts are found by products of keys: its loss is not one of sums over experts."""
    config = DogeConfig(**SMALL, is_moe=True, num_experts=16, num_experts_per_tok=2)
    with pytest.raises(UserError, match=r"'doge' model has .* not that of Mixtral .*router_loss off"):
        open_model(config)
    assert open_model(config, "off").router_loss is None


def test_memory_is_planned(tmp_path: Path) -> None:
    config, workspaces = config_of("mixtral"), []
    for choice in ("off", "on"):
        ssd = tmp_path / choice
        ssd.mkdir()
        with engine(config, [ssd], router_loss=choice, micro_batch=2) as made:
            workspaces.append(made.memory_plan.workspace_bytes)
    assert workspaces[1] - workspaces[0] == ROUTER_BYTES * 4 * 2 * TOKENS
