"""Line charts as SVG files: panels side by side, both axes logarithmic, a legend below."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap

__all__ = ["Line", "Panel", "chart"]

WIDTH, HEIGHT = 330, 250  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 26, 40  # of what is around its axes
ACROSS = 3
# Pixels per character of bold sans-serif, a little more than the average, at 15 and 11 pixels.
TITLE_CHARACTER, PANEL_CHARACTER = 8.6, 7.0
COLOURS = (
    "#c1272d",
    "#0072b2",
    "#009e73",
    "#e69f00",
    "#7b4fa3",
    "#56b4e9",
    "#8c6d31",
    "#555555",
    "#d55e9b",
    "#1b7837",
    "#a6761d",
    "#3b3bd6",
    "#00a6a6",
    "#b15928",
)
_STEPS = (1, 2, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One contender: its points (x, y). dashed: for what is a bound and was not measured."""

    name: str
    points: list[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: list[Line] = field(default_factory=list[Line])


def chart(title: str, panels: list[Panel], *, x: str, y: str, width: int = WIDTH) -> str:
    """Return an SVG picture; all panels have the same axes, and a name has the same colour in all of them.

    Names are coloured and listed in order of first use. A title too long for the picture is broken into lines. width:
    of a panel, in pixels.
    """
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    points = [point for panel in panels for line in panel.lines for point in line.points]
    span_x, span_y = _span([p[0] for p in points]), _span([p[1] for p in points])
    columns = min(ACROSS, len(panels))
    rows = -(-len(panels) // columns)
    legend = _legend(names, colours, columns * width)
    lines = wrap(title, int((columns * width - 16) / TITLE_CHARACTER))
    top = 11 + 19 * len(lines)
    high = top + rows * HEIGHT + legend[1]
    body = [
        f'<text x="8" y="{20 + 19 * at}" font-size="15" font-weight="bold">{escape(line)}</text>'
        for at, line in enumerate(lines)
    ]
    for at, panel in enumerate(panels):
        place = (at % columns * width, top + at // columns * HEIGHT)
        inside = _panel(panel, colours, (span_x, span_y), (x, y), width)
        body.append(f'<g transform="translate({place[0]} {place[1]})">\n{inside}\n</g>')
    body.append(f'<g transform="translate(0 {top + rows * HEIGHT})">\n{legend[0]}\n</g>')
    size = f'width="{columns * width}" height="{high}" viewBox="0 0 {columns * width} {high}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" fill="#222">'
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *body, "</svg>"]) + "\n"


def _span(values: list[float]) -> tuple[float, float]:
    """Return the limits of an axis: a little beyond the smallest and the largest value."""
    low, high = min(values), max(values)
    return low / 1.15, max(high, low * 1.5) * 1.15


def _ticks(span: tuple[float, float], steps: tuple[int, ...]) -> list[float]:
    powers = range(math.floor(math.log10(span[0])), math.ceil(math.log10(span[1])) + 1)
    return [step * 10.0**power for power in powers for step in steps if span[0] <= step * 10.0**power <= span[1]]


def _panel(
    panel: Panel,
    colours: dict[str, str],
    spans: tuple[tuple[float, float], tuple[float, float]],
    labels: tuple[str, str],
    width: int,
) -> str:
    wide, high = width - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = (
            math.log(value / span[0]) / math.log(span[1] / span[0]) for value, span in zip((x, y), spans, strict=True)
        )
        return round(LEFT + across * wide, 1), round(TOP + (1 - up) * high, 1)

    left = LEFT if PANEL_CHARACTER * len(panel.title) <= wide else 8
    out = [f'<text x="{left}" y="17" font-weight="bold">{escape(panel.title)}</text>']
    out.append(f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{high}" fill="none" stroke="#999"/>')
    many = math.log10(spans[1][1] / spans[1][0]) > 2.5
    for tick in _ticks(spans[1], (1,) if many else _STEPS):
        down = at(spans[0][0], tick)[1]
        out.append(f'<path d="M{LEFT} {down}h{wide}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 4}" y="{down + 4}" text-anchor="end">{tick:g}</text>')
    for tick in [2.0**power for power in range(0, 20, 3) if spans[0][0] <= 2.0**power <= spans[0][1]]:
        along = at(tick, spans[1][0])[0]
        out.append(f'<path d="M{along} {TOP}v{high}" stroke="#eee"/>')
        out.append(f'<text x="{along}" y="{TOP + high + 14}" text-anchor="middle">{tick:g}</text>')
    out.append(f'<text x="{LEFT + wide / 2:g}" y="{HEIGHT - 10}" text-anchor="middle">{escape(labels[0])}</text>')
    turned = f'transform="rotate(-90 11 {TOP + high / 2:g})" text-anchor="middle"'
    out.append(f'<text x="11" y="{TOP + high / 2:g}" {turned}>{escape(labels[1])}</text>')
    for line in panel.lines:
        places = [at(*point) for point in sorted(line.points)]
        colour, dashes = colours[line.name], ' stroke-dasharray="5 3"' if line.dashed else ""
        path = "L".join(f"{x} {y}" for x, y in places)
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')
        out += [f'<circle cx="{x}" cy="{y}" r="2.4" fill="{colour}"/>' for x, y in places if not line.dashed]
    return "\n".join(out)


def _legend(names: list[str], colours: dict[str, str], wide: int) -> tuple[str, int]:
    """Return the legend and its height; an entry that does not fit begins a new line."""
    out: list[str] = []
    x, y = 10.0, 12
    for name in names:
        needed = 36 + 7.2 * len(name)
        if x + needed > wide and x > 10:
            x, y = 10.0, y + 18
        out.append(f'<path d="M{x:g} {y}h18" stroke="{colours[name]}" stroke-width="3"/>')
        out.append(f'<text x="{x + 22:g}" y="{y + 4}">{escape(name)}</text>')
        x += needed
    return "\n".join(out), y + 14
