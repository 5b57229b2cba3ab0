"""A diagnosis as one HTML page that loads nothing, reads in light and dark, and prints. Pure; all text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from dpex.diagnose.facts import Facts
from dpex.diagnose.report import ReportSection, advice, confidence, failures, headline, parts, sections
from dpex.diagnose.verdict import Verdict
from dpex.measure.readable import percent

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --faint: #667; --line: #d8dce2; --mark: #f2f5f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --paper: #15181c; --faint: #9aa3ae; --line: #333a42;
  --mark: #1e2329; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h1::first-letter { text-transform: uppercase; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p.faint, th, li { color: var(--faint); }
p.first { background: var(--mark); padding: .75rem 1rem; border-radius: .4rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; font-size: .85rem; } td { white-space: nowrap; }
td:first-child, td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
.bar { display: flex; height: 1.4rem; border-radius: .3rem; overflow: hidden; margin: 1rem 0 .3rem; }
.bar span { min-width: 2px; } .key span { display: inline-block; margin-right: 1rem; font-size: .85rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .3rem; }
@media print { body { margin: 0; max-width: none; font-size: 11pt; } h2 { break-after: avoid; }
  tr { break-inside: avoid; }
  .bar, .key i { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
_NOTEBOOK = """
.dpex-diagnosis { max-width: 60rem; } .dpex-diagnosis h1 { font-size: 1.2rem; }
.dpex-diagnosis h1::first-letter { text-transform: uppercase; } .dpex-diagnosis summary { cursor: pointer; }
.dpex-diagnosis .scroll { overflow-x: auto; } .dpex-diagnosis th, .dpex-diagnosis td { text-align: left !important; }
.dpex-diagnosis h2 { font-size: 1rem; } .dpex-diagnosis .bar { display: flex; height: 1.2rem; }
.dpex-diagnosis .key span { display: inline-block; margin-right: 1rem; font-size: .85rem; }
.dpex-diagnosis .key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; }
"""


def html(found: Diagnosis, last: Sequence[str] = ()) -> str:
    """The page; ``last`` are lines for its end."""
    body = "\n".join([article(found), *(f"<p>{escape(line)}</p>" for line in last)])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>dpex: {escape(found.verdict.title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def fragment(found: Diagnosis) -> str:
    """Return the report for a notebook, with its tables folded, and a style that leaves the notebook's own alone."""
    tables = "\n".join(map(_section, sections(found)))
    folded = f"<details><summary>All tables</summary>\n{tables}\n</details>"
    return f'<div class="dpex-diagnosis">\n<style>{_NOTEBOOK}</style>\n{_summary(found)}\n{folded}\n</div>'


def article(found: Diagnosis) -> str:
    """All that is said of one loader."""
    return "\n".join(["<article>", _summary(found), *map(_section, sections(found)), "</article>"])


def _summary(found: Diagnosis) -> str:
    """The verdict, the advice and the wall time as a bar."""
    facts, verdict = found.facts, found.verdict
    end = [f'<p class="end"><strong>To end the stall:</strong> {escape(found.end_of_stall)}</p>']
    lines = [
        f"<h1>{escape(verdict.title)}</h1>",
        f"<p>{escape(verdict.sentence)}</p>",
        f'<p class="faint">{escape(headline(facts))}; {escape(confidence(verdict))}</p>',
        f'<p class="first"><strong>First:</strong> {escape(advice(found))}</p>',
        *(end if found.end_of_stall else ()),
        *(f'<p class="warning"><strong>Warning:</strong> {escape(line)}</p>' for line in failures(facts)),
        _bar(facts, verdict),
    ]
    return "\n".join(lines)


def _bar(facts: Facts, verdict: Verdict) -> str:
    """The wall time as a bar."""
    shown = [part for part in parts(facts, verdict) if part.ratio >= 0.005]
    if not shown:
        return ""
    bar = "".join(f'<span style="flex: {part.ratio:.4f}; background: {part.colour}"></span>' for part in shown)
    key = "".join(
        f'<span><i style="background: {part.colour}"></i>{escape(part.name)} {percent(part.ratio)}</span>'
        for part in shown
    )
    described = ", ".join(f"{part.name} {percent(part.ratio)}" for part in shown)
    return f'<div class="bar" role="img" aria-label="{escape(described)}">{bar}</div>\n<div class="key">{key}</div>'


def _section(section: ReportSection) -> str:
    lines = [f"<h2>{escape(section.title)}</h2>"]
    if section.rows:
        lines += ['<div class="scroll"><table>', _row("th", section.header)]
        lines += [_row("td", row) for row in section.rows]
        lines.append("</table></div>")
    if section.lines:
        lines.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in section.lines) + "</ul>")
    return "\n".join(lines)


def _row(cell: str, values: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(value)}</{cell}>" for value in values) + "</tr>"
