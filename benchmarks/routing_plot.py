"""The routing benchmark as a picture: TTFT p90 of every policy in every cell, as plain SVG."""

import math
from collections.abc import Mapping, Sequence

_COLORS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f")
_LEFT, _WIDTH, _LINE, _TOP = 250, 640, 24, 60


def svg(cells: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> str:
    """A line for each cell, a dot for each policy; seconds, on a logarithmic scale."""
    values = [policies[name] for policies in cells.values() for name in names]
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))

    def x(value: float) -> float:
        return _LEFT + _WIDTH * (math.log10(value) - low) / (high - low)

    height = _TOP + _LINE * len(cells) + 20
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
        f' width="{_LEFT + _WIDTH + 30}" height="{height}">'
    )
    parts = [
        head,
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, name in enumerate(names):
        at = 20 + number * 130
        parts.append(f'<circle cx="{at}" cy="16" r="5" fill="{_COLORS[number]}"/>')
        parts.append(f'<text x="{at + 9}" y="20">{name}</text>')
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="50" y2="{height - 15}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{at:.1f}" y="46" text-anchor="middle">{10.0**power:g} s</text>')
    for number, (cell, policies) in enumerate(cells.items()):
        y = _TOP + _LINE * number + 10
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end">{cell}</text>')
        # the default last, so that it lies on top
        for color, name in reversed(list(zip(_COLORS, names, strict=False))):
            parts.append(
                f'<circle cx="{x(policies[name]):.1f}" cy="{y}" r="5" fill="{color}"'
                ' fill-opacity="0.8"/>'
            )
    return "\n".join([*parts, "</svg>", ""])
