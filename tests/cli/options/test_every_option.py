"""Every option of every command has an effect, or is refused by name; exceptions are listed with their reasons.

Each is given with a value that is not its default, in every situation of its command, and what the command would do is
compared with what it does without the option.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from cli.options.command import COMMANDS, Finetune
from cli.options.option import GroupedOption
from common.data.demo_text import train_demo_tokenizer
from tests.cli.options.observed import Observer
from tests.helpers.models.vision_families import FAMILIES

VALUES = {
    "model": "other-model", "output": "drive/out", "save_every": "2", "keep": "3", "log_every": "2",
    "eval_every": "2", "patience": "2", "max_hours": "1", "data": "other.jsonl", "columns": "prompt=body",
    "max_records": "3", "chat_template": "bare.jinja", "show_data": "1", "seq_len": "16", "batch_size": "64",
    "eval_data": "other.jsonl", "eval_split": "20%", "nodes": "2", "gpus_per_node": "4",
    "rdzv_endpoint": "localhost:29411", "node_timeout": "60", "max_restarts": "1", "strategy": "zero3",
    "device_cache_threshold": "0", "steps": "7", "epochs": "3", "warmup": "1", "min_lr": "1e-6", "beta1": "0.8",
    "beta2": "0.9", "beta": "0.3", "lora_rank": "2", "lora_alpha": "3", "lora_dropout": "0.5", "lora_targets": "q_proj",
    "peft_config": "adapter", "adapter": "other-adapter", "drive": "samsung-990-pro-4tb", "ssds": "2",
    "network": "10Gbit/s", "compare": "machines.toml",
    "cluster": "a800-hdr", "levels": "1,2,1", "html": "plan.html", "trace": "trace.json", "config": "options.toml",
    "ssd": "drive", "leave_ssd": "out", "commit_every": "3", "lr": "0.5", "max_grad_norm": "0.5", "seed": "3",
    "gpu": "a100-80g", "host_memory": "1GiB", "device_memory": "512MiB", "host_cache": "0", "piece_size": "4KiB",
    "micro_batch": "4", "chunk": "16", "drive_life": "1e9", "eps": "1e-3", "weight_decay": "0.5", "resume": "",
}  # fmt: skip
"""A value for each option that is neither a flag nor has a list of values."""

_BY_NAME = "--gpu 4090 --drive p5510 --host-memory 64GiB"
TRAINS = "--model tiny --data data.jsonl --seq-len 32 --output out"
LINES = {
    "train": f"train {TRAINS} --gpu cpu",
    "train, ranks in memory": f"train {TRAINS} --gpu cpu --nodes 1 --gpus-per-node 2",
    "plan": f"plan {TRAINS} {_BY_NAME}",
    "plan, cluster": f"plan {TRAINS} --cluster a40-1gbe",
    "plan, this machine": f"plan {TRAINS} --gpu cpu",
    "plan, machines": f"plan {TRAINS}",
    "plan, images": f"plan --model images {_BY_NAME}",
    "plan, images, adapters": f"plan --model images --lora-rank 2 {_BY_NAME}",
    "profile": "profile --model tiny --seq-len 32 --output out --gpu cpu",
    "profile, ranks": "profile --model tiny --seq-len 32 --output out --gpu cpu --nodes 1",
    "check": "check --model tiny --output out",
    "export": "export --model tiny --adapter adapter --output out",
    "evaluate": "evaluate --model tiny --data data.jsonl --seq-len 32 --gpu cpu",
    "chat": "chat --model tiny",
    "demo": "demo --output out",
}
"""Command lines that each option is added to."""

ONLY = {
    "train, ranks in memory": "nodes gpus_per_node rdzv_endpoint node_timeout max_restarts strategy cluster levels "
    "device_cache_threshold commit_every dtype micro_batch host_cache beta1 beta2 eps weight_decay max_grad_norm",
    "plan, this machine": "ssd output gpu nodes",
    "plan, machines": "compare",
    "plan, images": "train_vision",
    "plan, images, adapters": "train_vision",
}
"""Options that are looked at in a line; all where it is not here."""

_SEVERAL = "--nodes 2 --network 10Gbit/s"
NEXT_TO = {
    "train": {
        "nodes": "--rdzv-endpoint localhost:29411", "truncate": "--data long.jsonl",
        "beta": "--objective dpo --data pairs.jsonl",
        "drop_unseen": "--data unseen.jsonl --chat-template bare.jinja", "chat_template": "--data chats.jsonl",
        "objective=dpo": "--data pairs.jsonl", "objective=reward": "--data pairs.jsonl",
        "objective=classify": "--data classes.jsonl", "leave_ssd": "--ssd drive",
    },
    "train, ranks in memory": {"nodes": "--rdzv-endpoint localhost:29411", "rdzv_endpoint": "--nodes 2"},
    "plan": {
        "io": "--lora-rank 2 --host-cache 0", "router_loss": "--model mixture",
        "nodes": "--network 10Gbit/s", "gpus_per_node": _SEVERAL, "rdzv_endpoint": _SEVERAL,
        "node_timeout": _SEVERAL, "max_restarts": _SEVERAL, "beta": "--objective dpo",
    },
    "plan, cluster": {
        "router_loss": "--model mixture --batch-size 64",
    },
    "plan, this machine": {"nodes": "--ssd drive"},
    "profile, ranks": {"nodes": "--rdzv-endpoint localhost:29411", "rdzv_endpoint": "--nodes 2"},
    "evaluate": {
        "truncate": "--data long.jsonl", "drop_unseen": "--data unseen.jsonl --chat-template bare.jinja",
        "chat_template": "--data chats.jsonl",
    },
}  # fmt: skip
"""What an option, or a value of it, is given next to, by line; each option is given next to one that it needs."""


def because(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_ELSEWHERE = because("is tested in test_config_file.py and test_bad_input.py", "config debug")
_NUMBERS = because(
    "changes numbers, and not how many there are",
    "lr min_lr beta1 beta2 beta eps weight_decay warmup schedule seed lora_alpha",
)
_WRITES = because(
    "says what is written or printed, and a plan is of steps alone",
    "output save save_every keep log_every log_to",
)
_CALL = because(
    "is for the call that trains", "resume overwrite export show_data max_hours patience leave_ssd"
)
_RECORDS = because(
    "changes which records are taken, and a plan estimates tokens by the size of files",
    "columns max_records chat_template truncate drop_unseen eval_data eval_every",
)
_RANKS = because("says how ranks find each other", "rdzv_endpoint node_timeout max_restarts")
_SAME = because(
    "is what the default comes to here", "dtype=fp32 dtype=bf16 frozen_dtype=plain router_loss=off"
)
_SAME_SHAPE = because("has the tensors of sft", "objective=pretrain")
_FITTING = because(
    "changes the micro-batch that fits where memory is short: no more is measured",
    "host_memory device_memory host_cache piece_size lora_targets lora_alpha lora_dropout frozen_dtype",
)
_A_STEP = because(
    "a cluster's plan is of one step's transfers and operations",
    "data eval_split steps epochs commit_every max_grad_norm lora_dropout",
)
EXCEPTIONS = {
    "plan": _NUMBERS | _WRITES | _CALL | _RECORDS | _RANKS | _SAME_SHAPE
    | because("its price is not known: it was never measured on a GPU", "deterministic")
    | because("is what the planner chooses for so small a model", "clip_by=deferral"),
    "plan, cluster": _NUMBERS | _WRITES | _CALL | _RECORDS | _RANKS | _SAME_SHAPE | _A_STEP
    | because("moves copies that so small a model hides behind transfers", "device_cache_threshold"),
    "profile": _FITTING | _SAME_SHAPE,
    "profile, ranks": because(
        "is not read: the links of a cluster are measured, whatever is trained",
        "train_vision ssd host_cache router_loss objective lora_rank lora_alpha lora_dropout lora_targets peft_config "
        "adapter",
    ),
    "export": because("needs something to replace: test_evaluate.py", "overwrite"),
}  # fmt: skip
"""Options, or values of them, without an effect in a line, and why."""
NEVER = {
    "train": because("needs drives whose warranty is known", "drive_life")
    | because("needs a run that has begun: test_resumed.py, test_after_step.py", "resume export leave_ssd")
    | because("needs a GPU, or images, as in plans", "gpu train_vision")
    | because("needs a tracker's package: test_trackers.py", "log_to"),
    "plan": because("is given in place of --model: test_plan.py", "max_model"),
    "check": because("needs images, as in plans", "train_vision"),
    "export": because("needs a run that has begun: test_evaluate.py", "ssd overwrite")
    | because("refuses the adapters of another model", "model"),
    "evaluate": because("needs a GPU", "gpu"),
    "profile": because("needs a GPU", "gpu"),
}
"""Options that have an effect in no line of a command, as they are refused in all, and why."""


MUST_CHANGE = {("plan", "commit_every"): "ssd_written_bytes_per_step"}
"""The number of a plan that an option must change, where any option that changes how steps are simulated would change
another in its last digits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the command lines name."""
    folder = tmp_path_factory.mktemp("options")
    with contextlib.chdir(folder):
        write_inputs()
    return folder


def write_inputs() -> None:
    torch.manual_seed(0)
    for name, layers in (("tiny", 2), ("other-model", 1)):
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        tokens = {"vocab_size": 384, "max_position_embeddings": 64}
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes, **tokens)).save_pretrained(name)
        train_demo_tokenizer(384, Path(name))
    for name, rank in (("adapter", 3), ("other-adapter", 4)):
        adapted = get_peft_model(
            LlamaForCausalLM.from_pretrained("tiny"), LoraConfig(r=rank, target_modules=["v_proj"])
        )
        adapted.save_pretrained(name)
    mixture = {"num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1, **sizes, **tokens}
    AutoConfig.for_model("mixtral", architectures=["MixtralForCausalLM"], **mixture).save_pretrained(
        "mixture"
    )
    AutoConfig.for_model("gemma3", **FAMILIES["gemma3"]).save_pretrained("images")
    chats = [[{"role": role, "content": "Hello"} for role in ("system", "user", "assistant")]] * 9
    records: dict[str, list[dict[str, Any]]] = {
        "data.jsonl": [
            {"prompt": f"What is {i}?", "completion": f" {i * i}", "body": f"Body {i}"} for i in range(30)
        ],
        "other.jsonl": [{"prompt": f"How is {i}?", "completion": f" {i}", "body": f"{i}"} for i in range(25)],
        "long.jsonl": [
            {"prompt": "Count.", "completion": " " + "1 2 3 " * (1 + 40 * (i % 2))} for i in range(9)
        ],
        "pairs.jsonl": [{"prompt": f"{i}", "chosen": "yes", "rejected": "no"} for i in range(9)],
        "classes.jsonl": [{"text": f"Text {i}", "label": "ab"[i % 2]} for i in range(9)],
        "chats.jsonl": [{"messages": chat[1:]} for chat in chats],
        "unseen.jsonl": [{"messages": chat[i % 2 :]} for i, chat in enumerate(chats)],
    }
    for name, content in records.items():
        Path(name).write_text("".join(json.dumps(record) + "\n" for record in content))
    turn = "{{ m['role'] }}: {{ m['content'] }}\n"
    Path("bare.jinja").write_text(f"{{% for m in messages if m['role'] != 'system' %}}{turn}{{% endfor %}}")
    Path("drive").mkdir()
    Path("options.toml").write_text("debug = true\n")
    Path("machines.toml").write_text('[pc]\ngpu = "rtx-4090"\ndrive = "intel-p5510-3.84tb"\n')


def ways(option: GroupedOption) -> dict[str, list[str]]:
    """Return each way to give an option another value than its default, by a name for it."""
    name = option.name or ""
    if option.is_flag:
        return {name: [option.shown]}
    if isinstance(option.type, click.Choice):
        return {
            f"{name}={value}": [option.opts[0], value]
            for value in option.type.choices
            if value != option.default
        }
    return {name: [option.opts[0], *VALUES[name].split()]}


def needed(option: GroupedOption, options: dict[str, GroupedOption], words: list[str]) -> list[str]:
    """Return what an option needs, unless it is in ``words``, and what that needs."""
    others = [options[name] for name in option.declaration.needs.split() if name in options]
    if not others or any(other.opts[0] in words for other in others):
        return []
    return [*needed(others[0], options, words), *next(iter(ways(others[0]).values()))]


_LONG = ("train", "plan")  # They have most of the options


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in _LONG else [])
        for name in COMMANDS
        if name != "verify"  # it has no options but those of _ELSEWHERE
    ],
)
def test_every_option_has_an_effect_or_is_refused(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    observer, faults = Observer(monkeypatch, capfd), []
    options = {
        option.name or "": option for option in Finetune(lambda name: 0).get_command(None, command).options
    }
    options = {name: option for name, option in options.items() if name not in _ELSEWHERE}
    never = options.keys() - NEVER.get(command, {}).keys()
    for line in (line for line in LINES if line.split(",")[0] == command):
        words, next_to, exceptions = LINES[line].split(), NEXT_TO.get(line, {}), EXCEPTIONS.get(line, {})
        assert observer.observe(*words).status == 0, line
        for name in ONLY[line].split() if line in ONLY else options:
            for way, added in ways(options[name]).items():
                more = next_to.get(way, next_to.get(name, "")).split()
                start = [*words, *needed(options[name], options, [*words, *more]), *more]
                before, after = observer.observe(*start), observer.observe(*start, *added)
                if (line, name) in MUST_CHANGE:
                    before, after = (
                        plan._replace(text=plan.number(MUST_CHANGE[line, name])) for plan in (before, after)
                    )
                shown = " ".join([f"{line}:", *start[len(words) :], *added])
                named = [
                    word for word in (options[name].shown, *start[len(words) :]) if word.startswith("--")
                ]
                if after.status and not any(word in after.text for word in named):
                    faults.append(f"{shown} is refused without its name: {after.text}")
                elif not after.status and after != before:
                    never.discard(name)
                    faults += [f"{shown} has an effect, and is an exception"] * (name in exceptions)
                elif not after.status and not {name, way} & (exceptions | _SAME).keys():
                    faults.append(f"{shown} has no effect")
        never -= exceptions.keys()
    faults += [f"{command} {options[name].shown} has no effect in any line" for name in sorted(never)]
    assert not faults, "\n".join(faults)
