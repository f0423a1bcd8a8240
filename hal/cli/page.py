"""The object of ``hal.matrix/1`` as one page: no script, nothing loaded from anywhere, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from hal.choice import rows_text
from hal.cli import words
from hal.cli.look import KINDS, style
from hal.cli.show import settings_text


def page(data: Mapping[str, Any]) -> str:
    """A whole HTML document. All that comes from names, reasons and files is escaped."""
    heads = "".join(_device(device) for device in data["devices"])
    body = "".join(
        _group(title, [row for row in data["ops"] if row["coarse"] is coarse], data["devices"])
        for coarse, title in ((True, "coarse: what models call"), (False, "fine: what composed kernels are made of"))
    )
    legend = "".join(
        f'<dt>{_kind(kind)}</dt><dd>{_text(is_)} <span class="quiet">Not: {_text(not_)}.</span></dd>'
        for kind, (is_, not_) in KINDS.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Ops and devices, {_text(data["date"])}</title>
<style>{style()}</style>
</head>
<body>
<h1>Which kernel runs each op on each device, why, and how far that was seen</h1>
<p>Made by {_code("hal matrix")} on {_time(data["date"])};
policy {_text(data["policy"])}; ranks: {_text(data["world"])}.
Each op has one problem that stands for it, of {_text(" or ".join(data["models"]) or "no model")}, or else its first
case: open its name to see which. Open a cell, by pointer, touch or Enter, for the reason. Where kernels differ by
rows (tokens of a step), 3..8 is from 3 to 8 of them. {_code("hal explain OP --device NAME")} tells of the kernels not
chosen.</p>
<p>Evidence is about a kernel on the cases of its op, not about this problem; a cell with parts is seen no better
than the least of them. A kernel changed after the day of its evidence may do otherwise.</p>
<div class="box" role="region" aria-label="Ops by devices" tabindex="0">
<table>
<thead><tr><th scope="col">op</th>{heads}</tr></thead>
{body}</table>
</div>
<h2>What the kinds of evidence say</h2>
<dl>{legend}</dl>
<h2>Where the evidence comes from</h2>
{_files(data["evidence"])}
{_broken(data["broken"])}</body>
</html>
"""


def _text(value: Any) -> str:
    return escape(str(value))


def _name(op: str) -> str:
    """An op's name, which may be broken before a capital."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "<wbr>", _text(op))


def _code(value: Any) -> str:
    return f"<code>{_text(value)}</code>"


def _time(day: str) -> str:
    return f'<time datetime="{_text(day)}">{_text(day)}</time>'


def _kind(kind: str, said: str = "") -> str:
    """A word on the colour of a kind: its own name, unless another is said."""
    return f'<span class="kind" style="color: var(--{kind}); background: var(--{kind}-on)">{said or kind}</span>'


def _seen(found: Mapping[str, Any], here: Iterable[str] = ()) -> str:
    """Kind, day, and on what, where that is not ``here``: names of the column itself."""
    where = words.where(found) if found["on"] not in here else ""
    after = [_time(found["date"])] if found["date"] else []
    after += [_text(where)] if where else []
    return " ".join([_kind(found["kind"]), *(f'<span class="date quiet">{text}</span>' for text in after)])


def _device(device: Mapping[str, Any]) -> str:
    about = f"{device['vendor']} {device['arch']}"
    return (
        f'<th scope="col" title="{_text(device["name"])}">{_text(device["device"])}'
        f'<br><span class="quiet">{_text(about)}<br>{_text(device["stack"])}</span></th>'
    )


def _group(title: str, rows: Iterable[Mapping[str, Any]], devices: Sequence[Mapping[str, Any]]) -> str:
    found = "".join(_row(row, devices) for row in rows)
    head = f'<tr class="group"><th scope="rowgroup">{_text(title)}</th><td colspan="{len(devices)}"></td></tr>'
    return f"<tbody>{head}\n{found}</tbody>\n" if found else ""


def _row(row: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> str:
    cells = "".join(_cell(cell, device) for cell, device in zip(row["cells"], devices, strict=True))
    site = f"<br>{_code(row['site'])}" if row["site"] else ""
    return (
        f'<tr><th scope="row"><details><summary title="{_text(row["contract"])}">{_name(row["op"])}</summary>'
        f'<span class="quiet">{_text(row["contract"])}<br>Problem of {_text(row["model"])}:{site}'
        f"<br>{_code(row['text'])}</span></details></th>{cells}</tr>\n"
    )


def _cell(cell: Mapping[str, Any], device: Mapping[str, Any]) -> str:
    hover = _text("\n".join(words.reasons(cell)))
    here = (device["device"], device["name"])
    if cell["refused"]:
        first, *rest = cell["refused"].splitlines()
        shown = f"<div>{_kind('refused')}</div><div>{_text(first)}</div>"
        more = f"<pre>{_text(chr(10).join(rest))}</pre>" if rest else ""
    else:
        shown = "".join(_piece(piece, len(cell["pieces"]) > 1, here) for piece in cell["pieces"])
        shown += f"<div>{_kind('failed', 'fell back')}</div>" if cell["fell_back"] else ""
        more = _details(cell)
    return f'<td><details><summary title="{hover}">{shown}</summary>{more}</details></td>'


def _piece(piece: Mapping[str, Any], several: bool, here: Iterable[str]) -> str:
    rows = f'<span class="quiet">{_text(rows_text(piece["rows"]))}</span> ' if several else ""
    return f"<div>{rows}{_code(piece['chosen'])}<br>{_seen(piece['evidence'], here)}</div>"


def _details(cell: Mapping[str, Any]) -> str:
    reasons = "".join(f"<li>{_text(reason)}</li>" for reason in words.reasons(cell))
    kernels = {(seen["part"], seen["kernel"]): seen for piece in cell["pieces"] for seen in piece["kernels"]}
    evidence = "".join(f"<li>{_line(seen)}</li>" for seen in kernels.values())
    layouts = settings_text(cell["layouts"])
    return (
        f"<ul>{reasons}</ul><ul>{evidence}</ul>"
        + (f"<p>layouts: {_code(layouts)}</p>" if layouts else "")
        + (f"<p>its problem here: {_code(cell['other_problem'])}</p>" if cell["other_problem"] else "")
    )


def _line(seen: Mapping[str, Any]) -> str:
    """``norm: triton.add_rms_norm``, its evidence, how much of it, and why where it failed."""
    part = f"{_text(seen['part'])}: " if seen["part"] else ""
    many = f", {'launches' if seen['kind'] == 'compiled' else 'cases'}: {_text(seen['cases'])}" if seen["cases"] else ""
    why = f": {_text(seen['why'])}" if seen["why"] else ""
    return f"{part}{_code(seen['kernel'])}: {_seen(seen)}{many}{why}"


def _files(files: Iterable[Mapping[str, Any]]) -> str:
    lines = "".join(
        f"<li>{_code(e['file'])}: {_text(e['device'])} ({_text(e['arch'])}), {_time(e['date'])}, "
        f"{_text(settings_text(e['stack']))}{_text('; ' + e['note']) if e['note'] else ''}</li>\n"
        for e in files
    )
    return f"<ul>{lines}</ul>" if lines else f"<p>There are {words.NO_EVIDENCE}.</p>"


def _broken(lost: Iterable[Mapping[str, Any]]) -> str:
    lines = "".join(f"<li>{_text(b['backend'])}: {_text(b['error'])}</li>" for b in lost)
    return f"<h2>Backends that failed to import</h2><ul>{lines}</ul>" if lines else ""
