"""Projections of one input whose fixed scales differ: told apart before a model is bound."""

from __future__ import annotations

import re
from pathlib import Path

from hal_models.files import Files
from hal_models.quantization import Quantization, bare

# modules that open a layer: all of a stem have one input
OPENING = re.compile(r"(.*\.)(in_proj_(?:qkv|z|b|a)|[qkv]_proj)\.(input_(?:global_)?scale)$")


def apart(folder: Path, quantization: Quantization) -> tuple[tuple[str, int], ...]:
    """Modules whose scale is another than the first one's of their input, numbered from 1 by scale.

    Nothing where the folder holds no tensors: a plan needs none.
    """
    if not any(folder.glob("*.safetensors")):
        return ()
    scales: dict[str, dict[str, float]] = {}
    with Files(folder) as files:
        for name in sorted(files):
            found = OPENING.match(name)
            if not found:
                continue
            scheme = quantization.scheme(f"{found[1]}{found[2]}")
            if scheme and scheme.fixed and (value := files.read(name)).numel() == 1:
                scales.setdefault(f"{found[1]}{scheme}", {})[bare(f"{found[1]}{found[2]}")] = float(value)
    return tuple(
        (module, number)
        for of in scales.values()
        for number, value in enumerate(dict.fromkeys(of.values()))
        for module, mine in of.items()
        if number and mine == value
    )
