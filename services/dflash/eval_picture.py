"""Curves of an evaluation as pictures: acceptance by position, or over a training. One SVG, nothing needed.

By position, x is the slot of a block and y the share of rounds that kept its draft and all before it: the sum
of a curve's values, plus one, is the acceptance length. Colours are Okabe and Ito's, which colour-blind
people tell apart; from the eighth curve on they come again, dashed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from services.dflash.eval_result import EvalResult

Point = tuple[float, float]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_WIDTH, _HEIGHT = 680, 400
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 40, 220, 50  # margins; the legend stands on the right


def picture(results: Sequence[EvalResult]) -> str:
    """Of several block sizes one curve each; of one also a curve a domain, if prompts name them."""
    if len(results) > 1:
        return by_position_svg(
            {_label(f"block {r.block_size}", r): r.acceptance.by_position for r in results}
        )
    (result,) = results
    curves = {_label("all", result): result.acceptance.by_position}
    domains = {domain: requests for domain, requests in result.by_domain().items() if domain}
    for domain, requests in domains.items() if len(domains) > 1 else ():
        part = result.acceptance.of(requests)
        curves[f"{domain}: {part.pooled_mean:.2f}"] = part.by_position
    return by_position_svg(curves)


def by_position_svg(curves: Mapping[str, Sequence[float]]) -> str:
    """`curves`: by legend, shares in [0, 1] of slot 1, 2, ..; an empty one, or NaN, draws nothing."""
    slots = max([1, *(len(shares) for shares in curves.values())])
    return curves_svg(
        {label: list(enumerate(shares, start=1)) for label, shares in curves.items()},
        title="Share of rounds that kept the draft in a slot", across="slot of the block",
        x_range=(1, max(2, slots)), y_range=(0.0, 1.0),
    )  # fmt: skip


def curves_svg(
    curves: Mapping[str, Sequence[Point]], *, title: str, across: str,
    x_range: tuple[float, float], y_range: tuple[float, float],
) -> str:  # fmt: skip
    """`curves`: by legend, points (x, y) in the two ranges; y of NaN draws nothing. `across`: what x is."""
    frame = _Frame(x_range, y_range)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)}</text>',
        *frame.axes(across),
    ]
    for number, (label, points) in enumerate(curves.items()):
        parts += frame.curve(number, label, points)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _label(name: str, result: EvalResult) -> str:
    return f"{name}: {result.acceptance.pooled_mean:.2f}"


class _Frame:
    """Where a point of the two ranges lies, in pixels."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self._x_range, self._y_range = x_range, y_range

    def x(self, value: float) -> float:
        low, high = self._x_range
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self._y_range
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    def axes(self, across: str) -> list[str]:
        right, parts = _WIDTH - _RIGHT, []
        for value in _ticks(*self._y_range, most=7):
            y = self.y(value)
            parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.1f}</text>')
        for value in _ticks(*self._x_range, most=16 if self._x_range[1] < 100 else 6):
            x = self.x(value)
            parts.append(
                f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
            )
        middle = (_LEFT + right) / 2
        parts.append(
            f'<text x="{middle:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>'
        )
        return parts

    def curve(self, number: int, label: str, points: Sequence[Point]) -> list[str]:
        known = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points if not math.isnan(y))
        colour = _COLOURS[number % len(_COLOURS)]
        dashes = ' stroke-dasharray="5 3"' if number >= len(_COLOURS) else ""
        line = f'stroke="{colour}" stroke-width="2"{dashes}'
        y, x = _TOP + 12 + 18 * number, _WIDTH - _RIGHT + 14
        return [
            f'<polyline points="{known}" fill="none" {line}/>',
            f'<line x1="{x}" y1="{y}" x2="{x + 18}" y2="{y}" {line}/>',
            f'<text x="{x + 24}" y="{y + 4}">{escape(label)}</text>',
        ]


def _ticks(low: float, high: float, *, most: int) -> list[float]:
    """At most `most` round values in [low, high], at 1, 2 or 5 times a power of ten from each other."""
    unit = 10.0 ** math.floor(math.log10((high - low) / most))
    apart = next(unit * step for step in (1, 2, 5, 10, 20) if (high - low) / (unit * step) <= most)
    first = math.ceil(low / apart - 1e-9)
    return [number * apart for number in range(first, math.floor(high / apart + 1e-9) + 1)]
