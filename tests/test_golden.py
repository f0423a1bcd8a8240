"""Resolved: what AMD's devices would run of the published models is what the committed table says."""

from __future__ import annotations

from collections import Counter

import golden
import pytest
from golden import DEVICES, MODELS, RANKS, SCHEMES, Plan, differences, of, products, read, written

RECORDED = read(golden.FILE.read_text())
WRITE = "python ci/golden.py --write takes it over:"


@pytest.mark.parametrize("device", DEVICES)
def test_plans_are_as_recorded(device: str) -> None:
    text = differences(of(device, RECORDED), golden.plans(device))
    assert not text, "\n".join([WRITE, *text])


def test_the_table_covers_every_plan_and_is_written_as_it_is_read() -> None:
    assert written(RECORDED) == golden.FILE.read_text()
    embedded = {plan for (site, _), plans in RECORDED.items() if site == "embed" for plan in plans}
    assert len(embedded) == len(MODELS) * len(SCHEMES) * len(RANKS) * len(DEVICES) == 480
    # the projections of an opening are one group, or two where b and a stay as they are
    groups = Counter(
        (plan.scheme, statement.split("[")[-1].split("; weight")[0])
        for (site, statement), plans in RECORDED.items()
        if site == "layers.*.linear_attn.in_proj" and statement.startswith("InProj")
        for plan in plans
    )
    assert groups == dict.fromkeys(
        [
            ("bf16", "InProj = rocm.packed_bf16"),
            ("fp8_channel", "q,k,v,z fp8_channel; b,a as dtype"),
            ("fp8_block", "q,k,v,z fp8_block; b,a as dtype]"),
            ("mxfp4+fp8", "q,k,v,z fp8_channel; b,a as dtype"),
            ("mxfp4+fp8_all", "q,k,v,z,b,a fp8_channel"),
        ],
        96,
    )


def test_the_first_layers_say_what_all_do() -> None:
    whole, some = (golden.plans("mi355x", ["0.8b"], layers) for layers in (24, golden.PERIOD))
    assert not differences(whole, some)


def test_a_difference_is_said_with_the_plans_that_it_is_of() -> None:
    assert products({Plan("27b", "bf16", r, d) for r in RANKS for d in DEVICES}) == ["27b, bf16, 1 2 4 8, all devices"]
    found = {key: set(plans) for key, plans in RECORDED.items()}
    site, wide = "layers.*.linear_attn.in_proj.gemm", "16480 rows of the weight padded to 16512"
    found[site, wide.replace("16512", "16480")] = found.pop((site, wide))
    assert differences(RECORDED, found) == [
        f"+ {site}: 16480 rows of the weight padded to 16480", "      27b, mxfp4+fp8_all, 1, all devices",
        f"- {site}: {wide}", "      27b, mxfp4+fp8_all, 1, all devices",
    ]  # fmt: skip
