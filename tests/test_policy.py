"""What the user allows: forced, preferred, denied; at one site or everywhere; a wish unmet is an error."""

from pathlib import Path

import pytest
from facts import fake, registry

from hal.choice import Choice
from hal.device import load_device
from hal.errors import PolicyError, UnknownName
from hal.formats import STATIC_FP8
from hal.layout import Ring
from hal.ops import AddRMSNorm, GatedDeltaDecode, GatedDeltaPrefill, InProj, Linear, Projection, RMSNorm, SiluMul
from hal.policy import Policy, Rule
from hal.resolving import Resolver

SIZES = {"key_heads": 2, "value_heads": 4, "key_head_dim": 16, "value_head_dim": 8}
PREFILL, DECODE = GatedDeltaPrefill(**SIZES), GatedDeltaDecode(**SIZES)
ODD = InProj(hidden=16, parts=(Projection("q", 36, "q"), Projection("b", 3, "b")))
EVEN = InProj(hidden=16, parts=(Projection("q", 32, "q"), Projection("b", 8, "b")))
SILU, LINEAR = SiluMul(columns=8), Linear(columns=8, rows=8)
INSTALLED = registry()


def choose(*ops, on: str = "h200", have=INSTALLED, site: str = "layers.3.mixer", **policy) -> tuple[Choice, ...]:
    return Resolver(have, load_device(on)).resolve(ops, Policy.of(**policy).at(site))


def ran(choice: Choice) -> list[str]:
    return [piece.kernel.name for piece in choice.pieces]


@pytest.mark.parametrize(
    ("force", "kernel"),
    [
        (["InProj=torch.separate"], "torch.separate"),
        (["InProj@layers.3.*=torch.separate"], "torch.separate"),
        (["InProj@layers.4.*=torch.separate"], "torch.packed"),
        (["InProj@layers.?.mixer=torch.separate"], "torch.separate"),
        (["*@layers.3.*=torch.separate"], "torch.separate"),
        (["Linear=torch.linear"], "torch.packed"),
        (["*=torch.linear", "InProj=torch.separate"], "torch.separate"),
        (["*@layers.3.mixer=torch.linear", "InProj=torch.separate"], "torch.separate"),
        # the narrower glob stands before the wider, whatever the order
        (["InProj@layers.*=torch.separate", "InProj@layers.3.*=torch.packed"], "torch.packed"),
        (["InProj@layers.3.*=torch.packed", "InProj=torch.separate"], "torch.packed"),
        (["InProj=torch.separate", "InProj@*.mixer=torch.packed"], "torch.packed"),
        (["*=torch.separate", "InProj=torch.packed"], "torch.packed"),
    ],
)
def test_a_force_binds_its_op_at_the_sites_of_its_glob(force: list[str], kernel: str) -> None:
    assert ran(choose(EVEN, force=force)[0]) == [kernel]


def test_a_forced_kernel_says_that_it_was_forced() -> None:
    assert choose(EVEN, force=["InProj=torch.separate"])[0].pieces[0].why == "forced by the policy"


def test_a_force_leads_the_choice_of_layouts() -> None:
    prefill, decode = choose(PREFILL, DECODE, force=["GatedDeltaDecode=torch.decode_ring"])
    assert ran(decode) == ["torch.decode_ring"]
    assert prefill.layouts["conv"] == Ring(4)


def test_a_force_leaves_the_rows_that_it_does_not_take_to_others() -> None:
    assert ran(choose(ODD, force=["InProj=torch.padded"])[0]) == ["torch.padded", "torch.separate"]


def test_a_force_refused_everywhere_is_an_error_with_all_reasons() -> None:
    with pytest.raises(PolicyError) as caught:
        choose(EVEN, force=["InProj=torch.padded"], deny=["torch.separate"])
    why = "needs a packed width to pad; 40 rows are aligned as they are"
    assert str(caught.value).splitlines() == [
        f"InProj: torch.padded is forced and cannot be had on h200: {why}",
        "  composed.in_proj: needs a part that is quantized; all are in bfloat16",
        "  torch.packed: eligible",
        f"  torch.padded: {why}",
        "  torch.separate: denied by the policy",
    ]


def test_a_force_that_the_group_cannot_follow_says_so() -> None:
    stuck = fake(GatedDeltaPrefill, "stuck", tier="fused")
    with pytest.raises(PolicyError, match="the ops that share its memory have no kernel for a layout it reads"):
        choose(
            PREFILL,
            DECODE,
            have=registry(stuck),
            force=["GatedDeltaDecode=torch.decode_ring"],
            deny=["torch.prefill", "GatedDeltaPrefill=composed.gated_delta"],
        )


def test_a_force_is_met_by_the_part_of_a_kernel_that_encodes_what_it_makes() -> None:
    choice = choose(RMSNorm(hidden=8, out=STATIC_FP8), force=["RMSNorm=torch.rms_norm"])[0]
    assert ran(choice) == ["composed.then_quantize"]
    assert choice.pieces[0].why == "forced by the policy"


