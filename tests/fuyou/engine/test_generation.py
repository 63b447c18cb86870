"""Generation out of core gives, token for token, what transformers' own generate gives in memory."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import AutoModelForCausalLM, MistralConfig

import fuyou
from common.errors import FinetuneError, UserError
from fuyou.layout.record import Kind
from tests.helpers.adapters import DTYPES
from tests.helpers.engines import batches, directories, engine, train
from tests.helpers.twin import tiny_configs

LENGTHS = (9, 4, 12, 7, 12)
LAYERS = 9
"""Blocks of a deep model: more than there are buffers for."""
NEW = 21
"""New tokens: more than a sliding window of 8 holds."""


pytestmark = pytest.mark.filterwarnings("ignore")  # peft says that it sets fan_in_fan_out for GPT-2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, configs = tmp_path_factory.mktemp("checkpoints"), tiny_configs()
    llama = configs["llama"].to_dict()
    configs["mistral"] = MistralConfig(
        **{name: llama[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=70,
        max_position_embeddings=256,
    )
    configs["deep"] = tiny_configs()["gpt2"]
    configs["deep"].n_layer = LAYERS
    for name in ("deep", "llama", "gpt2", "qwen3-moe", "gemma3", "opt", "mistral"):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(configs[name])
        for parameter in model.parameters():  # larger ones, so that the likeliest token is not the newest one
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        if name == "gemma3":  # whose embeddings are multiplied, and are the head's, too
            torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.02)
        model.save_pretrained(root / name)
    return root


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 200, (length,), generator=generator) for length in lengths]


def in_memory(model: torch.nn.Module, rows: list[torch.Tensor], new: int = NEW) -> list[list[int]]:
    """What transformers generates greedily from left-padded prompts."""
    longest = max(map(len, rows))
    ids = torch.stack([functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    made = model.eval().generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return made[:, longest:].tolist()


def greedy(trained: fuyou.Engine, rows: list[torch.Tensor], new: int = NEW, **options) -> list[list[int]]:
    made = trained.generate(rows, new, temperature=0, eos_token_id=(), **options)
    return [row.tolist() for row in made.tokens]


@pytest.mark.parametrize(
    ("family", "dtype", "micro"),
    [
        ("llama", "fp32", 2),
        ("llama", "bf16", 5),
        ("gpt2", "fp32", 5),
        ("gpt2", "bf16", 5),
        ("qwen3-moe", "fp32", 3),
        ("gemma3", "fp32", 5),
        ("gemma3", "bf16", 5),
        ("opt", "fp32", 2),
        ("mistral", "fp32", 2),
    ],
)
def test_greedy_is_transformers_own(family: str, dtype: str, micro: int, checkpoints: Path, tmp_path: Path) -> None:
    real = AutoModelForCausalLM.from_pretrained(checkpoints / family, dtype=DTYPES[dtype])
    new = 90 if family == "mistral" else NEW
    expected = in_memory(real, prompts(), new)
    assert len(set(map(tuple, expected))) == len(LENGTHS) and len(set(expected[0])) > 5  # it is about something
    planned = {"micro_batch": micro, "generation": (len(LENGTHS), max(LENGTHS), new)}
    with engine(checkpoints / family, directories(tmp_path, 1), dtype, **planned) as trained:
        assert greedy(trained, prompts(), new) == expected


def adapters() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize(("frozen", "dtype"), [(None, "bf16"), ("int8", "fp32")])
def test_with_adapters_and_fewer_bits(frozen: str | None, dtype: str, checkpoints: Path, tmp_path: Path) -> None:
    """What generates is what training has made; and without its adapters, what it was."""
    options = {"adapters": adapters(), "frozen_dtype": frozen, "micro_batch": 5, "lr": 0.05}
    options["generation"] = (len(LENGTHS), max(LENGTHS), NEW)
    with engine(checkpoints / "llama", directories(tmp_path, 1), dtype, **options) as trained:
        before = greedy(trained, prompts())
        train(trained, batches(3, packed=False))
        after, masters = greedy(trained, prompts()), {name: value.clone() for name, value in trained.named_parameters()}
        with trained.disable_adapters():
            assert greedy(trained, prompts()) == before
    real = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoints / "llama", dtype=DTYPES[dtype]), adapters())
    renamed = {
        name.replace(".default", "").replace("base_model.model.", ""): name for name, _ in real.named_parameters()
    }
    with torch.no_grad():
        for name, value in masters.items():
            real.get_parameter(renamed[name.replace(".default", "")]).copy_(value)
    assert after == in_memory(real, prompts()) != before


@pytest.mark.parametrize("planned", [True, False])
def test_training_goes_on_as_without(planned: bool, checkpoints: Path, tmp_path: Path) -> None:
    """Bit for bit, with an update that waits; and every pass reads the weights once."""
    runs = []
    for name in ("never", "between"):
        (tmp_path / name).mkdir()
        options = {"deferred_fraction": 0.67, "commit_every": 2, "max_grad_norm": 0.5}
        options |= {"generation": (3, 12, 5)} if planned else {}
        with engine(checkpoints / "deep", directories(tmp_path / name, 1), **options) as trained:
            losses = train(trained, batches(3, packed=True))
            if name == "between":
                trained.flush()
                read = trained.io_bytes()[0]
                made = trained.generate(prompts((3, 12, 6)), 5, eos_token_id=())
                assert made.passes == 5 and [len(row) for row in made.tokens] == [5, 5, 5]
                # Some of the blocks may still be in the buffers from the pass before; none is read twice.
                layout, kept = trained._run.shape, trained.memory_plan.counts.host_blocks
                block, outer = (layout.parameter_nbytes(kind) for kind in (Kind.BLOCK, Kind.NON_BLOCK))
                per_pass = [(LAYERS - kept) * block, LAYERS * block + 2 * outer]
                assert kept < LAYERS and 5 * per_pass[0] <= trained.io_bytes()[0] - read <= 5 * per_pass[1]
            losses += train(trained, batches(5, packed=True)[3:])
            assert trained.io_bytes() == trained.planned_io_bytes()
            runs.append((losses, {key: value.clone() for key, value in trained.named_parameters()}))
    assert runs[0][0] == runs[1][0]
    for key, value in runs[0][1].items():
        assert torch.equal(value, runs[1][1][key]), key


@pytest.mark.slow
def test_keys_and_values_in_host_memory(checkpoints: Path, tmp_path: Path) -> None:
    """Where the device has no room for them, they pass through it."""
    for family in ("llama", "gemma3"):
        (tmp_path / family).mkdir()
        real = AutoModelForCausalLM.from_pretrained(checkpoints / family, dtype=torch.float32)
        rows = prompts((12,) * 64)
        expected = in_memory(real, rows, 50)
        options = {"micro_batch": 8, "generation": (64, 12, 50), "device_memory": "2MiB", "batch_shape": (4, 12)}
        with engine(checkpoints / family, directories(tmp_path / family, 1), "fp32", **options) as trained:
            cache = trained.memory_plan.batch.cache
            assert cache is not None and cache.device_layers < len(cache.layers) and cache.host_bytes
            assert trained.memory_plan.device_bytes <= 2 << 20
            assert greedy(trained, rows, 50) == expected


def test_sampling_is_by_the_models_probabilities(checkpoints: Path, tmp_path: Path) -> None:
    rows = prompts((4, 9, 6))
    padded = torch.stack([functional.pad(row, (0, 9 - len(row))) for row in rows])
    mask = torch.stack([functional.pad(torch.ones_like(row), (0, 9 - len(row))) for row in rows])
    with engine(checkpoints / "llama", directories(tmp_path, 1), "fp32", generation=(3, 9, 12)) as trained:
        options = {"temperature": 0.7, "top_p": 0.9, "eos_token_id": ()}
        one, again, other = (trained.generate(rows, 12, seed=seed, **options) for seed in (1, 1, 2))
        right = trained.generate(padded, 12, seed=1, attention_mask=mask, **options)
        left = trained.generate(padded.flip(1), 12, attention_mask=mask.flip(1), temperature=0, eos_token_id=())
        same = [list(map(torch.Tensor.tolist, made.tokens)) for made in (one, again, right)]
        assert same[0] == same[1] == same[2] != list(map(torch.Tensor.tolist, other.tokens))
        assert [row.tolist() for row in left.tokens] == greedy(trained, [row.flip(0) for row in rows], 12)
        whole = torch.cat([rows[1], one.tokens[1]]).unsqueeze(0)
        with torch.no_grad():
            expected = trained.tokens(input_ids=whole).log_probs[0, 8:-1]
        torch.testing.assert_close(one.log_probs[1], expected, rtol=1e-5, atol=1e-5)
        end = int(one.tokens[2][4])  # which then ends that sequence, and whichever else has it
        seen: list[list[int | None]] = []
        ended = trained.generate(rows, 12, seed=1, temperature=0.7, top_p=0.9, eos_token_id=end, on_tokens=seen.append)
        first = one.tokens[2].tolist().index(end)
        assert ended.tokens[2].tolist() == one.tokens[2].tolist()[: first + 1]
        assert [step[2] for step in seen[: first + 2]][-1] is None or len(seen) == first + 1


def test_whole_sequences_again(checkpoints: Path, tmp_path: Path) -> None:
    """Without a cache, and with blocks in pieces, which have none."""
    real = AutoModelForCausalLM.from_pretrained(checkpoints / "llama", dtype=torch.float32)
    expected = in_memory(real, prompts(), 6)
    with engine(checkpoints / "llama", directories(tmp_path, 1), "fp32", piece_size="8KiB") as trained:
        with pytest.raises(UserError, match="computed in pieces, in which nothing is kept"):
            greedy(trained, prompts(), 6)
        assert greedy(trained, prompts(), 6, use_cache=False) == expected


@pytest.mark.slow
def test_what_cannot_be_generated_is_said(checkpoints: Path, tmp_path: Path) -> None:
    with engine(checkpoints / "llama", directories(tmp_path, 1), "fp32") as trained:
        for asked, message in (
            (([[]], 3), "needs at least one token"),
            (([[5]], 0), "at least 1, not 0"),
            (([[5]], 10**4), "more than the model's"),
            (([[5, 999]], 3), "a token that the model does not have"),
            ((torch.ones(2, 3, dtype=torch.int64), 3, {"attention_mask": torch.ones(3)}), "must have the shape"),
            (([[5]], 3, {"temperature": -1.0}), "temperature must be 0 or"),
            (([[5]], 3, {"top_p": 0.0}), "top_p must be above 0"),
        ):
            with pytest.raises(UserError, match=message):
                trained.generate(asked[0], asked[1], **(asked[2] if len(asked) > 2 else {}))
        with pytest.raises(UserError, match=r"of keys and values, .* of each sequence, .*at most \d+ at once"):
            trained.generate([[5] * 40] * 20000, 20)

        def stop(_: list[int | None]) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            trained.generate([[5]], 3, on_tokens=stop)
        batch = batches(1, packed=False)[0]
        out = trained(**batch)
        with pytest.raises(FinetuneError, match="A step is under way"):
            trained.generate([[5]], 3)
        out.loss.backward()
        trained.step()
        assert len(greedy(trained, prompts((4,)), 3)[0]) == 3
