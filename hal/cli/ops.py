"""``hal ops``: what there is to compute, and who can compute it."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import MISSING, fields
from typing import Any

from hal.cli.common import add_json, broken_json, print_broken
from hal.cli.show import plain, print_json, print_table
from hal.device import FACTS, Device, Fact
from hal.kernel import TIERS, Kernel
from hal.ops import COARSE, OPS, op_class
from hal.ops.base import Op
from hal.registry import Registry
from hal.requirement import Requirement

SCHEMA = "hal.ops/1"
NOWHERE = Device("nowhere", "none", {name: Fact(None, "declared") for name in FACTS})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", metavar="OP", help="everything about one op")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    op = op_class(args.op) if args.op else None
    registry = Registry.installed()
    if op is not None:
        data = one(op, registry)
        if args.json:
            print_json(data)
            return 0
        _print_one(data)
        print_broken(registry)
        return 0
    rows = [_row(cls, registry) for cls in OPS.values()]
    if args.json:
        print_json({"schema": SCHEMA, "ops": rows, "broken": broken_json(registry)})
        return 0
    for coarse, head in ((True, "coarse: what models call"), (False, "fine: what composed kernels are made of")):
        print(head)
        chosen = [row for row in rows if row["coarse"] is coarse]
        print_table(
            ("op", "kernels", "contract"), [(r["op"], _by_tier(r["kernels"]), r["contract"]) for r in chosen], 2
        )
    print_broken(registry)
    return 0


def _row(op: type[Op[..., Any]], registry: Registry) -> dict[str, Any]:
    kernels = registry.kernels(op)
    tiers = {tier: [k.name for k in kernels if k.tier == tier] for tier in TIERS}
    return {
        "op": op.title(),
        "coarse": op in COARSE,
        "contract": contract(op).splitlines()[0],
        "kernels": {tier: names for tier, names in tiers.items() if names},
    }


def contract(op: type[Op[..., Any]]) -> str:
    """The docstring, unindented."""
    return inspect.cleandoc(op.__doc__ or "no contract")


def one(op: type[Op[..., Any]], registry: Registry) -> dict[str, Any]:
    """Everything about one op: its contract, fields, an example problem, its kernels."""
    case = op.cases()[0]
    signature = case.op.signature()
    params = [{"name": p.name, "shape": p.shape, "dtype": p.dtype, "memory": p.memory} for p in case.op.params()]
    return {
        "schema": SCHEMA,
        "op": op.title(),
        "coarse": op in COARSE,
        "contract": contract(op),
        "fields": [
            {"name": f.name, "type": str(f.type), **({} if f.default is MISSING else {"default": plain(f.default)})}
            for f in fields(op)
        ],
        "example": {
            "case": case.name,
            "text": str(case.op),
            "problem": plain(case.op),
            "args": [str(a) for a in signature.args],
            "results": [str(r) for r in signature.results],
            "state": signature.state,
            "batch": signature.batch,
            "params": params,
            "states": [{"name": s.name, "shape": s.shape, "dtype": s.dtype} for s in case.op.states()],
        },
        "kernels": [
            {
                "kernel": k.name,
                "tier": k.tier,
                "needs": [need_text(n) for n in k.needs],
                "code": k.code,
                "about": inspect.cleandoc(type(k).__doc__ or ""),
            }
            for k in sorted(registry.kernels(op), key=_rank)
        ],
        "broken": broken_json(registry),
    }


def _rank(kernel: Kernel[Any]) -> tuple[int, str]:
    return TIERS.index(kernel.tier), kernel.name


def need_text(need: Requirement) -> str:
    """What is needed: the first half of the reason that a device of which nothing is known gets."""
    reason = need(NOWHERE)
    return str(reason).split("; ")[0].removeprefix("needs ") if reason else repr(need)


def _by_tier(kernels: dict[str, list[str]]) -> str:
    return "; ".join(f"{tier}: {', '.join(names)}" for tier, names in kernels.items()) or "none"


def _print_one(data: dict[str, Any]) -> None:
    example = data["example"]
    print(f"{data['op']} ({'coarse' if data['coarse'] else 'fine'})\n\n{data['contract']}\n")
    print_table(
        ("field", "type", "default"), [(f["name"], f["type"], f.get("default", "required")) for f in data["fields"]]
    )
    print(f"\nexample, case {example['case']!r}: {example['text']}")
    rows = [("takes", text) for text in example["args"]]
    rows += [("takes", name) for name in ("state", "batch") if example[name]]
    rows += [("gives", text) for text in example["results"]]
    rows += [("parameter", f"{p['name']}: {p['dtype']} {list(p['shape'])}") for p in example["params"]]
    rows += [("state", f"{s['name']}: {s['dtype']} {list(s['shape'])}") for s in example["states"]]
    print_table(("what", "of the example"), rows, 2)
    print()
    shown = [(k["kernel"], k["tier"], ", ".join(k["needs"]), k["code"]) for k in data["kernels"]]
    print_table(("kernel", "tier", "needs", "code"), shown)
