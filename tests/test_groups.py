"""Ops that share memory are decided together; what is shared later keeps the layout that it has."""

from collections.abc import Mapping

import pytest
import torch
from facts import device, fake, fill, runtime, value

from hal.batch import Batch, make_batch
from hal.device import Device
from hal.errors import BindError, PolicyError
from hal.kernel import Kernel
from hal.layout import KV, VK, Layout, Padded, Ring, Shift
from hal.ops import Embed, GatedDeltaDecode, GatedDeltaPrefill, Head, InProj, Projection
from hal.requirement import library
from hal.runtime import Group, Runtime

SIZES = {"key_heads": 2, "value_heads": 4, "key_head_dim": 16, "value_head_dim": 8}  # K is not V
PREFILL, DECODE = GatedDeltaPrefill(**SIZES), GatedDeltaDecode(**SIZES)
ODD = InProj(hidden=16, parts=(Projection("q", 30, "qk"), Projection("k", 6, "qk"), Projection("b", 3, "b")))


def own(op, name: str, conv: Layout, delta: Layout, **declared) -> type[Kernel]:
    """The torch code, reading one layout of each state only."""
    code = f"hal_torch.code.gated_delta:{op.mode}"
    return fake(type(op), name, code=code, layouts={"conv": (conv,), "delta": (delta,)}, **declared)


LIBRARY = own(PREFILL, "lib.prefill", Ring(4), KV(), tier="library", needs=(library("flashinfer"),))
KV_ONLY = own(DECODE, "kv", Shift(), KV(), tier="fused")
HOPPER, WITHOUT = device("h200"), device("h200", flashinfer=None)


def core(rt: Runtime) -> Group:
    return rt.bind_group(name="core", prefill=PREFILL, decode=DECODE)


def kernels(group: Group) -> dict[str, str]:
    return {name: choice.pieces[0].kernel.name for name, choice in group.choices.items()}


def lies(group: Group) -> tuple[Layout, Layout]:
    return group.layouts["conv"], group.layouts["delta"]


FUSED, PARTS = ["torch.decode", "torch.decode_ring"], "composed.gated_delta"


@pytest.mark.parametrize(
    ("deny", "decode", "conv"),
    [
        ([], "torch.decode", Shift()),
        (["torch.decode"], "torch.decode_ring", Ring(4)),
        (FUSED, PARTS, Shift()),
    ],
)
def test_the_decode_kernel_decides_how_the_state_lies(deny: list[str], decode: str, conv: Layout) -> None:
    group = core(runtime(load=False, deny=deny))
    assert kernels(group) == {"prefill": "torch.prefill", "decode": decode}
    assert lies(group) == (conv, VK())


def test_a_composed_core_names_the_kernel_of_each_part() -> None:
    group = core(runtime(load=False, deny=FUSED))
    parts = group.choices["decode"].pieces[0].parts
    assert {name: part.pieces[0].kernel.name for name, part in parts.items()} == {
        "conv": "torch.causal_conv",
        "update": "torch.delta_update",
        "norm": "torch.gated_rms_norm",
    }


def test_the_leader_moves_the_other_members_to_its_layout() -> None:
    group = core(runtime("h200", LIBRARY, load=False))
    assert kernels(group) == {"prefill": "lib.prefill", "decode": "torch.decode_ring"}
    assert lies(group) == (Ring(4), KV())
    assert [choice.fell_back for choice in group.choices.values()] == ["", ""]


def test_a_missing_library_of_the_leader_is_a_fallback_of_both() -> None:
    group = core(runtime(WITHOUT, LIBRARY, load=False))
    assert kernels(group) == {"prefill": "torch.prefill", "decode": "torch.decode"}
    assert lies(group) == (Shift(), VK())
    assert [choice.fell_back.removeprefix("with all software met would run ") for choice in group.choices.values()] == [
        "rows 1..: lib.prefill (needs flashinfer; on h200 it is not installed (replaced by hand))",
        "rows 1..: torch.decode_ring (reads conv as ring:4; it lies shift)",
    ]


def test_strict_makes_a_fallback_an_error() -> None:
    with pytest.raises(
        PolicyError, match=r"core: GatedDeltaPrefill fell back .*: with all software met .*lib\.prefill"
    ):
        core(runtime(WITHOUT, LIBRARY, load=False, strict=True))


@pytest.mark.parametrize(("on", "deny"), [(HOPPER, []), (WITHOUT, ["lib.prefill"]), (device("cpu"), ["lib.prefill"])])
def test_strict_takes_what_is_no_fallback(on: Device, deny: list[str]) -> None:
    assert core(runtime(on, LIBRARY, load=False, strict=True, deny=deny)).fed is False


def test_software_that_would_change_nothing_is_no_fallback() -> None:
    worse = own(PREFILL, "worse", Ring(4), KV(), launches=9, needs=LIBRARY.needs)
    assert core(runtime(WITHOUT, worse, load=False)).choices["prefill"].fell_back == ""


