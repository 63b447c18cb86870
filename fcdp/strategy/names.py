"""Strategies by name, and what ``--strategy`` accepts."""

import re
from itertools import product
from typing import cast, get_args

from common.errors import UserError, did_you_mean
from fcdp.strategy.mesh import Scope
from fcdp.strategy.strategy import Ring, Strategy, Tier, WireFormats

AUTO = "auto"  # the name that leaves the choice to the planner


def _letters(scopes: str, name: str, *, ring: Ring = "flat", cache: Tier | None = None) -> Strategy:
    p, g, os = (Scope.parse(letter) for letter in scopes)
    return Strategy(name, p, g, os, ring=ring, cache=cache)


def _meshes(name: str, p: str, g: str, os: str) -> Strategy:
    return Strategy(name, Scope.parse(p), Scope.parse(g), Scope.parse(os))


def _zero_topo(name: str, secondary: Scope) -> Strategy:
    precision = WireFormats(gather="int8", secondary="int8", reduce="int4")
    p, g, os = Scope("pair"), Scope("I"), Scope("G")
    return Strategy(name, p, g, os, secondary=secondary, precision=precision, ring="hierarchical")


def _paro() -> list[str]:
    """Return the 14 strategies of table 1: OS is sharded at least as finely as P and as G (3.1.3, principle 1)."""
    return [p + g + os for p, g, os in product("NIG", repeat=3) if max(map("NIG".index, (p, g))) <= "NIG".index(os)]


ALIASES = {"hsdp": "mics", "hybrid": "mics"}  # FSDP's hybrid sharding, under its two names
PARO = tuple(_paro())  # scopes of P, G and OS as in table 1


def _presets() -> dict[str, Strategy]:
    everything = [
        _letters("NNN", "ddp"),
        _letters("NNG", "zero1"),
        _letters("NGG", "zero2"),
        _letters("GGG", "zero3"),
        _letters("III", "mics", ring="hierarchical"),
        # ZeRO++ (ZeRO-topo III-C): int8 gathers, a secondary partition in the node, int4 all-to-all reductions.
        Strategy(
            "zero++",
            Scope("G"),
            Scope("G"),
            Scope("G"),
            secondary=Scope("I"),
            precision=WireFormats(gather="int8", reduce="int4"),
            ring="hierarchical",
        ),
        # FCDP: P's shards in host memory. The second sums gradients inside the node while micro-batches accumulate, as
        # PaRO does: fewer bytes between nodes for more device memory.
        _letters("IGG", "fcdp", ring="hierarchical", cache="adaptive"),
        _letters("IIG", "fcdp-iig", ring="hierarchical", cache="adaptive"),
        *(_letters(scopes, f"paro-{scopes.lower()}", ring="ho") for scopes in PARO),
        # AMSP's choices (table IV).
        _meshes("amsp-7b", "1x1", "1x1", "8x1"),
        _meshes("amsp-13b", "4x1", "4x1", "8x1"),
        _meshes("amsp-30b", "8x1", "8x1", "8x4"),
        # ZeRO-topo (V): P over a pair, G over a node, OS over all; an int8 secondary partition over the pair, or over
        # the eight GCDs of a node (tables V and VII: "Sec-Degree=8").
        _zero_topo("zero-topo", Scope("pair")),
        _zero_topo("zero-topo-8", Scope("8x1")),
    ]
    return {strategy.name: strategy for strategy in everything}


PRESETS = _presets()  # strategies by name. Those that quantise have a twin that does not, with ``-exact`` appended.
PRESETS |= {
    exact.name: exact
    for exact in (strategy.without_quantisation() for strategy in PRESETS.values())
    if exact.name not in PRESETS
}


def parse_strategy(text: str) -> Strategy:
    """Return the strategy that a user names.

    ``text`` is a preset (``zero3``, ``paro-iig``), three letters (``IGG``), or three scopes (``I/G/G``,
    ``4x1/4x1/8x1``). To scopes, ``+device``, ``+host`` or ``+adaptive`` adds the tier of the cache, and ``+second`` a
    secondary partition over the node, ``+second=pair``, ``+second=2`` or ``+second=2x1`` one over a part of it."""
    name = text.strip().lower()
    name = ALIASES.get(name, name)
    if name in PRESETS:
        return PRESETS[name]
    scopes, *extras = name.split("+")
    if scopes in PRESETS:
        raise UserError(f"{text!r}: a preset comes with its cache. Write scopes instead, such as I/G/G+{extras[0]}.")
    if re.fullmatch(r"[nig]{3}", scopes):
        scopes = "/".join(scopes)
    parts = scopes.split("/")
    if len(parts) != 3:
        raise UserError(_unknown(text))
    p, g, os = (Scope.parse(part) for part in parts)
    secondary, cache = None, None
    for extra in extras:
        word, _, degree = extra.partition("=")
        if word == "second":
            secondary = Scope.parse(f"{degree}x1" if degree.isdigit() else degree or "node")
        elif extra in get_args(Tier):
            cache = cast(Tier, extra)
        else:
            known = (*get_args(Tier), "second")
            raise UserError(f"{text!r}: {extra!r} is not a cache tier.{did_you_mean(extra, known)}")
    written = "+".join(["/".join(map(str, (p, g, os))), *extras])
    return Strategy(written, p, g, os, secondary=secondary, cache=cache, ring="hierarchical")


def _unknown(text: str) -> str:
    hint = did_you_mean(text.strip().lower(), [*PRESETS, *ALIASES, AUTO])
    return (
        f"There is no strategy {text!r}.{hint} Name one ({', '.join(n for n in PRESETS if not n.startswith('paro-'))}, "
        f"paro-nnn to paro-ggg, {AUTO}), or write P/G/OS: I/G/G, 4x1/4x1/8x1."
    )
