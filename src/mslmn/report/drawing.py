"""How all pictures look, and how they become SVGs that a page can hold."""

import html
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from ..extras import need
from .formats import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, SOFT, GRID = "#1f2933", "#52606d", "#d9dee3"
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and found by search
    "svg.image_inline": True,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": SOFT,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "text.color": INK,
    "axes.unicode_minus": False,
}


@dataclass(frozen=True)
class Panel:
    title: str
    note: str
    svg: str


@dataclass(frozen=True)
class Picture:
    key: str
    title: str
    caption: str
    panels: list[Panel]
    width: int  # of a panel at most, in CSS pixels
    least: int = 0  # of a panel that is never smaller: on a small screen it scrolls


@contextmanager
def drawing(width: float, height: float, rows: int = 0) -> Iterator[tuple["Figure", Any]]:
    """A figure in the report's style, whatever the user's settings are, which come back afterwards."""
    style = need("matplotlib.style", "experiments")
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has the letter
        figure = need("matplotlib.figure", "experiments").Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(rows, 1, sharex=True) if rows else figure.subplots()


def svg(figure: "Figure", name: str, alt: str) -> str:
    """As it may stand in a page: no prolog, no namespaces, no ids that another figure could have, few decimals."""
    matplotlib = need("matplotlib", "experiments")
    text = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(text.getvalue(), alt)


def _short(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def _inline(text: str, alt: str) -> str:
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*</defs>", "", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = body.replace("xlink:href", "href").replace("'DejaVu Sans Mono'", "ui-monospace, monospace")
    body = body.replace("'DejaVu Sans'", "system-ui")
    body = re.sub(r'(?<=\b[dxy]=")[^"]*', lambda path: re.sub(r"-?\d+\.\d{2,}", _short, path[0]), body)
    view = re.search(r'viewBox="[^"]*"', body)
    start = body.index(">") + 1
    label = html.escape(clean(alt), quote=True)
    return f'<svg {view[0] if view else ""} role="img" aria-label="{label}">{body[start:]}'.replace("\n", " ").strip()
