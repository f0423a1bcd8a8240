"""What runs where, and why nothing else does: facts in, choices out, nothing loaded."""

import random
import re
from contextlib import suppress
from typing import get_args

import pytest
from facts import device, fake, registry

from hal.choice import Choice
from hal.device import Device, load_device, profiles
from hal.errors import HalError, UnresolvedError
from hal.kernel import Part
from hal.layout import Packed, Padded, Separate
from hal.ops import OPS, Gemm, InProj, Linear, MoE, Projection, SiluMul
from hal.policy import Policy
from hal.registry import Registry
from hal.requirement import Kind, Reason, library
from hal.resolving import Resolver

ODD = InProj(hidden=16, parts=(Projection("q", 30, "qk"), Projection("k", 6, "qk"), Projection("b", 3, "b")))
EVEN = InProj(hidden=16, parts=(Projection("q", 32, "qk"), Projection("b", 8, "b")))
EXPERTS = MoE(hidden=16, intermediate=8, experts=4, top_k=2, shared_intermediate=8)
SILU = SiluMul(columns=8)
LINEAR = Linear(columns=8, rows=8)
WHOLE = fake(Linear, "whole", tier="composed", parts=lambda self, op: {"gemm": Part(Gemm(columns=8, rows=8))})
KNOWN, INSTALLED = registry(), Registry.installed()


def choose(op, on: Device | str = "cpu", have: Registry = KNOWN, **policy) -> Choice:
    facts = load_device(on) if isinstance(on, str) else on
    return Resolver(have, facts).resolve((op,), Policy.of(**policy).at("site"))[0]


def pieces(choice: Choice) -> list[tuple[int, int | None, str]]:
    return [(*piece.rows, piece.kernel.name) for piece in choice.pieces]


def refused(choice: Choice) -> dict[str, tuple[str, str]]:
    return {c.kernel: (c.kind, c.reason) for c in choice.candidates if c.status == "refused"}


WIDE = [(1, 1024, "torch.padded"), (1025, None, "torch.separate")]


@pytest.mark.parametrize(
    ("op", "on", "deny", "wanted", "layout"),
    [
        (ODD, "h200", [], WIDE, Padded(8)),
        (EVEN, "h200", [], [(1, None, "torch.packed")], Packed()),
        (ODD, "h200", ["torch.padded"], [(1, None, "torch.separate")], Separate()),
        (EVEN, "h200", ["torch.packed"], [(1, None, "torch.separate")], Separate()),
        (ODD, "cpu", [], [(1, None, "torch.packed")], Packed()),
        (ODD, "mi300x", [], [(1, None, "torch.packed")], Packed()),
        (ODD, "mi300x", ["torch.packed"], [(1, None, "torch.separate")], Separate()),
        (ODD, device(gemm_row_bytes=256), [], WIDE, Padded(128)),
        (EVEN, device(gemm_row_bytes=80), [], [(1, None, "torch.packed")], Packed()),
        (EVEN, device(gemm_row_bytes=32), [], WIDE, Padded(16)),
    ],
)
def test_an_input_projection_lies_as_the_device_wants_it(op, on, deny, wanted, layout) -> None:
    choice = choose(op, on, deny=deny)
    assert (pieces(choice), choice.layouts["weight"]) == (wanted, layout)


@pytest.mark.parametrize(
    ("op", "on", "kernel", "kind", "says"),
    [
        (ODD, "h200", "torch.packed", "op", "needs output rows of a multiple of 16 bytes; 39 x 2 = 78 is none"),
        (EVEN, "h200", "torch.padded", "op", "needs a packed width to pad; 40 rows are aligned as they are"),
        (ODD, "mi300x", "torch.padded", "device", "needs gemm_row_bytes to pad to; mi300x has unknown"),
    ],
)
def test_the_layout_not_taken_says_why(op, on: str, kernel: str, kind: str, says: str) -> None:
    assert refused(choose(op, on))[kernel] == (kind, says)


def test_a_kernel_that_could_but_ranks_behind_is_outranked_not_refused() -> None:
    last = {c.kernel: c for c in choose(EVEN, "h200").candidates}["torch.separate"]
    assert (last.status, last.reason) == ("outranked", "tier plain, 7 launches; torch.packed before it")


def test_every_kernel_of_the_op_is_a_candidate() -> None:
    assert [c.kernel for c in choose(ODD, "h200").candidates] == KNOWN.names(InProj)


def test_experts_are_served_in_pieces_by_rows() -> None:
    assert pieces(choose(EXPERTS)) == [(1, 4, "torch.moe_gathered"), (5, None, "torch.moe")]


@pytest.mark.parametrize(
    ("tier", "launches", "wins"),
    [("fused", 9, True), ("portable", 9, True), ("plain", 0, True), ("plain", 9, False)],
)
def test_tier_comes_before_launches_and_launches_before_the_name(tier: str, launches: int, wins: bool) -> None:
    have = registry(fake(SiluMul, "z.other", tier=tier, launches=launches))
    assert pieces(choose(SILU, have=have)) == [(1, None, "z.other" if wins else "torch.silu_mul")]


