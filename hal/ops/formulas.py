"""The formulas that references share, written on tensors of any precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from hal.formats import Encoded, Quantized, Scale, Scheme, dtype

if TYPE_CHECKING:
    import torch

    from hal.batch import Batch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` over the last axis."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + offset)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``."""
    return x * x.sigmoid()


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)``: the epsilon stands inside the root, beside the sum."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))``, and x itself above 20."""
    import torch

    return torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp()))


def descending(values: torch.Tensor) -> list[int]:
    """Places of the values, the largest first; of equal ones the lower place first."""
    numbers = values.tolist()
    return sorted(range(len(numbers)), key=lambda place: (-numbers[place], place))


def sequences(batch: Batch) -> Iterator[tuple[int, int, int, int, int]]:
    """For each sequence of a batch: its index, slot, context, first row, last row + 1."""
    row, host = 0, batch.host
    for index, (slot, context, length) in enumerate(zip(host.slots, host.contexts, host.lengths, strict=True)):
        yield index, slot, context, row, row + length
        row += length


def moving(batch: Batch) -> Iterator[tuple[int, int, int, int, int]]:
    """The same for those that move something: padding and sequences of no tokens are left out."""
    return (each for each in sequences(batch) if each[1] >= 0 and each[3] < each[4])


LEAST_SCALE = 2.0**-126  # of a dynamic scale: below, float32 may be flushed to zero, and zero over zero is none
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; the fourth bit is the sign


def encode(x: torch.Tensor, form: Quantized, scale: torch.Tensor | None = None) -> Encoded:
    """Elements ``x / scale``, saturated at the format's limit, rounded to nearest even.

    A dynamic scale is ``max |x| / limit`` of what it covers, in float32; in powers of two, as
    ``power_scale`` says; ``within`` a global one, as ``inner_scale`` says. ``scale``: what the checkpoint
    fixes, the scale itself or the global one ``[1]``.
    """
    within, fixed = (scale, None) if form.scale.within else (None, scale)
    if not form.scale.static:
        fixed = dynamic_scale(x, form, within)
    assert fixed is not None
    wide = spread(scale_values(fixed, form.scale, within).to(x.dtype), form.scale, *x.shape)
    return Encoded(narrowed(divided(x, wide).clamp(-form.limit, form.limit), form), fixed, within)


def divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale``, and zero of the sign of x where the scale is zero."""
    return (x / scale.masked_fill(scale == 0, 1)).mul(scale != 0)


def dynamic_scale(x: torch.Tensor, form: Quantized, within: torch.Tensor | None = None) -> torch.Tensor:
    """The scale of each row, or of each block of a row, of ``x [rows, columns]``."""
    rows, columns = x.shape
    most = block_amax(x, (1, form.scale.block[1] if form.scale.block else max(1, columns)))
    if within is not None:
        return inner_scale(most, form, within)
    if form.scale.dtype == "float8_e8m0fnu":
        return power_scale(most)
    return (most.double() / form.limit).float().clamp(min=LEAST_SCALE).reshape(form.scale.shape(rows, columns))


def inner_scale(most: torch.Tensor, form: Quantized, within: torch.Tensor) -> torch.Tensor:
    """Scales in e4m3 of blocks whose largest magnitudes are ``most``, under a global scale that multiplies them.

    ``most / (limit * within)`` in float32, at most 448, to nearest even. A block that is too small under its
    global scale gets zero, as does one of zeros: its values are zero.
    """
    import torch

    whole = (form.limit * within.float()).clamp(min=LEAST_SCALE)
    return (most.float() / whole).clamp(max=dtype(form.scale.dtype).limit).to(getattr(torch, form.scale.dtype))


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude in each block of ``x [rows, columns]``, partial ones at the ends included."""
    import torch

    if not x.numel():
        return x.new_zeros(-(-x.shape[0] // block[0]), -(-x.shape[1] // block[1]))
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % block[1], 0, -x.shape[0] % block[0]))
    blocks: torch.Tensor = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    return blocks.amax((1, 3))


