"""One HTML page with everything in it: no script, nothing from elsewhere."""

import html
import re
from dataclasses import dataclass

from .drawing import Panel, Picture
from .formats import clean
from .tables import Column, Table

STYLE = """
:root { color-scheme: light; --ink: #1f2933; --soft: #52606d; --line: #d9dee3; --tint: #f5f7f9; --accent: #14578a }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth }
body { margin: 0; background: #fff; color: var(--ink); font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif }
header, main, footer { max-width: 84rem; margin: 0 auto; padding: 0 clamp(1rem, 4vw, 3rem) }
header { padding-top: clamp(1.5rem, 5vw, 4rem) }
footer { padding-top: 1rem; padding-bottom: 3rem; color: var(--soft); font-size: .875rem }
h1, h2, h3 { line-height: 1.2; letter-spacing: -.01em; text-wrap: balance; overflow-wrap: break-word }
h1 { font-size: clamp(1.75rem, 4.5vw, 2.75rem); margin: 0 0 1rem }
h2 { font-size: clamp(1.4rem, 3vw, 1.9rem); margin: 0 0 .75rem }
h3 { font-size: 1.15rem; margin: 0 0 .75rem }
p, li, figcaption, .caption { max-width: 46rem; overflow-wrap: break-word }
p { margin: 0 0 1rem }
a { color: var(--accent); text-underline-offset: .15em }
nav > ul { list-style: none; margin: 1.75rem 0 0; padding: 0; display: grid; gap: 1.5rem 3rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)) }
nav > ul > li { border-top: 2px solid var(--accent); padding-top: .7rem }
nav > ul > li > a { font-weight: 600; text-decoration: none }
nav p { margin: .3rem 0 .5rem }
nav ul ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; font-size: .9rem }
nav ul ul a { text-decoration: none }
nav a:hover { text-decoration: underline }
.group { border-top: 1px solid var(--line); margin-top: 3.5rem; padding-top: 2.5rem }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.1rem; margin: 0 0 1.25rem;
  font-size: .9375rem; max-width: 46rem }
.facts dt { color: var(--soft) }
.facts dd { margin: 0; overflow-wrap: anywhere }
.findings { margin: 0 0 1rem; padding: 1rem 1.25rem 1rem 2.25rem; background: var(--tint);
  border-left: 3px solid var(--accent); border-radius: 0 .4rem .4rem 0; max-width: 49rem }
.findings li + li { margin-top: .4rem }
.block { margin: 3rem 0 0 }
.scroll { overflow-x: auto }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
table { border-collapse: collapse; font-size: .9rem; line-height: 1.35;
  font-variant-numeric: tabular-nums lining-nums }
th, td { padding: .45rem .8rem; text-align: left; vertical-align: baseline; white-space: nowrap }
th:first-child, td:first-child { padding-left: 0; position: sticky; left: 0; background: #fff }
th { font-weight: 600 }
thead th { border-bottom: 1.5px solid var(--ink); vertical-align: bottom }
thead small { display: block; color: var(--soft); font-weight: 400; font-size: .8125rem }
tbody th, tbody td { border-bottom: 1px solid var(--line) }
tbody th { font-weight: 500 }
.more th:first-child, .more td:first-child { border-bottom-color: transparent }
.more:last-child td:first-child { border-bottom-color: var(--line) }
.number { text-align: right }
.paper { background: var(--tint); color: #3e4c59 }
.range { color: var(--soft); font-weight: 400 }
figcaption, .caption { color: var(--soft); font-size: .9375rem; line-height: 1.5; margin: .9rem 0 0 }
figure { margin: 0 }
.panels { display: grid; gap: 1.5rem 2.25rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)) }
.panel { max-width: var(--wide); min-width: 0 }
.panel p { margin: 0 0 .35rem; font-size: .9375rem; line-height: 1.3; display: flex; flex-wrap: wrap; gap: 0 .7rem;
  align-items: baseline }
.panel b { font-weight: 600 }
.panel p > span { color: var(--soft); font-size: .875rem; font-variant-numeric: tabular-nums }
.long { grid-template-columns: minmax(0, 1fr) }
.long svg { min-width: var(--least) }
svg { display: block; width: 100%; max-width: 100%; height: auto; overflow: visible }
svg * { stroke-linejoin: round; stroke-linecap: butt }
.together { white-space: nowrap }
sup { font-size: .72em; line-height: 0 }
@media (max-width: 40rem) {
  tbody th { white-space: normal; min-width: 6.5rem; max-width: 8.5rem }
  .range { display: block }
  tr > :first-child { box-shadow: 1px 0 var(--line) }
}
@media print { .scroll { overflow: visible } .block { break-inside: avoid } }
"""

ORDER = (
    *("generation_results", "signals", "generation_budgets"),
    *("word_results", "word_splits", "word_pairs", "errors", "word_errors", "confusions"),
    *("handwriting_results", "lines", "progress", "handwriting_plateau", "line_accuracies", "handwriting_lines"),
    *("memories", "curves", "generation_sizes"),
)  # of the blocks of a section: the result, what it looks like, why, the rest


@dataclass(frozen=True)
class Section:
    """All about the runs of one group."""

    name: str  # for links
    title: str
    facts: dict[str, str]
    findings: list[str]
    tables: list[Table]
    pictures: list[Picture]


