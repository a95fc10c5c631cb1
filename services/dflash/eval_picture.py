"""Acceptance by position as a picture: one SVG, a curve a block size or domain, nothing needed to draw it.

x: the slot of a block, y: the share of rounds that kept its draft and all before it. The sum of a curve's
values, plus one, is the acceptance length. Colours are Okabe and Ito's, which colour-blind people tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from services.dflash.eval_result import EvalResult

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_WIDTH, _HEIGHT = 640, 400
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 40, 180, 50  # margins; the legend stands on the right


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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">Share of rounds that kept the draft in a slot</text>',
        *_axes(slots),
    ]
    for number, (label, shares) in enumerate(curves.items()):
        parts += _curve(number, label, shares, slots)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _label(name: str, result: EvalResult) -> str:
    return f"{name}: {result.acceptance.pooled_mean:.2f}"


def _x(slot: int, slots: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (slot - 1) / max(1, slots - 1)


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1.0 - share)


def _axes(slots: int) -> list[str]:
    right, parts = _WIDTH - _RIGHT, []
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    every = -(-slots // 16)
    for slot in range(1, slots + 1, every):
        x = _x(slot, slots)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{slot}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">slot of the block</text>')
    return parts


def _curve(number: int, label: str, shares: Sequence[float], slots: int) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    known = [(slot, share) for slot, share in enumerate(shares, start=1) if share == share]
    points = " ".join(f"{_x(slot, slots):.1f},{_y(share):.1f}" for slot, share in known)
    y, x = _TOP + 12 + 18 * number, _WIDTH - _RIGHT + 14
    return [
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
        f'<line x1="{x}" y1="{y}" x2="{x + 18}" y2="{y}" stroke="{colour}" stroke-width="2"/>',
        f'<text x="{x + 24}" y="{y + 4}">{escape(label)}</text>',
    ]
