"""JSON files that say what they are: an object whose ``schema`` is a name and a version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hal.errors import HalError


def read_object(file: Path, schema: str) -> dict[str, Any]:
    """The object of a file. HalError where it cannot be read, or has another schema."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HalError(f"{file}: cannot be read as a {schema} file: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != schema:
        got = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise HalError(f"{file}: schema is {schema}, got {got!r}")
    return data