def power_scale(most: torch.Tensor, rule: Literal["rounded", "ocp"] = "rounded") -> torch.Tensor:
    """Bytes of e8m0 for blocks of e2m1 whose largest magnitudes are ``most``: 2^(byte - 127).

    ``rounded``: floor(log2((bits(most) + 0x200000) & 0xFF800000)) - 2 on float32, so that what would
    saturate goes to the next power. ``ocp``: floor(log2(most)) - 2, where values up to 8 of the scale
    saturate at 6. Both clamped to 0..254; zeros give byte 0.
    """
    import torch

    bits = most.float().contiguous().view(torch.int32)
    if rule == "rounded":
        bits = bits + 0x200000
    return ((bits >> 23 & 0xFF) - 2).clamp(0, 254).to(torch.uint8)


def scale_values(scale: torch.Tensor, form: Scale, within: torch.Tensor | None = None) -> torch.Tensor:
    """Scales as numbers; bytes of powers of two are decoded: 255 is NaN, 0 is 2^-127.

    ``within``: global scales, ``[1]`` or of each row; their product is rounded to float32.
    """
    import torch

    if within is not None:
        return scale.float() * (within[..., None] if form.within == "channel" else within).float()
    if form.dtype != "float8_e8m0fnu":
        return scale
    power = torch.ldexp(torch.ones_like(scale, dtype=torch.float64), scale.to(torch.int32) - 127)
    return power.masked_fill(scale == 255, torch.nan)


def narrowed(x: torch.Tensor, form: Quantized) -> torch.Tensor:
    """Elements as the memory holds them, of numbers within the limit: nearest, ties to the even code."""
    import torch

    if form.packs == 1:
        return x.to(torch.float32).to(getattr(torch, form.value))
    known = torch.tensor(E2M1, dtype=x.dtype, device=x.device)
    middles = (known[1:] + known[:-1]) / 2
    size = x.abs()
    code = torch.bucketize(size, middles)  # how many middles lie below
    code += (size == middles[code.clamp(max=6)]) & (code % 2 == 1)  # met exactly: the even one
    code = (code + 8 * torch.signbit(x)).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4


def element_values(codes: torch.Tensor, form: Quantized, like: torch.dtype) -> torch.Tensor:
    """Elements as numbers, packed ones apart: two in a byte, the first in its low half."""
    import torch

    if form.packs == 1:
        return codes.to(like)
    known = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=like, device=codes.device)
    whole = codes.to(torch.int64)
    return torch.stack([known[whole & 15], known[whole >> 4 & 15]], -1).flatten(-2)


def spread(scale: torch.Tensor, form: Scale, rows: int, columns: int) -> torch.Tensor:
    """A scale of each element of a matrix ``[rows, columns]``, or what broadcasts to that."""
    if form.block:
        scale = scale.repeat_interleave(form.block[0], -2)[..., :rows, :]
        return scale.repeat_interleave(form.block[1], -1)[..., :columns]
    return scale[..., None] if form.per == "channel" else scale


def real(
    codes: torch.Tensor, scale: torch.Tensor, form: Quantized, like: torch.dtype, within: torch.Tensor | None = None
) -> torch.Tensor:
    """The real values of a quantized matrix ``[..., rows, columns]``; ``within``: its global scales, if it has."""
    value: torch.Tensor = element_values(codes, form, like)
    return value * spread(scale_values(scale, form.scale, within).to(like), form.scale, *value.shape[-2:])


def decode(x: Encoded, form: Quantized, like: torch.dtype) -> torch.Tensor:
    """The real values of what runs on an edge."""
    return real(x.value, x.scale, form, like, x.within)


def weight_of(params: Mapping[str, torch.Tensor], name: str, scheme: Scheme | None) -> torch.Tensor:
    """The real values of a weight among an op's parameters; experts on a leading axis."""
    weight = params[name]
    if scheme is None:
        return weight
    return real(weight, params[f"{name}_scale"], scheme.weight, weight.dtype, params.get(f"{name}_global"))
