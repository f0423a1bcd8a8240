"""Binding and sealing: what fails to load, to be filled, to agree or to run is an error that says what to do."""

import hashlib
from typing import Any

import pytest
import torch
from facts import device, fake, registry, runtime

from hal.device import load_device
from hal.errors import BindError, CheckError, HalError
from hal.kernel import Kernel
from hal.ops import AddRMSNorm, GatedDeltaDecode, GatedDeltaPrefill, InProj, Linear, Projection, SiluMul
from hal.policy import Policy
from hal.runtime import Runtime, agree

ODD = InProj(hidden=16, parts=(Projection("q", 30, "qk"), Projection("k", 6, "qk"), Projection("b", 3, "b")))
SILU = SiluMul(columns=8)
SIZES = {"key_heads": 2, "value_heads": 4, "key_head_dim": 16, "value_head_dim": 8}
DECODE, PREFILL = GatedDeltaDecode(**SIZES), GatedDeltaPrefill(**SIZES)


def failing(error: Exception, at: str) -> type[Kernel]:
    def run(*_: Any) -> Any:
        raise error

    return fake(SiluMul, "lib.silu", tier="fused", load=run if at == "load" else lambda self, site: run)


def test_a_kernel_that_fails_to_load_is_an_error_that_says_how_to_go_on() -> None:
    broken = failing(OSError("libcudart.so.13: cannot open"), "load")
    says = r"act: lib\.silu was chosen and failed to load: OSError: libcudart\.so\.13.*; HAL_DENY=(\S+) goes on"
    with pytest.raises(BindError, match=says) as caught:
        runtime("cpu", broken).bind(SILU, "act")
    assert isinstance(caught.value.__cause__, OSError)
    deny = str(caught.value).partition("HAL_DENY=")[2].split()[0]
    assert runtime("cpu", broken, deny=[deny]).bind(SILU, "act").choice.pieces[0].kernel.name == "torch.silu_mul"


def test_a_kernel_whose_code_is_not_there_fails_at_bind() -> None:
    with pytest.raises(BindError, match=r"ModuleNotFoundError: No module named 'no_such'"):
        runtime("cpu", fake(SiluMul, "lost", tier="fused", code="no_such.code:silu")).bind(SILU, "act")


def test_a_kernel_that_fails_at_run_time_fails_and_nothing_else_is_tried() -> None:
    tried: list[int] = []
    rest = fake(SiluMul, "rest", lambda x: tried.append(1), tier="library")
    bound = runtime("cpu", failing(RuntimeError("illegal address"), "run"), rest).bind(SILU, "act")
    with pytest.raises(RuntimeError, match="illegal address"):
        bound(torch.empty(1, 16))
    assert tried == []


def test_what_was_only_resolved_cannot_be_called() -> None:
    with pytest.raises(BindError, match=r"act: was resolved only \(Runtime\(load=False\)\) and cannot be called"):
        runtime(load=False).bind(SILU, "act")(None)


def test_seal_lists_what_was_not_filled() -> None:
    rt = runtime()
    rt.bind(ODD, "layers.0.in_proj")
    rt.group_of(rt.bind(Linear(columns=4, rows=4), "out")).storages["weight"].put("weight", torch.ones(4, 4))
    with pytest.raises(HalError, match=r"not filled: layers\.0\.in_proj\.norm: norm, layers\.0\.in_proj\.weight: b, "):
        rt.seal()


class Ranks:
    """A communicator of two ranks; the other one chose what is given here."""

    rank, world = 0, 2

    def __init__(self, *lines: str) -> None:
        self.other, self.asked = "\n".join(lines), 0

    def all_gather_object(self, mine: str) -> list[str]:
        self.asked += 1
        digest = hashlib.sha256(self.other.encode()).hexdigest()
        return [mine, digest if self.asked == 1 else self.other]


def test_ranks_that_chose_alike_exchange_a_digest_only() -> None:
    ranks = Ranks("a: x", "b: y")
    agree(ranks, ["a: x", "b: y"])
    assert ranks.asked == 1


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (["a: x", "b: z", "c: z"], "rank 0 b: y; rank 1 b: z"),
        (["a: x"], "rank 0 2 ops; rank 1 1 ops"),
        (["a: x", "b: y", "c: z"], "rank 0 2 ops; rank 1 3 ops"),
    ],
)
def test_ranks_that_chose_differently_stop_at_the_first_difference(other: list[str], says: str) -> None:
    with pytest.raises(BindError, match=f"^ranks chose differently: {says}$"):
        agree(Ranks(*other), ["a: x", "b: y"])


def test_seal_compares_the_ranks() -> None:
    alone = runtime()
    alone.bind(SILU, "act")
    for lines in (alone.lines(), ["act.op: torch.other"]):
        rt = runtime(comm=Ranks(*lines))
        rt.bind(SILU, "act")
        if lines == rt.lines():
            rt.seal()
        else:
            with pytest.raises(BindError, match=r"rank 0 act\.op: .*torch\.silu_mul.*; rank 1 act\.op: torch\.other"):
                rt.seal()


def test_an_op_is_made_for_the_worlds_ranks() -> None:
    with pytest.raises(BindError, match="norm: AddRMSNorm is made for world 4, the runtime has 1"):
        runtime(load=False).bind(AddRMSNorm(hidden=8, world=4), "norm")
    with pytest.raises(BindError, match="2 ranks need a communicator"):
        Runtime(load_device("cpu"), Policy(), registry(), world=2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (torch.empty(2, 15, dtype=torch.bfloat16), r"x: bfloat16 \[rows, 16\].*got bfloat16 \[2, 15\]"),
        (torch.empty(2, 16), r"x: bfloat16 \[rows, 16\], got float32 \[2, 16\]"),
        (torch.empty(16, 2, dtype=torch.bfloat16).T, r"axis 1 must have stride 1, the strides are \(1, 2\)"),
        (None, r"x: bfloat16 \[rows, 16\], got NoneType"),
    ],
)
def test_under_check_a_wrong_argument_names_op_argument_expected_and_got(given: Any, says: str) -> None:
    checked = runtime("cpu", fake(SiluMul, "few", tier="fused", rows=(1, 4), call=lambda x: x), check=True)
    bound = checked.bind(SILU, "act")
    for call in (bound, bound.at(2)):
        with pytest.raises(CheckError, match=f"^SiluMul: x: .*{says}"):
            call(given)
    assert bound.at(2)(right := torch.empty(2, 16, dtype=torch.bfloat16)) is right


def test_a_group_names_its_members() -> None:
    group = runtime(device("cpu"), load=False).bind_group(name="core", prefill=PREFILL, decode=DECODE)
    with pytest.raises(AttributeError, match=r"core binds \['decode', 'prefill'\], not 'verify'"):
        group.verify  # noqa: B018