def test_a_layout_that_one_member_cannot_read_is_not_taken() -> None:
    class Other(Shift):
        label = "other"

    only = own(PREFILL, "only", Other(), VK(), tier="fused")
    group = core(runtime("cpu", only, load=False))
    assert kernels(group)["prefill"] == "torch.prefill"
    refused = {c.kernel: c.reason for c in group.choices["prefill"].candidates}
    assert refused["only"] == "reads conv as other; it lies shift"


def step(mode: str, lengths: list[int], contexts: list[int]) -> tuple[tuple[torch.Tensor, ...], Batch]:
    rows, batch = sum(lengths), make_batch(mode, lengths, contexts, [2, 0])
    widths = {"qkv": PREFILL.conv_dim, "z": PREFILL.value_dim, "b": 4, "a": 4}
    return tuple(value(f"{n}{contexts}", (rows, w), "bfloat16") for n, w in widths.items()), batch


def ran(rt: Runtime) -> tuple[list[torch.Tensor], Mapping[str, torch.Tensor]]:
    """Outputs of a prefill and two decode steps, and the states after them in canonical order."""
    group = core(rt)
    fill(group)
    state, out, seen = group.new_state(4), [], [0, 0]
    for mode, lengths in (("prefill", [7, 2]), ("decode", [1, 1]), ("decode", [1, 1])):
        projected, batch = step(mode, lengths, seen)
        rt.begin(batch)
        out.append(getattr(group, mode)(projected, state, batch).float())
        seen = [a + b for a, b in zip(seen, lengths, strict=True)]
    lengths = [seen[1], 0, seen[0], 0]
    layouts = group.layouts
    states = {n: layouts[n].read(p, s, lengths) for p, (n, s) in zip(state, group.states().items(), strict=True)}
    return out, states


FORCED = ("torch.decode", "torch.decode_ring", PARTS)


@pytest.mark.parametrize("other", [*FORCED[1:], "kv", "ring and kv", "parts on ring and kv"])
def test_a_core_computes_the_same_in_every_layout(other: str) -> None:
    more: dict[str, list[type[Kernel]]] = {"kv": [KV_ONLY], "ring and kv": [LIBRARY]}
    more["parts on ring and kv"] = more["ring and kv"]
    force = [f"GatedDeltaDecode={other}"] if other in (*FORCED, "kv") else []
    deny = FUSED if other.startswith("parts") else []
    want, states = ran(runtime("h200", deny=[*FUSED[1:], PARTS]))
    got, moved = ran(runtime("h200", *more.get(other, []), force=force, deny=deny))
    for a, b in zip([*want, *states.values()], [*got, *moved.values()], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)


def test_a_tied_head_reads_the_embedding_itself() -> None:
    rt = runtime()
    embed = rt.bind(Embed(vocab=12, hidden=8), "embed")
    head = rt.bind(Head(hidden=8, vocab=12), "head", shares=embed)
    have, shared = rt.group_of(embed).storages, rt.group_of(head).storages
    assert shared["weight"].read().data_ptr() == have["weight"].read().data_ptr()
    fill(rt.group_of(head))
    rt.seal()
    rows, zero = embed(torch.arange(12))
    logits, hidden = head(rows, zero)
    torch.testing.assert_close(logits, hidden @ rows.T)


def test_a_later_op_reads_the_layout_that_is_there() -> None:
    rt = runtime("h200", deny=["InProj@draft=torch.padded"])
    first = rt.bind(ODD, "main")
    later = rt.bind(ODD, "draft", shares=first)
    assert later.choice.layouts["weight"] == first.choice.layouts["weight"] == Padded(8)
    assert [p.kernel.name for p in later.choice.pieces] == ["torch.separate"]
    assert rt.group_of(later).storages == rt.group_of(first).storages


def test_a_later_op_gets_a_kernel_that_reads_the_state_as_it_lies() -> None:
    rt = runtime(load=False, deny=["GatedDeltaDecode@core=torch.decode", "GatedDeltaDecode@third=torch.decode_ring"])
    group = core(rt)
    assert rt.bind(DECODE, "second", shares=group).choice.pieces[0].kernel.name == "torch.decode_ring"
    later = rt.bind(DECODE, "third", shares=group).choice
    assert later.pieces[0].kernel.name == PARTS
    refused = {c.kernel: c.reason for c in later.candidates}
    assert refused["torch.decode"] == "reads conv as shift; it lies ring:4"


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (Head(hidden=8, vocab=10), r"head: weight is shared as weight \[12, 8\] bfloat16; Head has weight \[10, 8\]"),
        (Head(hidden=8, vocab=12, dtype="float32"), r"Head has weight \[12, 8\] float32"),
        (DECODE, r"head: shares nothing with embed: \['A_log', .*\] against \['weight'\]"),
    ],
)
def test_what_is_not_alike_cannot_be_shared(op, says: str) -> None:
    rt = runtime(load=False)
    with pytest.raises(BindError, match=says):
        rt.bind(op, "head", shares=rt.bind(Embed(vocab=12, hidden=8), "embed"))