def page(sections: list[Section], lead: str) -> str:
    body = "\n".join(_section(section) for section in sections)
    contents = _contents(sections) if len(sections) > 1 else ""
    title = typeset("MS-LMN: the paper's experiments, run again")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{typeset(lead)}</p>
{contents}
</header>
<main>
{body}
</main>
<footer>Paper: A. Carta, A. Sperduti, D. Bacciu, <cite>Incremental Training of a Recurrent Neural Network Exploiting a
Multi-Scale Dynamic Memory</cite>, 2020.</footer>
</body>
</html>
"""


def _contents(sections: list[Section]) -> str:
    entries = []
    for section in sections:
        links = "".join(
            f'<li><a href="#{section.name}-{block.key}">{typeset(block.title.split(" (")[0])}</a></li>'
            for block in _blocks(section)
        )
        link = f'<a href="#{section.name}">{typeset(section.title)}</a>'
        entries.append(f"<li>{link}<p>{typeset(section.findings[0])}</p><ul>{links}</ul></li>")
    return f'<nav aria-label="Contents"><ul>{"".join(entries)}</ul></nav>'


def _blocks(section: Section) -> list[Table | Picture]:
    return sorted([*section.tables, *section.pictures], key=lambda block: ORDER.index(block.key))


def _section(section: Section) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in section.facts.items())
    findings = "".join(f"<li>{typeset(sentence)}</li>" for sentence in section.findings)
    blocks = [
        _table(block, section.name) if isinstance(block, Table) else _picture(block, section.name)
        for block in _blocks(section)
    ]
    return f"""<section class="group" id="{section.name}">
<h2>{typeset(section.title)}</h2>
<dl class="facts">{facts}</dl>
<ul class="findings">{findings}</ul>
{chr(10).join(blocks)}
</section>"""


def _table(table: Table, prefix: str) -> str:
    name = f"{prefix}-{table.key}"
    head = "".join(_heading(column) for column in table.columns)
    rows = []
    for i in range(len(table.rows)):
        cells = []
        for j, column in enumerate(table.columns):
            text = _range(typeset(table.text(i, j)))
            content = f"<strong>{text}</strong>" if table.is_best(i, j) else text
            kind = "td" if j or column.number else 'th scope="row"'
            cells.append(f"<{kind}{_classes(column)}>{content}</{kind[:2]}>")
        more = ' class="more"' if i + 1 < len(table.rows) and not table.starts_group(i + 1) else ""
        rows.append(f"<tr{more}>{''.join(cells)}</tr>")
    return f"""<section class="block" id="{name}">
<h3>{typeset(table.title)}</h3>
<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{chr(10).join(rows)}
</tbody></table></div>
<p class="caption">{typeset(table.caption)}</p>
</section>"""


def _heading(column: Column) -> str:
    source = f"<small>{column.source}</small>" if column.source else ""
    return f'<th scope="col"{_classes(column)}>{typeset(column.name)}{source}</th>'


def _classes(column: Column) -> str:
    names = ["number"] * column.number + ["paper"] * (column.source == "paper")
    return f' class="{" ".join(names)}"' if names else ""


def _range(text: str) -> str:
    """What stands in parentheses is of less weight."""
    return re.sub(r"\([^()]*\)", lambda part: f'<span class="range">{part[0]}</span>', text)


def _picture(picture: Picture, prefix: str) -> str:
    panels = "\n".join(
        f'<div class="panel" style="--wide: {picture.width}px">'
        + (f"<p><b>{typeset(panel.title)}</b> <span>{typeset(panel.note)}</span></p>" if panel.title else "")
        + f"{_scrolling(panel) if picture.least else panel.svg}</div>"
        for panel in picture.panels
    )
    long = f' long" style="--least: {picture.least}px' if picture.least else ""
    return f"""<section class="block" id="{prefix}-{picture.key}">
<h3>{typeset(picture.title)}</h3>
<figure><div class="panels{long}">
{panels}
</div><figcaption>{typeset(picture.caption)}</figcaption></figure>
</section>"""


def _scrolling(panel: Panel) -> str:
    """On a small screen the drawing scrolls, with a finger or with keys."""
    label = escape(f"{panel.title}, {panel.note}")
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{panel.svg}</div>'


def escape(text: str) -> str:
    return html.escape(clean(text), quote=True)


def typeset(text: str) -> str:
    """Our own plain text, with the signs a printer would use."""
    text = escape(text).replace("&#x27;", "&rsquo;")
    text = re.sub(r"(?<=\d)\^\(k-1\)", "<sup>k&minus;1</sup>", text)
    text = re.sub(r"10\^-(\d+)", r"10<sup>&minus;\1</sup>", text)
    text = re.sub(r"(\d)e-0?(\d+)", r"\1&nbsp;&times;&nbsp;10<sup>&minus;\2</sup>", text)
    text = re.sub(r"(?<=\d) x (?=\d)", "&nbsp;&times;&nbsp;", text)
    text = re.sub(r"(?<=\d) (?=%|± \d)", "&nbsp;", text)
    text = text.replace(" x (", " &times; (")
    text = re.sub(r"\b[A-Z]{2}-[A-Z]{3}\b", r'<span class="together">\g<0></span>', text)
    return re.sub(r"(?<![\w.])-(?=\d)", "&minus;", text)
