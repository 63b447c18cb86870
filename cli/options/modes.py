"""What ``finetune`` can be asked to do, and which options each of that reads: any other is refused, not ignored."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import UserError

ALWAYS = frozenset({"config", "write_config", "debug"})
"""Options that say what to do with options, or with errors."""

_MODEL = frozenset({"model", "dtype", "optimizer_dtype", "single_slot", "seed", "train_vision"})
_ADAPTERS = frozenset({"lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "peft_config"})
_BATCH = frozenset({"batch_size", "seq_len", "micro_batch"})
_STEP = _MODEL | _ADAPTERS | _BATCH | {"frozen_dtype", "host_cache", "max_grad_norm", "clip_by", "on_nonfinite",
                                       "router_loss", "commit_every"}  # fmt: skip
"""What a step of one machine depends on."""
_BUDGETS = frozenset({"gpu", "device_memory", "host_memory"})
_PLACES = frozenset({"ssd", "output"})

_TO_PLAN = frozenset({"plan", "drive", "ssds", "network", "scheme", "max_model", "json", "trainable"})
_TO_DO = frozenset({"demo", "verify", "check", "profile"})


@dataclass(frozen=True)
class Mode:
    """One of the things that the command does."""

    takes: frozenset[str]
    """Names of options, as Python has them."""
    refusal: str
    """What to say about ``{names}`` that it does not take."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """What to say about some of them in particular."""

    def check(self, options: Collection[str], is_given: Callable[[str], bool]) -> None:
        """Refuse what is given and not taken.

        Args:
            options: names of all there are.
            is_given: whether somebody has asked for another than the default.

        Raises:
            UserError: names every such option.
        """
        wrong = [name for name in options if name not in self.takes | ALWAYS and is_given(name)]
        for name in wrong:
            if name in self.instead:
                raise UserError(f"{shown(name)} {self.instead[name]}")
        if wrong:
            raise UserError(self.refusal.format(names=_and([shown(name) for name in wrong])))


DEMO = Mode(
    frozenset({"demo", "output", "report", "overwrite"}),
    "--demo brings everything with it and cannot be combined with {names}.",
)
VERIFY = Mode(frozenset({"verify"}), "--verify trains nothing and cannot be combined with {names}.")
CHECK = Mode(
    _MODEL | _ADAPTERS | _PLACES | {"check", "frozen_dtype"},
    "--check trains nothing and cannot be combined with {names}.",
)
PROFILE = Mode(
    _STEP | _BUDGETS | _PLACES | {"profile"}, "--profile trains nothing and cannot be combined with {names}."
)
PROFILE_NODES = Mode(
    _BATCH | {"profile", "model", "dtype", "gpu", "output", "nodes", "gpus_per_node", "rdzv_endpoint", "node_timeout",
              "max_restarts", "levels"},
    "--profile with --nodes measures the network and cannot be combined with {names}.",
)  # fmt: skip
_CLUSTERS_ONLY = dict.fromkeys(
    ("trainable", "quantise", "cluster", "levels"), "belongs to plans for a cluster: add --cluster."
)
PLAN_HERE = Mode(
    _STEP
    | _BUDGETS
    | _PLACES  # what is to go on tells how often clipping has struck
    | {"plan", "scheme", "json", "trace", "resume", "ssds", "max_model"},  # the last two say more themselves
    "--plan trains nothing and cannot be combined with {names}.",
    {"network": "connects several nodes: add --nodes N.", **_CLUSTERS_ONLY},
)
PLAN_BY_NAME = Mode(
    _STEP | _BUDGETS | {"plan", "scheme", "json", "trace", "drive", "ssds", "max_model"},
    "--plan with --drive is for hardware by name and cannot be combined with {names}.",
    {"network": "connects several nodes: add --nodes N.", **_CLUSTERS_ONLY},
)
PLAN_RANKS = Mode(
    _STEP | _BUDGETS | {"plan", "json", "trace", "drive", "ssds", "network", "nodes", "gpus_per_node"},
    "--plan with --drive and --nodes is for one model that this program trains and cannot be combined with {names}.",
)
PLAN_CLUSTER = Mode(
    _BATCH | {"plan", "json", "model", "nodes", "gpus_per_node", "cluster", "levels", "quantise", "strategy",
              "trainable"},
    "{names} changes nothing in a plan for a cluster (bf16, with the hardware that --cluster describes): leave it out.",
    {
        "ssd": "is for a plan of this machine. For several nodes with SSDs, name their hardware: --gpu NAME --drive "
        "NAME --ssds N --network 25Gbit/s; for training in memory, leave --ssd out.",
        **dict.fromkeys(
            ("lora_rank", "peft_config", "frozen_dtype"),
            "changes nothing in a plan for a cluster: say which part of the parameters adapters are, --trainable 0.01.",
        ),
    },
)  # fmt: skip


def training(options: Collection[str]) -> Mode:
    """A run takes everything but what belongs to the others; what does not go together, its settings refuse."""
    return Mode(frozenset(options) - _TO_PLAN - _TO_DO, "Only --plan reads {names}: add that, or leave it out.")


def mode_of(options: Mapping[str, Any]) -> Mode:
    """What a parsed command line asks for."""
    if options["verify"]:
        return VERIFY
    if options["check"]:
        return CHECK
    if options["profile"]:
        return PROFILE if options["nodes"] is None else PROFILE_NODES
    if options["demo"]:
        return DEMO
    if not options["plan"]:
        return training(options)
    named = options["drive"] is not None
    if options["cluster"] or options["levels"] or (options["nodes"] and not named):
        return PLAN_CLUSTER
    if options["nodes"]:
        return PLAN_RANKS
    return PLAN_BY_NAME if named else PLAN_HERE


def shown(name: str) -> str:
    """An option as it is typed."""
    changed = {"save": "--no-save", "truncate": "--drop-long"}  # flags that are set by default
    return changed.get(name, f"--{name.replace('_', '-')}")


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
