"""What the runs in a folder found, beside the paper: tables on the console, as Markdown and JSON, and one HTML page."""

import json
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..checkpoint import write_text
from ..experiments import records
from ..extras import need
from . import figures, findings, formats, page, tables
from .page import Section
from .runs import CASES, Runs, group

TITLES = {
    "generation": "Sequence generation",
    "words": "Spoken words with common suffixes",
    "handwriting": "Handwriting",
}
TASKS = {
    "generation": "Generate one given piece of music, sample by sample, from memory alone",
    "words": "Name the spoken word; words that end alike differ only at their beginning",
    "handwriting": "Read lines of text from the movements of the pen that wrote them; nobody tells where a letter ends",
}


def write(folder: Path, console: Console) -> Path:
    """Report on all results under a folder: report.json, report.md and report.html in it. The page is returned.

    Without matplotlib, as on a machine that only trains, there are no pictures.
    """
    found = records.find(folder)
    groups = group(found)
    if not groups:
        raise ValueError(
            f"no results under {folder}: looked for {records.RESULT} of the experiments {formats.listed(list(CASES))} "
            f"in it and its folders; run: mslmn reproduce all --out {folder}"
        )
    try:
        need("matplotlib", "experiments")
        missing = ""
    except ImportError as error:
        missing = f"no pictures: {error}, and mslmn report {folder} here or elsewhere"
    sections = [_section(runs, groups, pictures=not missing) for runs in groups]
    lead = _lead(found, groups)
    html = folder / "report.html"
    write_text(folder / "report.json", _json(groups, sections))
    write_text(folder / "report.md", _markdown(sections, lead))
    write_text(html, page.page(sections, lead))
    _print(sections, lead, console)
    if missing:
        console.print(Text(missing), soft_wrap=True)
    return html


def _section(runs: Runs, groups: list[Runs], pictures: bool) -> Section:
    """Named after its experiment, and after what else tells it from the other sections."""
    alike = [other for other in groups if other.experiment == runs.experiment]
    name, title = runs.experiment, TITLES[runs.experiment]
    if len(alike) > 1:
        name += f"-{alike.index(runs) + 1}"
        title += f", preset {runs.preset}"
    if sum(other.preset == runs.preset for other in alike) > 1:
        title += f", {runs.data}"
    return Section(
        name=name,
        title=title,
        facts={"task": TASKS[runs.experiment], "data": runs.data, "preset": runs.preset, "runs": findings.effort(runs)},
        findings=findings.findings(runs),
        tables=tables.tables(runs),
        pictures=figures.figures(runs, name) if pictures else [],
    )


def _lead(found: list[records.Record], groups: list[Runs]) -> str:
    shown = [record for runs in groups for record in runs.records]
    others = sorted({record.experiment for record in found} - set(CASES))
    names = formats.listed(list(dict.fromkeys(TITLES[runs.experiment].lower() for runs in groups)))
    text = (
        f"Recurrent networks with memories of many speeds, trained again and set beside the numbers of the paper that "
        f"proposed them: {names}. {len(shown):,} training run{'s' * (len(shown) != 1)} took "
        f"{findings.duration(sum(record.seconds for record in shown))} in all. Columns marked ours are of these runs; "
        "columns marked paper are the published numbers, on the paper's data."
    )
    return text + (f" Not shown: results of {', '.join(others)}." if others else "")


def _json(groups: list[Runs], sections: list[Section]) -> str:
    content = [
        {
            "experiment": runs.experiment,
            "preset": runs.preset,
            "data": runs.data,
            "runs": len(runs.records),
            "seeds": runs.seeds,
            f"{runs.case_name.removesuffix('s')}s": runs.cases,
            "seconds": sum(record.seconds for record in runs.records),
            "findings": section.findings,
            "tables": [formats.to_json(table) for table in section.tables],
        }
        for runs, section in zip(groups, sections, strict=True)
    ]
    return json.dumps({"experiments": content}, indent=1, allow_nan=False) + "\n"


def _markdown(sections: list[Section], lead: str) -> str:
    parts = ["# MS-LMN: the paper's experiments, run again\n", formats.escape(lead) + "\n"]
    for section in sections:
        parts.append(f"## {formats.escape(section.title)}\n")
        parts.append("".join(f"- {name}: {formats.escape(fact)}\n" for name, fact in section.facts.items()))
        parts.append("".join(f"- {formats.escape(sentence)}\n" for sentence in section.findings))
        parts += [formats.to_markdown(table) for table in section.tables]
    return "\n".join(parts)


def _print(sections: list[Section], lead: str, console: Console) -> None:
    console.print(Text(lead))
    for section in sections:
        console.print()
        console.print(Text(formats.clean(section.title), style="bold underline"))
        for name, fact in section.facts.items():
            console.print(Text(f"{name}: {formats.clean(fact)}"))
        for sentence in section.findings:
            console.print(Text(f"- {formats.clean(sentence)}"))
        for table in section.tables:
            console.print()
            console.print(formats.to_rich(table))
