"""Plans at the shapes that models have: of every family's default configuration, and of published models."""

import json
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.errors import UserError, on_one_line
from common.hardware.presets import drive_preset, gpu_preset
from common.models.adapters.options import AdapterOptions
from common.models.presets import load_config
from common.units import format_count
from families.children import run_forked
from families.configurations import LACKING
from fuyou.layout.record import Precision
from fuyou.planner import describe_training, preset_machine
from fuyou.planner.evaluate import Evaluator
from fuyou.planner.machine import Machine
from fuyou.planner.plan import Candidate
from fuyou.planner.search import missing_space

PUBLISHED = Path(__file__).with_name("published.jsonl")
"""Models as their config.json has them, without the fields that are transformers' defaults. From copies of these files
in aic-core/src/aiconfigurator_core/model_configs of github.com/ai-dynamo/aiconfigurator at 095f58a."""
UNKNOWN = ("MiniMaxAI/MiniMax-M3", "moonshotai/Kimi-K3", "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
           "XiaomiMiMo/MiMo-7B-Base")  # fmt: skip
"""Of those copies, models whose code transformers does not have."""
MEMORY = 2 << 30  # Bytes that the process of one plan may allocate
ROWS, TOKENS = 8, 1024  # Of a step
WAYS = ("LoRA", "full")
_HOST_BYTES = 64 << 30
_DRIVES = 4


@dataclass
class ShapePlan:
    """What came of one model, trained in one way."""

    name: str
    way: str  # One of :data:`WAYS`
    parameters: int = 0
    reason: str = ""  # Why it is refused, if it is
    fp32: bool = False  # Whether in fp32, as bf16 is refused for hidden states that the family keeps in fp32
    crashed: bool = False  # Whether it ended in another error than a refusal, or took too much time or memory
    seconds: float = 0.0  # That the plan took

    @property
    def verdict(self) -> str:
        return "refused" if self.reason else "planned in fp32" if self.fp32 else "planned"

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON can carry it."""
        return asdict(self)


def published() -> dict[str, dict[str, Any]]:
    """Return the fields of published models' configurations, by name."""
    lines = PUBLISHED.read_text(encoding="utf-8").splitlines()
    return {fields.pop("name"): fields for fields in map(json.loads, lines)}


def shape_config(name: str) -> PreTrainedConfig:
    """Return the configuration of a published model, or a family's default as a causal decoder."""
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config = CONFIG_MAPPING[name](**LACKING.get(name, {}))
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]]
        if "is_decoder" in config.to_dict() and not config.is_encoder_decoder:
            config.is_decoder = True
    else:
        fields = published()[name]
        config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    return load_config(config)[0]


def plan_shapes(names: Sequence[str], jobs: int, seconds: float) -> Iterator[ShapePlan]:
    """Plan each model in all :data:`WAYS`, each in a separate process with a limit of memory and of time."""
    _plan(ShapePlan("", "LoRA"), load_config("llama-10m")[0])  # which imports what all of them need
    tasks = [(name, way) for name in names for way in WAYS]
    for task, result, failure in run_forked(tasks, _work, jobs=jobs, seconds=seconds):
        late = f"took more than {seconds:.0f} s"
        why = late if failure == "hang" else failure
        if result is None:
            name, way = task
            yield ShapePlan(name, way, reason=why, crashed=True)
        else:
            yield ShapePlan(**result)


def _work(task: tuple[str, str]) -> dict[str, Any]:
    began, plan = time.monotonic(), ShapePlan(*task)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        config = shape_config(plan.name)
        try:
            _plan(plan, config)
        except UserError as error:
            if "dtype fp32" not in str(error):
                raise
            plan.fp32 = True
            _plan(plan, config)
    except UserError as error:
        plan.reason = on_one_line(error)
    except Exception as error:
        plan.reason, plan.crashed = f"{type(error).__name__}: {on_one_line(error)}", True
    plan.seconds = time.monotonic() - began
    return plan.to_dict()


def _plan(plan: ShapePlan, config: PreTrainedConfig) -> None:
    adapters = AdapterOptions(rank=16).peft_config() if plan.way == "LoRA" else None
    precision = Precision(torch.float32 if plan.fp32 else torch.bfloat16)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or TOKENS
    job = describe_training(config, ROWS, min(TOKENS, context), precision=precision, adapters=adapters)
    plan.parameters = job.parameters
    machine = _machine(precision)
    Evaluator(job, machine).memory(Candidate())
    plan.reason = " ".join(missing_space(job.record_bytes, machine))


def _machine(precision: Precision) -> Machine:
    gpu, drive = gpu_preset("rtx-4090"), drive_preset("samsung-990-pro-4tb")
    return preset_machine(gpu, drive, _DRIVES, _HOST_BYTES, state_bytes=precision.state_bytes)


def shapes_section(plans: Sequence[ShapePlan]) -> list[str]:
    """Return the section of a page: what is planned, and why the rest is refused."""
    families = [plan for plan in plans if plan.name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    models = [plan for plan in plans if plan.name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    lines = ["| published model | parameters | LoRA | full |", "|---|---|---|---|"]
    for name in sorted({plan.name for plan in models}, key=str.lower):
        ways = {plan.way: plan for plan in models if plan.name == name}
        cells = [
            "refused" if plan.reason else "fp32" if plan.fp32 else "planned"
            for plan in (ways[way] for way in WAYS)
        ]
        lines.append(f"| {name} | {format_count(ways['full'].parameters)} | {cells[0]} | {cells[1]} |")
    lines += [""] if models else []
    for title, some in (("Families at their defaults", families), ("Published models", models)):
        for way in WAYS:
            these = [plan for plan in some if plan.way == way]
            if these:
                refused = sum(1 for plan in these if plan.reason)
                fp32 = sum(1 for plan in these if plan.fp32 and not plan.reason)
                in_fp32 = f" ({fp32} in fp32)" if fp32 else ""
                lines.append(f"* {title}, {way}: {len(these) - refused} planned{in_fp32}, {refused} refused.")
    lines += [""] + [
        f"* **{plan.name}**, {plan.way}: {_sentence(plan.reason)}." for plan in plans if plan.reason
    ]
    return lines


def _sentence(reason: str) -> str:
    return " ".join(reason.split()).partition(". ")[0].removesuffix(".")