@pytest.mark.parametrize(
    ("op", "kernel", "part"),
    [
        (RMSNorm(hidden=8, out=STATIC_FP8), "composed.then_quantize", "torch.rms_norm"),
        (AddRMSNorm(hidden=8, world=2), "composed.reduce_norm", "torch.add_rms_norm"),
    ],
)
def test_a_forced_composed_kernel_is_not_forced_inside_itself(op, kernel: str, part: str) -> None:
    choice = choose(op, force=[f"{op.title()}={kernel}"])[0]
    assert ran(choice) == [kernel]
    inner = next(p for p in choice.pieces[0].parts.values() if p.op.title() == op.title())
    assert ran(inner) == [part]
    reasons = {c.kernel: c.reason for c in inner.candidates}
    assert reasons[kernel] == "is composed of this op; it cannot be a part of itself"


@pytest.mark.parametrize(
    ("prefer", "kernel", "why"),
    [
        (["InProj=torch.separate"], "torch.separate", "preferred by the policy"),
        (["InProj=torch.padded"], "torch.packed", "ranked first for these rows: tier plain, 2 launches"),
        (["InProj=torch.padded", "InProj=torch.separate"], "torch.separate", "preferred by the policy"),
        (["InProj=torch.separate", "InProj@layers.3.*=torch.packed"], "torch.packed", "preferred by the policy"),
    ],
)
def test_what_is_preferred_is_taken_where_it_can_be_had(prefer: list[str], kernel: str, why: str) -> None:
    (choice,) = choose(EVEN, prefer=prefer)
    assert (ran(choice), choice.pieces[0].why) == ([kernel], why)


@pytest.mark.parametrize(
    ("deny", "denied"),
    [
        (["torch.packed"], True),
        (["InProj=torch.packed"], True),
        (["InProj@layers.3.*=torch.packed"], True),
        (["InProj@layers.4.*=torch.packed"], False),
        (["Linear=torch.packed"], False),
    ],
)
def test_what_is_denied_is_never_taken(deny: list[str], denied: bool) -> None:
    (choice,) = choose(EVEN, deny=deny)
    assert ran(choice) == ["torch.separate" if denied else "torch.packed"]
    assert denied == (("torch.packed", "policy") in {(c.kernel, c.kind) for c in choice.candidates})


@pytest.mark.parametrize("text", ["torch.packed", "=torch.packed", "InProj=", "", "InProj@x"])
def test_a_rule_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(PolicyError, match=r"a rule is Op=kernel or Op@site=kernel, got"):
        Rule.parse(text, bare=False)


def test_the_environment_gives_every_setting() -> None:
    environ = {
        "HAL_FORCE": "InProj=torch.packed,Linear@a.*=torch.linear",
        "HAL_DENY": "torch.decode, ",
        "HAL_PREFER": "",
        "HAL_NUMERICS": "LOSSY",
        "HAL_STRICT": "1",
        "HAL_CHECK": "0",
        "HAL_ACTIVATIONS": "checkpoint",
        "HAL_INPUT_SCALES": "maximum",
        "PATH": "/bin",
    }
    words = {"activations": "checkpoint", "input_scales": "maximum"}
    force, deny = ("InProj=torch.packed", "Linear@a.*=torch.linear"), ("torch.decode",)
    given = Policy.of(force=force, deny=deny, numerics="lossy", strict=True, **words)
    assert Policy.from_environment(environ) == given
    assert Policy.from_environment({}) == Policy()


def test_a_file_gives_settings_and_the_environment_wins(tmp_path: Path) -> None:
    (tmp_path / "hal.toml").write_text('deny = ["torch.decode"]\nstrict = true\nnumerics = "exact"\n')
    environ = {"HAL_POLICY": str(tmp_path / "hal.toml"), "HAL_STRICT": "0"}
    assert Policy.from_environment(environ) == Policy.of(deny=["torch.decode"], numerics="exact")


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (None, PolicyError, "HAL_POLICY: .*hal.toml cannot be read: .*No such file"),
        ("force = [", PolicyError, "HAL_POLICY: .*hal.toml cannot be read"),
        ('forces = ["a"]', UnknownName, "unknown setting in .*hal.toml 'forces'; did you mean 'force'"),
        ('force = "InProj=torch.packed"', PolicyError, "force is a list, got 'InProj=torch.packed'"),
        ("deny = [1]", PolicyError, r"deny is a list of rules as text, got \[1\]"),
        ('strict = "1"', PolicyError, "strict is a bool, got '1'"),
    ],
)
def test_a_file_that_cannot_be_taken_is_an_error(tmp_path: Path, text, error, says: str) -> None:
    if text is not None:
        (tmp_path / "hal.toml").write_text(text)
    with pytest.raises(error, match=says):
        Policy.from_environment({"HAL_POLICY": str(tmp_path / "hal.toml")})


@pytest.mark.parametrize(("name", "near"), [("HAL_ACTIVATIONS", "checkpoint"), ("HAL_INPUT_SCALES", "maximum")])
def test_a_word_that_is_none_says_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UnknownName, match=f"unknown {name[4:].lower()} .*did you mean '{near}'"):
        Policy.from_environment({name: near[:-1]})


@pytest.mark.parametrize("name", ["HAL_STRICT", "HAL_CHECK"])
def test_a_flag_is_0_or_1(name: str) -> None:
    with pytest.raises(PolicyError, match=f"{name} is 0 or 1, got 'yes'"):
        Policy.from_environment({name: "yes"})
