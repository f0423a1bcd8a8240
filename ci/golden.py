"""What is planned for AMD's devices, committed: a change of a choice, a layout, padding or a reason must show.

``python ci/golden.py [--write]``. ``plans.txt`` holds what is true of the plans of the published models over 1 to 8
ranks, in five ways to quantize them: each statement once, below it the plans that it holds for. Statements are the
kernels of a site and of its parts, from few rows to many, with layouts and formats; rows that a weight is padded
to; why no other kernel of as good a tier serves; what fell back. Nothing here runs or asks what is installed.
Exit status 1 where plans differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import hal_rocm
import hal_torch
import hal_triton
from hal_models.qwen3_5.config import Config, configure, quantized
from hal_models.qwen3_5.model import Qwen35
from hal_models.qwen3_5.published import PUBLISHED

import hal
import hal.composed
from hal.choice import Choice
from hal.kernel import TIERS
from hal.registry import Registry
from hal.report import Line, lines, pattern
from hal.resolving import Resolver

FILE = Path(__file__).parent / "plans.txt"
MODELS = tuple(name.removeprefix("qwen3.5-") for name in PUBLISHED)
SCHEMES = ("bf16", "fp8_channel", "fp8_block", "mxfp4+fp8", "mxfp4+fp8_all")
RANKS = ("1", "2", "4", "8")
DEVICES = ("mi300x", "mi308x", "mi355x")
KNOWN = ("is composed of this op", "makes nothing")  # said of each plan alike
PERIOD = 4  # layers, of which the last has full attention; the others repeat them


class Plan(NamedTuple):
    """One plan's name."""

    model: str
    scheme: str
    ranks: str
    device: str


ALL = Plan(MODELS, SCHEMES, RANKS, DEVICES)  # type: ignore[arg-type]
DENSE = tuple(name for name in MODELS if "-" not in name)
NAMED = {MODELS: "all models", DENSE: "dense", MODELS[len(DENSE) :]: "moe", SCHEMES: "all schemes"}
NAMED |= {RANKS: "1 2 4 8", DEVICES: "all devices"}
Statement = tuple[str, str]  # site and what is true there
Table = dict[Statement, set[Plan]]


@cache
def registry() -> Registry:
    """The kernels that may run on AMD."""
    return Registry.of(hal.composed.backend, hal_torch.backend, hal_triton.backend, hal_rocm.backend)


@cache
def config(model: str, scheme: str, layers: int = PERIOD) -> Config:
    """The configuration of so many of a model's layers."""
    found = configure(f"qwen3.5-{model}")
    return quantized(replace(found, layers=found.layers[:layers]), scheme)


def plans(device: str, models: Iterable[str] = MODELS, layers: int = PERIOD) -> Table:
    """The statements that are true of a device's plans."""
    found: Table = {}
    facts, kernels = hal.load_device(device), registry()
    resolver = Resolver(kernels, facts)
    for model, scheme, ranks in product(models, SCHEMES, RANKS):
        runtime = hal.Runtime(facts, hal.Policy(), kernels, load=False, world=int(ranks))
        runtime.resolver = resolver
        Qwen35(config(model, scheme, layers), runtime)
        for line in lines(runtime):
            for key in statements(line):
                found.setdefault(key, set()).add(Plan(model, scheme, ranks, device))
    return found


def statements(line: Line) -> Iterator[Statement]:
    """What is true of one line of a plan, and of the parts of its kernels."""
    extra = line.cells()[3]
    for part, choice in line.choice.walk():
        site = ".".join((pattern(line.site), part)).strip(".")
        found = f"{choice.op.title()} = {', then '.join(piece.kernel.name for piece in choice.pieces)}"
        yield site, found + (f" [{extra}]" if extra and not part else "")
        if padded := padding(choice):
            yield site, padded
        worst = max(TIERS.index(piece.kernel.tier) for piece in choice.pieces)
        tiers = {kernel.name: TIERS.index(kernel.tier) for kernel in registry().kernels(type(choice.op))}
        for one in choice.candidates:
            if one.status == "refused" and tiers[one.kernel] <= worst and not one.reason.startswith(KNOWN):
                yield site, f"not {one.kernel}: {one.reason}"
    if line.choice.fell_back:
        yield pattern(line.site), f"fell back: {line.choice.fell_back}"


def padding(choice: Choice) -> str:
    """Rows of a weight, and what its layout pads them to."""
    rows, multiple = getattr(choice.op, "rows", 0), getattr(choice.layouts.get("weight"), "multiple", 1)
    padded = -(-rows // multiple) * multiple
    return f"{rows} rows of the weight padded to {padded}" if padded != rows else ""


def products(plans: set[Plan]) -> list[str]:
    """Plans as few lines, each all combinations of what it lists."""
    groups: dict[tuple[tuple[str, ...], ...], None] = {tuple((x,) for x in plan): None for plan in plans}
    for axis in (3, 2, 1, 0):
        merged: dict[tuple[tuple[str, ...], ...], set[str]] = {}
        for group in groups:
            merged.setdefault((*group[:axis], *group[axis + 1 :]), set()).update(group[axis])
        groups = {
            (*rest[:axis], tuple(x for x in ALL[axis] if x in values), *rest[axis:]): None
            for rest, values in merged.items()
        }
    order = sorted(groups, key=lambda g: [[ALL[axis].index(x) for x in values] for axis, values in enumerate(g)])
    return [", ".join(NAMED.get(values, " ".join(values)) for values in group) for group in order]


def written(table: Table) -> str:
    """The file's text."""
    found: list[str] = []
    sites = dict.fromkeys(site for site, _ in sorted(table))
    for site in sites:
        found.append(f"== {site}")
        for statement in sorted(s for at, s in table if at == site):
            found += [statement, *(f"    {line}" for line in products(table[site, statement]))]
    return "\n".join(found) + "\n"


def read(text: str) -> Table:
    """The table that a text holds."""
    found: Table = {}
    site = statement = ""
    names = {name: values for values, name in NAMED.items()}
    for line in text.splitlines():
        if line.startswith("== "):
            site = line[3:]
        elif not line.startswith("    "):
            statement = line
        else:
            lists = [names.get(words, words.split(" ")) for words in line.strip().split(", ")]
            found.setdefault((site, statement), set()).update(Plan(*row) for row in product(*lists))
    return found


def differences(recorded: Table, found: Table) -> list[str]:
    """Statements that are no longer true of some plans (-), and those that newly are (+)."""
    text: list[str] = []
    for site, statement in sorted({*recorded, *found}):
        old, new = (table.get((site, statement), set()) for table in (recorded, found))
        for sign, plans_ in (("-", old - new), ("+", new - old)):
            if plans_:
                text += [f"{sign} {site}: {statement}", *(f"      {line}" for line in products(plans_))]
    return text


def of(device: str, table: Table) -> Table:
    """The statements about one device."""
    kept = {key: {plan for plan in plans_ if plan.device == device} for key, plans_ in table.items()}
    return {key: plans_ for key, plans_ in kept.items() if plans_}


def main(arguments: list[str]) -> int:
    found: Table = {}
    for device in DEVICES:
        for key, plans_ in plans(device).items():
            found.setdefault(key, set()).update(plans_)
    text = differences(read(FILE.read_text()) if FILE.exists() else {}, found)
    print("\n".join(text) or f"{len(found)} statements are as recorded")
    if "--write" in arguments:
        FILE.write_text(written(found))
        return 0
    return 1 if text else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