@pytest.mark.parametrize(("name", "wins"), [("a.same", True), ("z.same", False)])
def test_the_name_settles_what_is_left(name: str, wins: bool) -> None:
    assert pieces(choose(SILU, have=registry(fake(SiluMul, name))))[0][2] == (name if wins else "torch.silu_mul")


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ((1, 8), [(1, 8, "fast"), (9, None, "torch.silu_mul")]),
        ((9, None), [(1, 8, "torch.silu_mul"), (9, None, "fast")]),
        ((3, 3), [(1, 2, "torch.silu_mul"), (3, 3, "fast"), (4, None, "torch.silu_mul")]),
    ],
)
def test_pieces_cover_all_rows_without_a_gap(rows, wanted) -> None:
    assert pieces(choose(SILU, have=registry(fake(SiluMul, "fast", tier="fused", rows=rows)))) == wanted


def test_rows_that_no_kernel_takes_leave_the_op_unresolved() -> None:
    only = Registry([fake(SiluMul, "few", rows=(1, 8)), fake(SiluMul, "many", rows=(10, None))])
    with pytest.raises(UnresolvedError, match=r"few \(rows 1\.\.8\): would serve.*\n.*many \(rows 10\.\.\)"):
        choose(SILU, have=only)


@pytest.mark.parametrize(("tier", "least"), [("plain", "plain"), ("fused", "composed")])
def test_a_composed_kernel_is_no_better_than_its_worst_part(tier: str, least: str) -> None:
    have = registry(WHOLE, fake(Gemm, "part", tier=tier, launches=3))
    piece = choose(LINEAR, have=have, prefer=["Linear=whole", "Gemm=part"]).pieces[0]
    assert (piece.kernel.name, piece.tier, piece.launches) == ("whole", least, 4)


def test_a_missing_part_is_the_reason_of_the_whole() -> None:
    kind, says = refused(choose(LINEAR, have=registry(WHOLE), deny=["torch.gemm"]))["whole"]
    quantized = "; ".join(
        f"torch.linear_{n}: needs a quantized weight; it is bfloat16" for n in ("quantized", "widened")
    )
    why = f"needs a kernel for its part gemm (Gemm); torch.gemm: denied by the policy; {quantized}"
    assert (kind, says) == ("op", why)


def test_a_part_that_lacks_a_library_is_a_software_reason() -> None:
    have = registry(WHOLE, fake(Linear, "anyhow"))
    kind, says = refused(choose(LINEAR, device("cpu", torch=None), have))["whole"]
    assert kind == "software"
    assert says.startswith("needs a kernel for its part gemm (Gemm); torch.gemm: needs torch >=2.9; on cpu")


def test_software_is_named_only_where_it_alone_stands_in_the_way() -> None:
    both = fake(SiluMul, "both", needs=(library("aiter"),), refuses=lambda self, op, on: Reason("op", "needs 9"))
    lone = fake(SiluMul, "lone", needs=(library("aiter"),))
    found = refused(choose(SILU, have=registry(both, lone)))
    assert (found["both"][0], found["lone"][0]) == ("op", "software")


def test_an_op_that_nothing_serves_is_an_error_with_the_reason_of_every_kernel() -> None:
    with pytest.raises(UnresolvedError) as caught:
        choose(ODD, "h200", deny=["torch.padded", "InProj=torch.separate"])
    assert str(caught.value).splitlines() == [
        "no kernel for InProj(world=1, hidden=16, parts=(q:30 k:6 b:3), dtype=bfloat16, eps=1e-06) on h200",
        "  composed.in_proj (rows 1..): needs a part that is quantized; all are in bfloat16",
        "  torch.packed (rows 1..): needs output rows of a multiple of 16 bytes; 39 x 2 = 78 is none",
        "  torch.padded (rows 1..): denied by the policy",
        "  torch.separate (rows 1..): denied by the policy",
    ]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_on_every_profile_an_op_resolves_or_says_why_not(op) -> None:
    for on in [*map(load_device, profiles()), load_device("h200", "bare")]:
        resolver = Resolver(INSTALLED, on)
        for case in (op.cases()[0], op.cases()[-1]):
            with suppress(HalError):
                for kind, reason in refused(resolver.resolve((case.op,))[0]).values():
                    assert kind in get_args(Kind)
                    assert re.match(r"(needs|reads|takes|makes) .*; ", reason), reason


def test_a_missing_torch_is_the_reason_of_every_plain_kernel() -> None:
    with pytest.raises(UnresolvedError, match=r"torch\.silu_mul .*needs torch >=2\.9; on h200 it is not installed"):
        choose(SILU, load_device("h200", "bare"))


@pytest.mark.parametrize("name", ["cpu", "h200", "mi300x"])
def test_the_same_facts_give_the_same_choices_whatever_the_order_of_registration(name: str) -> None:
    kernels = {type(k) for op in OPS.values() for k in INSTALLED.kernels(op)}
    orders = [sorted(kernels, key=lambda k: k.name), sorted(kernels, key=lambda k: k.name, reverse=True)]
    orders.append(random.Random(0).sample(orders[0], len(kernels)))
    ops = [case.op for op in OPS.values() for case in op.cases()[:1] if INSTALLED.names(op)]
    found = [[Resolver(Registry(order), load_device(name)).resolve((op,)) for op in ops] for order in orders]
    shown = [[(c.shape(), c.candidates, [p.why for p in c.pieces]) for (c,) in choices] for choices in found]
    assert shown[0] == shown[1] == shown[2]


def test_what_was_resolved_is_remembered() -> None:
    resolver = Resolver(INSTALLED, load_device("cpu"))
    assert resolver.resolve((SILU,))[0] is resolver.resolve((SiluMul(columns=8),))[0]
