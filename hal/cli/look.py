"""How the page of ``hal matrix`` looks, and what its words mean."""

from __future__ import annotations

# each kind of evidence: what it is, and what it is not (docs/evidence.md)
KINDS = {
    "ran": ("the kernel ran on a device of this architecture and gave the float64 reference's results",
            "that it did so on this very model of device, where another is named; how fast it is"),
    "emulated": ("its adapter ran over torch, or over a double that refuses what the library's sources refuse",
                 "the library's own code: only our reading of it"),
    "interpreted": ("its source gave the reference's results under Triton's interpreter, set as for the profile named",
                    "what the compiler makes of it; the order of programs on a GPU"),
    "compiled": ("Triton's compiler made code for this architecture",
                 "that it runs, gives the right results, or how fast"),
    "resolved": ("the resolver chooses it from the facts of the device, on the day of this page",
                 "anything of what runs"),
    "failed": ("the newest evidence says that it gave wrong results, raised or did not compile", "one to rely on"),
    "refused": ("no kernel serves the op on this device; every one gives its reason", "a fallback: nothing runs"),
}  # fmt: skip

# text on its own background, light and dark; each pair has a contrast of 4.5 or more
COLOURS = {
    "page": (("#1b1f24", "#ffffff"), ("#e6e8eb", "#14171a")),
    "quiet": (("#545b64", "#ffffff"), ("#a3abb5", "#14171a")),
    "head": (("#1b1f24", "#f0f2f5"), ("#e6e8eb", "#20252b")),
    "quiet-head": (("#545b64", "#f0f2f5"), ("#a3abb5", "#20252b")),
    "ran": (("#0b5226", "#d2f0dc"), ("#a8e6bd", "#12402a")),
    "emulated": (("#0a4a55", "#cfeef3"), ("#9fe0ec", "#0f3d47")),
    "interpreted": (("#173f80", "#dbe7fb"), ("#b5d0fb", "#1d3661")),
    "compiled": (("#5c4100", "#faecc4"), ("#f2d58a", "#463600")),
    "resolved": (("#454b53", "#e7e9ec"), ("#c2c8cf", "#343a41")),
    "failed": (("#8a1111", "#fde0de"), ("#ffb4ad", "#551a17")),
    "refused": (("#8a1111", "#ffffff"), ("#ffb4ad", "#14171a")),
}

STYLE = """
:root { color-scheme: light dark; --line: #c9ced5; %(light)s }
@media (prefers-color-scheme: dark) { :root { --line: #3d444c; %(dark)s } }
* { box-sizing: border-box; }
body { margin: 0; padding: 1rem; font: 15px/22px system-ui, sans-serif; }
body { color: var(--page); background: var(--page-on); }
h1 { font-size: 1.4rem; line-height: 1.3; margin: 0 0 .5rem; }
h2 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
p { margin: .4rem 0; max-width: 90ch; }
th, code, pre { overflow-wrap: anywhere; }
code, pre { font-family: ui-monospace, monospace; font-size: .92em; }
pre { white-space: pre-wrap; margin: .3rem 0; }
.quiet { color: var(--quiet); }
th .quiet { color: var(--quiet-head); font-weight: normal; }
.kind { display: inline-block; padding: 0 .45em; border-radius: .3em; font-size: .85em; white-space: nowrap; }
.date { font-size: .85em; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem .8rem; margin: .5rem 0; max-width: 80rem; }
dd { margin: 0; }
.box { overflow: auto; max-height: 88vh; border: 1px solid var(--line); border-radius: .4rem; }
table { border-collapse: separate; border-spacing: 0; }
th, td { text-align: left; vertical-align: top; padding: .5rem .6rem; }
th, td { border: solid var(--line); border-width: 0 1px 1px 0; }
td { min-width: 15rem; max-width: 24rem; }
th { background: var(--head-on); color: var(--head); }
thead th { position: sticky; top: 0; z-index: 2; }
th:first-child { position: sticky; left: 0; z-index: 1; min-width: 13rem; max-width: 16rem; }
.group td { background: var(--head-on); }
thead th:first-child { z-index: 3; }
summary { cursor: pointer; list-style: none; position: relative; padding-left: 1rem; }
summary::-webkit-details-marker { display: none; }
summary::before { content: "\\25b8"; position: absolute; left: 0; color: var(--quiet-head); }
details[open] > summary::before { content: "\\25be"; }
summary > div + div { margin-top: .375rem; }
details ul { margin: .3rem 0; padding-left: 1.1rem; }
:focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
@media (max-width: 40rem) {
  body { padding: .6rem; }
  dl { grid-template-columns: 1fr; gap: .1rem; }
  dd { margin-bottom: .5rem; }
  th:first-child { min-width: 8rem; max-width: 9rem; }
  td { min-width: 13.5rem; }
}
"""


def style() -> str:
    """The whole style sheet."""
    schemes = [
        " ".join(f"--{name}: {pair[i][0]}; --{name}-on: {pair[i][1]};" for name, pair in COLOURS.items())
        for i in (0, 1)
    ]
    return STYLE % dict(zip(("light", "dark"), schemes, strict=True))
