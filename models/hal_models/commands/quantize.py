"""``hal quantize CHECKPOINT --scheme S --out DIR``: a quantized checkpoint from one that is not."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from hal.errors import CheckpointError
from hal_models.commands.loading import Bar, checkpoint

DIALECT = {"fp8_tensor": "modelopt", "fp8_block": "fp8", "nvfp4": "modelopt", "nvfp4+fp8": "modelopt"}  # else quark


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    from hal_models.quantization import PLAIN

    parser.add_argument("checkpoint", help="a folder, or tiny-dense, tiny-moe")
    parser.add_argument("--scheme", required=True, metavar="S", help="such as fp8_channel; an unknown one names them")
    parser.add_argument("--dialect", metavar="D", help="how it is written: compressed-tensors, fp8, modelopt or quark")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a folder that is not there yet")
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="modules to leave as they are"
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="PATTERN",
        help=f"modules left out unless named: {', '.join(PLAIN)}",
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="lines of text that fixed scales of inputs are measured on"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Write the folder; nothing of it is there if anything fails."""
    from hal_models.quantization import recipe
    from hal_models.writing import quantize

    rules = recipe(args.scheme, args.also, args.exclude)
    dialect = args.dialect or DIALECT.get(args.scheme, "quark")
    folder, out = checkpoint(args.checkpoint), args.out
    if out.exists():
        raise CheckpointError(f"{out}: is there already; --out is a folder that is not")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out}: there is no folder {out.parent}")
    lines = _lines(args.calibrate) if args.calibrate else None
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir()
    try:
        with Bar("quantizing") as bar:
            counts = quantize(folder, partial, rules, dialect, bar, lines)
        if not counts["quantized"]:
            raise CheckpointError(f"{folder}: {args.scheme} quantizes none of its {counts['plain']} projections")
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    before, after = (sum(p.stat().st_size for p in f.glob("*.safetensors")) for f in (folder, out))
    if args.json:
        row = {"schema": "hal.quantize/1", "checkpoint": args.checkpoint, "scheme": args.scheme, "dialect": dialect}
        print(json.dumps({**row, **counts, "bytes_before": before, "bytes_after": after, "out": str(out)}))
    else:
        print(
            f"{counts['quantized']} modules in {args.scheme}, {counts['plain']} left as they are, written as {dialect}"
        )
        if counts.get("filled"):
            print(f"{counts['filled']} experts that no line reached have the largest scale of those beside them")
        print(f"{before} bytes of tensors before, {after} after: {out}")
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--calibrate {path}: cannot be read as text: {error}") from None
