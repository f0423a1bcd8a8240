"""Elements and scales, byte by byte, against tables written down from the formats: ties, limits, subnormals, zeros."""

from __future__ import annotations

import math

import pytest
import torch
from dequantized import e2m1, nearest
from hal_models.encoding import encoded

from hal.formats import BLOCK_FP8, MXFP4, NVFP4, SCHEMES, STATIC_FP8, TOKEN_FP8, Encoded, Quantized, Scale
from hal.ops.formulas import LEAST_SCALE, decode, element_values, encode, narrowed, power_scale, real, scale_values

FP8S = {"float8_e4m3fn": (7, 448.0), "float8_e4m3fnuz": (8, 240.0)}  # bias, limit


def e4m3(code: int, bias: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
    return -size if code & 0x80 else size


def known(kind: str) -> list[float]:
    """Values of the codes from 0 up to the limit."""
    bias, limit = FP8S[kind]
    return [v for v in (e4m3(code, bias) for code in range(128)) if v <= limit]


def of_interest(values: list[float]) -> torch.Tensor:
    """Every value, every tie, and what lies beside each of them in float32, both signs."""
    table = torch.tensor(values, dtype=torch.float64)
    points = torch.cat([table, (table[1:] + table[:-1]) / 2]).float()
    up, down = (torch.nextafter(points, torch.tensor(way)) for way in (math.inf, -math.inf))
    points = torch.cat([points, up, down]).clamp(-table[-1].float(), table[-1].float())
    return torch.cat([points, -points, torch.tensor([0.0, -0.0])])


@pytest.mark.parametrize("kind", FP8S)
def test_e4m3_is_decoded_and_encoded_as_the_format_says(kind: str) -> None:
    bias, limit = FP8S[kind]
    form, values = Quantized(kind, Scale("tensor", static=True)), known(kind)
    assert values[-1] == form.limit == limit
    codes = torch.arange(len(values), dtype=torch.uint8).view(getattr(torch, kind))
    assert element_values(codes, form, torch.float64).tolist() == values
    x = of_interest(values)
    got = narrowed(x, form).view(torch.uint8)
    want = nearest(x.double().abs(), torch.tensor(values).double())
    real_ = torch.tensor([e4m3(int(code), bias) for code in got]).double()
    assert torch.equal(real_.abs(), want)
    # fnuz has one zero; OCP keeps the sign of it
    negative = torch.signbit(x) & ((want > 0) | (kind == "float8_e4m3fn"))
    assert torch.equal(got >= 128, negative)
    assert 0x80 not in got.tolist() or kind == "float8_e4m3fn"


def test_e2m1_is_decoded_and_encoded_as_the_format_says() -> None:
    form = MXFP4
    whole = torch.arange(256, dtype=torch.uint8)
    apart = element_values(whole, form, torch.float64).reshape(-1, 2)
    assert torch.equal(apart, torch.stack([e2m1(whole & 15), e2m1(whole >> 4)], -1))
    x = of_interest([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    got = element_values(narrowed(x, form), form, torch.float32)
    assert torch.equal(got.abs().double(), nearest(x.double().abs(), e2m1(torch.arange(8))))
    assert torch.equal(torch.signbit(got), torch.signbit(x))
    # ties by hand: to the even code
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    assert element_values(narrowed(ties, form), form, torch.float32).tolist() == [0, 1, 1, 2, 2, 4, 4, -4]


def test_e8m0_is_every_power_of_two_and_one_nan() -> None:
    form = Scale("block", block=(1, 32), dtype="float8_e8m0fnu")
    got = scale_values(torch.arange(256, dtype=torch.uint8), form)
    assert got[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(got[255])
    assert got[:255].float().min() == 2.0**-127  # a subnormal, not zero
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
    for byte in (0, 1, 126, 127, 128, 254):
        values = real(codes, torch.tensor([[byte]], dtype=torch.uint8), MXFP4, torch.float64)
        assert values.tolist() == [[v * 2.0 ** (byte - 127) for v in e2m1(torch.arange(16)).tolist()] * 2]


@pytest.mark.parametrize(
    ("most", "aiter", "ocp"),
    [
        (0.0, 0, 0), (6.0, 127, 127), (6.99, 127, 127), (7.0, 128, 127), (7.99, 128, 127), (8.0, 128, 128),
        (4.0, 127, 127), (3.5, 127, 126), (3.49, 126, 126), (1.0, 125, 125), (2.0**-126, 0, 0), (1e38, 251, 251),
        (2.0**-140, 0, 0), (3.4e38, 253, 252),
    ],
)  # fmt: skip
def test_powers_of_two_by_both_rules(most: float, aiter: int, ocp: int) -> None:
    x = torch.tensor([most])
    assert (int(power_scale(x)), int(power_scale(x, "ocp"))) == (aiter, ocp)
    if most > 2.0**-120:
        # aiter's never saturates but in the last power; OCP's may, by a third
        assert most / 2.0 ** (aiter - 127) < 7
        assert most / 2.0 ** (ocp - 127) < 8


def test_scales_under_a_global_one_by_hand() -> None:
    """Global 2^-4: a block's scale is amax / 6 x 16 in e4m3, its numbers are codes x scale / 16."""
    whole = torch.tensor([2.0**-4])
    blocks = {
        6.0 / 16: 0x38,  # 1
        6.0: 0x58,  # 16
        6.0 * 17 / 16: 0x58,  # 17 is a tie between 16 and 18: the even one
        6.0 * 19 / 16: 0x5A,  # 19: to 20
        6.0 * 2.0**-13: 0x01,  # the least
        6.0 * 2.0**-14: 0x00,  # half of it: a tie, to zero
        6.0 * 3 * 2.0**-14: 0x02,  # and one and a half: to two
        6.0 * 28: 0x7E,  # 448
        6.0 * 29: 0x7E,  # 464 is beyond
        1e30: 0x7E,
        1e-12: 0x00,
        0.0: 0x00,
    }  # fmt: skip
    x = torch.zeros(1, 16 * len(blocks))
    for index, most in enumerate(blocks):
        x[0, 16 * index + 3], x[0, 16 * index + 4] = -most, -0.0
    found = encode(x, NVFP4, whole)
    assert found.scale.view(torch.uint8).flatten().tolist() == list(blocks.values())
    values = decode(found, NVFP4, torch.float64).reshape(-1, 16)
    assert torch.isfinite(values).all()
    for row, (most, byte) in zip(values, blocks.items(), strict=True):
        scale = e4m3(byte, 7) / 16
        assert float(row[3]) == (-scale * float(nearest(torch.tensor([min(6.0, most / scale)]).double(),
                                 e2m1(torch.arange(8)))) if byte else 0.0)  # fmt: skip
        assert not row.abs().sum() - row[3].abs()
        assert torch.signbit(row[4])  # zeros keep their sign


def test_a_global_scale_of_zero_gives_zeros() -> None:
    for x in (torch.zeros(2, 32), torch.full((2, 32), 3.0)):
        values = decode(encode(x, NVFP4, torch.zeros(1)), NVFP4, torch.float64)
        assert not values.any()
    codes, scale, whole = encoded(torch.zeros(4, 32), SCHEMES["nvfp4"].weight)
    assert not real(codes, scale, NVFP4, torch.float64, whole).any()


def test_the_largest_weight_is_met_exactly_under_its_global_scale() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    weight[5, 17] = -9.5
    codes, scale, whole = encoded(weight, SCHEMES["nvfp4"].weight)
    assert whole is not None
    assert float(whole) == float(torch.tensor(9.5 / (6 * 448)))
    assert scale.view(torch.uint8)[5, 1] == 0x7E
    assert float(real(codes, scale, NVFP4, torch.float64, whole)[5, 17]) == pytest.approx(-9.5, rel=1e-6)


EDGES = {"static": STATIC_FP8, "token": TOKEN_FP8, "1x128": BLOCK_FP8, "mxfp4": MXFP4, "nvfp4": NVFP4}


@pytest.mark.parametrize("edge", EDGES)
def test_zeros_stay_zero_beside_numbers_of_any_size(edge: str) -> None:
    form = EDGES[edge]
    x = torch.zeros(4, 256)
    x[1], x[2, 128:], x[3] = 1e-30, 1e30, torch.linspace(-1, 1, 256)
    found = encode(x, form, torch.tensor([1.0]))
    values = decode(found, form, torch.float64)
    assert torch.isfinite(values).all()
    assert not values[0].any()
    assert not values[2, :128].any()
    if not form.scale.fixed:
        assert bool((values[1:].abs() > 0).flatten(1).any(1).all())


@pytest.mark.parametrize("kind", FP8S)
def test_a_dynamic_scale_is_the_limit_of_its_format(kind: str) -> None:
    """448 gives a scale of 1 in OCP's format and 448 / 240 in fnuz: the format's limit, not a convention."""
    form = Quantized(kind, Scale("token"))
    x = torch.tensor([[448.0, 1.0], [0.0, 0.0]])
    found = encode(x, form)
    assert found.scale.tolist() == [[float(torch.tensor(448.0 / FP8S[kind][1]))], [LEAST_SCALE]]
    assert decode(found, form, torch.float64)[0, 0] == pytest.approx(448.0, rel=1e-6)


@pytest.mark.parametrize("m", [0, 1, 3, 4, 5, 128, 129])
def test_scales_of_blocks_lie_as_their_shape_says(m: int) -> None:
    """Row g of token m has the amax (m + 1) x (g + 1)."""
    x = torch.ones(m, 256)
    for row in range(m):
        x[row, :128], x[row, 128:] = row + 1, (row + 1) * 2
    found = encode(x, BLOCK_FP8)
    assert found.scale.shape == BLOCK_FP8.scale.shape(m, 256) == (m, 2)
    for row in range(m):
        want = [float(torch.tensor((row + 1) * (g + 1) / 448.0)) for g in (0, 1)]
        assert found.scale[row].tolist() == pytest.approx(want, rel=1e-7)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_weight_is_near_what_it_was_in_every_scheme(name: str) -> None:
    form = SCHEMES[name].weight
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(200, 320, generator=generator) * torch.logspace(-3, 1, 200)[:, None]
    weight[7] = 0.0
    codes, scale, whole = encoded(weight, form)
    values = real(codes, scale.reshape(form.scale.shape(200, 320)), form, torch.float32, whole)
    assert not values[7].any()
    block = {"fp8_tensor": 200 * 320, "fp8_channel": 320, "fp8_block": 128 * 128, "mxfp4": 32, "nvfp4": 16}[name]
    step = 0.25 if "fp4" in name else 2**-4
    assert block > 0
    # within half a step of the largest number that shares the scale
    most = weight.abs().amax() if name == "fp8_tensor" else weight.abs().amax(1, keepdim=True)
    if name == "fp8_block":
        most = torch.nn.functional.pad(weight.abs().amax(1), (0, 56)).unflatten(0, (2, 128)).amax(1)
        most = most.repeat_interleave(128)[:200, None]
    assert bool(((values - weight).abs() <= most * step).all())
    held = Encoded(codes, scale.reshape(form.scale.shape(200, 320)), whole)
    assert torch.equal(values, decode(held, form, torch.float32))
