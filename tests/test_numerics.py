"""How loose the arithmetic may be: a kernel's class, that of its parts, and what the policy allows."""

import pytest
from facts import fake, runtime

from hal.kernel import Part
from hal.numerics import EXACT, LOSSY, REASSOCIATED, Class, Numerics
from hal.ops import Gemm, Linear, SiluMul

SILU, LINEAR = SiluMul(columns=8), Linear(columns=8, rows=8)
PARTS = {"gemm": Part(Gemm(columns=8, rows=8))}
WHOLE = fake(Linear, "whole", tier="fused", numerics=EXACT, parts=lambda self, op: PARTS)


@pytest.mark.parametrize(("numerics", "wins"), [("lossy", "rough"), ("Reassociated", "torch.silu_mul")])
def test_lossy_arithmetic_is_taken_only_where_it_is_allowed(numerics: str, wins: str) -> None:
    rough = fake(SiluMul, "rough", tier="fused", numerics=LOSSY)
    choice = runtime("cpu", rough, load=False, numerics=numerics).bind(SILU, "act").choice
    reasons = {c.kernel: (c.kind, c.reason) for c in choice.candidates}
    assert choice.pieces[0].kernel.name == wins
    assert reasons["rough"] == (
        ("", "") if wins == "rough" else ("numerics", "is LOSSY; the policy allows REASSOCIATED at most")
    )


@pytest.mark.parametrize("part", [EXACT, REASSOCIATED, LOSSY, Numerics(Class.EXACT, deterministic=False)])
def test_a_composed_kernel_is_as_loose_as_its_loosest_part(part: Numerics) -> None:
    gemm = fake(Gemm, "part", tier="fused", numerics=part)
    piece = runtime("cpu", WHOLE, gemm, load=False, numerics="lossy").bind(LINEAR, "out").choice.pieces[0]
    assert piece.parts["gemm"].pieces[0].kernel.name == "part"
    found = piece.numerics(LINEAR)
    assert (found.kind, found.deterministic) == (part.kind, part.deterministic)
    assert found.batch_invariant == part.batch_invariant


def test_a_part_is_chosen_so_that_the_whole_is_allowed() -> None:
    rough = fake(Gemm, "rough", tier="fused", numerics=LOSSY)
    piece = runtime("cpu", WHOLE, rough, load=False, prefer=["Linear=whole"]).bind(LINEAR, "out").choice.pieces[0]
    assert piece.parts["gemm"].pieces[0].kernel.name == "torch.gemm"


def test_exact_alone_leaves_only_what_moves_or_encodes() -> None:
    rt = runtime("cpu", fake(Linear, "exact", numerics=EXACT), load=False, numerics="exact")
    refused = {c.kernel: c.kind for c in rt.bind(LINEAR, "out").choice.candidates if c.status == "refused"}
    assert refused["torch.linear"] == "numerics"
