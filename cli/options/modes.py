"""Modes of ``finetune``: which one a command line asks for. Options that it does not read are refused, not ignored."""

from collections.abc import Iterable, Mapping
from typing import Any

from cli.options.option import GroupedOption, Mode
from common.errors import UserError

_NAMES_NETWORK = {"network": "connects several nodes: add --nodes N."}
_CLUSTERS_ONLY = dict.fromkeys(("cluster", "levels"), "belongs to plans for a cluster: add --cluster.")

REFUSALS = {
    Mode.TRAIN: "Only --plan reads {names}: add that, or leave it out.",
    Mode.DEMO: "--demo brings everything with it and cannot be combined with {names}.",
    Mode.VERIFY: "--verify trains nothing and cannot be combined with {names}.",
    Mode.CHECK: "--check trains nothing and cannot be combined with {names}.",
    Mode.PROFILE: "--profile trains nothing and cannot be combined with {names}.",
    Mode.PROFILE_NODES: "--profile with --nodes measures the network and cannot be combined with {names}.",
    Mode.PLAN_HERE: "--plan trains nothing and cannot be combined with {names}.",
    Mode.PLAN_BY_NAME: "--plan with --drive is for hardware by name and cannot be combined with {names}.",
    Mode.PLAN_RANKS: "--plan with --drive and --nodes is for one model that this program trains and cannot be combined "
    "with {names}.",
    Mode.PLAN_CLUSTER: "{names} changes nothing in a plan for a cluster (bf16, with the hardware that --cluster "
    "describes): leave it out.",
}
"""Message about options that a mode does not read."""
ADVICE: dict[Mode, dict[str, str]] = {
    Mode.PLAN_HERE: _NAMES_NETWORK | _CLUSTERS_ONLY,
    Mode.PLAN_BY_NAME: _NAMES_NETWORK | _CLUSTERS_ONLY,
    Mode.PLAN_CLUSTER: {
        "ssd": "is for a plan of this machine. For several nodes with SSDs, name their hardware: --gpu NAME --drive "
        "NAME --ssds N --network 25Gbit/s; for training in memory, leave --ssd out.",
    },
}
"""Messages about some of them in particular, by name."""


def mode_of(options: Mapping[str, Any]) -> Mode:
    """Return what a parsed command line asks for."""
    if options["verify"]:
        return Mode.VERIFY
    if options["check"]:
        return Mode.CHECK
    if options["profile"]:
        return Mode.PROFILE if options["nodes"] is None else Mode.PROFILE_NODES
    if options["demo"]:
        return Mode.DEMO
    if not options["plan"]:
        return Mode.TRAIN
    named = options["drive"] is not None
    if options["cluster"] or options["levels"] or (options["nodes"] and not named):
        return Mode.PLAN_CLUSTER
    if options["nodes"]:
        return Mode.PLAN_RANKS
    return Mode.PLAN_BY_NAME if named else Mode.PLAN_HERE


def refuse_unread(mode: Mode, given: Iterable[GroupedOption]) -> None:
    """Refuse options that ``mode`` does not read.

    Args:
        mode: what is requested.
        given: options with another value than the default.

    Raises:
        UserError: names every such option.
    """
    unread = [option for option in given if mode not in option.declaration.modes]
    for option in unread:
        advice = ADVICE.get(mode, {}).get(option.name or "")
        if advice is not None:
            raise UserError(f"{option.shown} {advice}")
    if unread:
        *first, last = [option.shown for option in unread]
        names = f"{', '.join(first)} and {last}" if first else last
        raise UserError(REFUSALS[mode].format(names=names))
