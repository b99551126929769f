"""A report as one HTML file, light and dark, without scripts and requests.

Messages and names come from agents, tests and engines, so they are hostile text. Every cell is
escaped, and the page's own policy forbids scripts, frames and loading.
"""

from collections.abc import Sequence
from html import escape

from perdure.reports.report_tables import Section
from perdure.reports.svg_plots import Plot

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d8dce0; --dim: #667; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e8; --paper: #16181b; --line: #363b41; --dim: #9aa2ab; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: right; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, .texts th, .texts td { text-align: left; }
th { font-weight: 600; } p, figcaption { color: var(--dim); margin: .3rem 0; }
.headline { color: var(--ink); font-size: 1.15rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: 1.5rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
""".strip()


def page(
    title: str, sections: Sequence[Section], plots: Sequence[Plot], made: str, headline: str = ""
) -> str:
    """The HTML page. `headline`: the sentence below the title; `made`: the footer."""
    lead = f'<p class="headline">{escape(headline)}</p>' if headline else ""
    figures = "\n".join(_figure(plot) for plot in plots)
    tables = "\n".join(_table(section) for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
{lead}
<div class="plots">
{figures}
</div>
{tables}
<p>{escape(made)}</p>
</body>
</html>
"""


def _figure(plot: Plot) -> str:
    return f"<figure><figcaption>{escape(plot.title)}</figcaption>\n{plot.svg}</figure>"


def _table(section: Section) -> str:
    kind = ' class="texts"' if section.texts else ""
    head = "".join(f"<th>{escape(name)}</th>" for name in section.columns)
    rows = "\n".join(_row(cells) for cells in section.rows)
    note = f"<p>{escape(section.note)}</p>\n" if section.note else ""
    return (
        f"<h2>{escape(section.title)}</h2>\n{note}<table{kind}>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    )


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
