"""The use of experts, counted while the model streams, is that of the model in memory."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.errors import UserError
from common.models.adapters.options import AdapterOptions
from fuyou.engine.expert_usage import profile_experts
from tests.helpers.engines import batches, directories
from tests.helpers.engines import engine as plain_engine
from tests.helpers.models.mixtures import MIXTURES, mixture_config, save_mixtures

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixtures(tmp_path_factory.mktemp("checkpoints"))


def by_hand(
    model: PreTrainedModel, feed: list[dict[str, torch.Tensor]]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and gates of each layer's experts, from the hidden states that reach its router, by the papers' rules."""
    family, config = model.config.model_type, model.config
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(name: str, router: torch.nn.Module, hidden: torch.Tensor, keep: torch.Tensor) -> None:
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]).float(), router.weight.float())
        if family == "deepseek_v3":
            scores = logits.sigmoid()
            groups = scores.view(-1, config.n_group, config.n_routed_experts // config.n_group)
            best = groups.topk(2, -1).values.sum(-1).topk(config.topk_group, -1).indices
            inside = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
            open_ones = scores.masked_fill(~inside.repeat_interleave(groups.shape[2], 1), 0.0)
            index = open_ones.topk(config.num_experts_per_tok, -1).indices
            gates = scores.gather(1, index)
            gates = gates / gates.sum(-1, keepdim=True) * config.routed_scaling_factor
        elif family == "gpt_oss":
            values, index = (logits + router.bias.float()).topk(config.num_experts_per_tok, -1)
            gates = values.softmax(-1)
        else:
            gates, index = logits.softmax(-1).topk(config.num_experts_per_tok, -1)
            if family == "mixtral" or config.norm_topk_prob:
                gates = gates / gates.sum(-1, keepdim=True)
        experts = logits.shape[1]
        tokens, sums = found.setdefault(name, (torch.zeros(experts), torch.zeros(experts, dtype=torch.float64)))
        for row in keep.nonzero().flatten().tolist():
            for expert, gate in zip(index[row].tolist(), gates[row].tolist(), strict=True):
                tokens[expert] += 1
                sums[expert] += gate

    for batch in feed:
        keep = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten()
        hooks = [
            module.register_forward_pre_hook(
                lambda router, args, name=name, keep=keep: note(
                    name.rpartition(".")[0] + ".experts", router, args[0], keep
                )
            )
            for name, module in model.named_modules()
            if name.endswith((".mlp.gate", ".mlp.router"))
        ]
        inputs = {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            model(**inputs, use_cache=False)
        for hook in hooks:
            hook.remove()
    return found


@pytest.mark.parametrize(("masked", "micro"), [(False, 3), (True, 4)])
@pytest.mark.parametrize("family", MIXTURES)
def test_is_that_of_the_model_in_memory(
    family: str, masked: bool, micro: int, checkpoints: Path, tmp_path: Path
) -> None:
    feed = batches(2, packed=False)
    if masked:
        for batch in feed:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][1, 20:] = batch["attention_mask"][3, 9:] = 0
            batch["labels"][batch["attention_mask"] == 0] = -100
    ssd = directories(tmp_path, 2)
    with plain_engine(checkpoints / family, ssd, "fp32", micro_batch=micro) as engine:
        before = engine.eval_loss(**feed[0])
        usage = profile_experts(engine, feed)
        assert engine.eval_loss(**feed[0]) == before
    expected = by_hand(AutoModelForCausalLM.from_pretrained(checkpoints / family, dtype=torch.float32), feed)
    assert usage.layers.keys() == expected.keys()
    for name, (tokens, gates) in expected.items():
        assert list(usage.layers[name].tokens) == tokens.tolist(), name
        torch.testing.assert_close(torch.tensor(usage.layers[name].gates, dtype=torch.float64), gates)
    counted = sum(int(batch.get("attention_mask", torch.ones(4, 32)).sum()) for batch in feed)
    assert all(sum(layer.tokens) == 2 * counted for layer in usage.layers.values())


def test_in_a_run_with_adapters_that_goes_on(checkpoints: Path, tmp_path: Path) -> None:
    """Names are those without adapters."""
    ssd, feed, model = directories(tmp_path, 1), batches(2, packed=True), checkpoints / "qwen3_moe"
    with plain_engine(model, ssd, adapters=AdapterOptions(4), micro_batch=2) as engine:
        usage = profile_experts(engine, feed)
        engine(**feed[0]).loss.backward()
        engine.step()
        after = profile_experts(engine, feed)
    assert list(usage.layers) == [f"model.layers.{layer}.mlp.experts" for layer in range(3)]
    with plain_engine(model, ssd, adapters=AdapterOptions(4), micro_batch=2, resume=True) as engine:
        assert engine.step_count == 1
        assert profile_experts(engine, feed) == after


def test_what_cannot_be_counted(checkpoints: Path, tmp_path: Path) -> None:
    with (
        plain_engine(checkpoints / "mixtral", directories(tmp_path, 1)) as engine,
        pytest.raises(UserError, match="no batches"),
    ):
        profile_experts(engine, [])
    drive = tmp_path / "other"
    drive.mkdir()
    device = "emulated:tflops=1,memory=4GiB,link=10GB/s"
    with (
        plain_engine(mixture_config("mixtral"), [drive], device=device) as engine,
        pytest.raises(UserError, match="emulated"),
    ):
        profile_experts(engine, batches(1, packed=False))
