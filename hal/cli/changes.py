"""``--set FIELD=VALUE``: other values for fields of a problem, read as the field's current type."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hal.errors import HalError, UnknownName
from hal.formats import SCHEMES, STATIC_FP8, Format, Quantized, Scale, Tensor, dtype
from hal.ops.base import Op


def parse(text: str) -> tuple[str, str]:
    """``FIELD=VALUE`` as a pair, for argparse."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ArgumentTypeError(f"is FIELD=VALUE, got {text!r}")
    return name.strip(), value.strip()


def changed(op: Op[..., Any], changes: Mapping[str, str]) -> Op[..., Any]:
    """The op with those of the fields replaced that it has; plain formats follow a new ``dtype``."""
    mine = {f.name for f in fields(op)} & changes.keys()
    values = {name: _value(op, name, changes[name]) for name in sorted(mine)}
    if "dtype" in values:
        old, new = Tensor(getattr(op, "dtype")), Tensor(values["dtype"])  # noqa: B009 - not every op has one
        values |= {f.name: _follow(getattr(op, f.name), old, new) for f in fields(op) if f.name not in mine}
    return replace(op, **values)


def _follow(value: Any, old: Tensor, new: Tensor) -> Any:
    """The value with the old format replaced, inside tuples and dataclasses too."""
    if isinstance(value, Tensor):
        return new if value == old else value
    if isinstance(value, tuple):
        return tuple(_follow(item, old, new) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _follow(getattr(value, f.name), old, new) for f in fields(value)})
    return value


def check_known(ops: list[Op[..., Any]], changes: Mapping[str, str]) -> None:
    """Raise UnknownName for a field that none of the ops has."""
    known = {f.name for op in ops for f in fields(op)}
    titles = ", ".join(dict.fromkeys(op.title() for op in ops))
    for name in changes:
        if name not in known:
            raise UnknownName(f"field of {titles}", name, known)


def _value(op: Op[..., Any], name: str, text: str) -> Any:
    now = getattr(op, name)
    kind = next(str(f.type) for f in fields(op) if f.name == name)
    try:
        if text == "None" and "None" in kind:
            return None
        if "Scheme" in kind:
            return SCHEMES[text]
        if isinstance(now, (Tensor, Quantized)):
            return _format(text)
        if isinstance(now, bool):
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if isinstance(now, str):
            return dtype(text) and text if name.endswith("dtype") else text
        if isinstance(now, (int, float)):
            return type(now)(text)
        if now is None and kind.startswith(("int", "float", "str")):
            return {"int": int, "float": float, "str": str}[kind.split(" ")[0]](text)
        if isinstance(now, tuple) and all(isinstance(item, (int, str)) for item in now):
            items = [piece for piece in text.strip("()").split(",") if piece.strip()]
            return tuple(type(now[0])(piece.strip()) if now else int(piece) for piece in items)
    except (ValueError, KeyError):
        raise HalError(f"{op.title()}: {name} is {kind}, now {now}; got {text!r}") from None
    raise HalError(f"{op.title()}: {name} ({kind}) cannot be set from text; it is {now}")


def _format(text: str) -> Format:
    """``bfloat16``; narrow elements have a scale, a static one unless said: ``float8_e4m3fn dynamic``."""
    name, _, scale = text.partition(" ")
    kind = dtype(name)
    if kind.bits > 8 or kind.limit is None:
        if scale:
            raise ValueError(text)
        return Tensor(name)
    if scale in ("", "static"):
        return replace(STATIC_FP8, value=name)
    if scale == "dynamic":
        return Quantized(name, Scale("token"))
    raise ValueError(text)
