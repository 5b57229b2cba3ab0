"""The chart of the README: `num_workers="auto"` over torch at its best number of workers, one bar per row.

`python -m benchmarks.report` writes it beside the tables, from the same kept runs.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP, ROW = 960, 530, 60, 54, 22
AHEAD, BEHIND, TEXT, GRID = "#2b8a3e", "#e8590c", "#343a40", "#adb5bd"


def chart(title: str, note: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return an SVG image of horizontal bars with a line at 1, the largest ratio first.

    Args:
        title: The first line.
        note: The second line, smaller.
        bars: Name and ratio of each.
    """
    found = sorted(bars, key=lambda bar: -bar[1])
    most = max(ratio for _, ratio in found)
    height, scale = TOP + ROW * len(found) + 12, (WIDTH - LEFT - RIGHT) / most
    one = LEFT + scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"',
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="15" font-weight="600" fill="{TEXT}">{escape(title)}</text>',
        f'<text x="12" y="38" fill="{TEXT}">{escape(note)}</text>',
    ]
    for number, (name, ratio) in enumerate(found):
        y = TOP + ROW * number
        colour = AHEAD if ratio >= 1.0 else BEHIND
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="{TEXT}">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{ratio * scale:.1f}" height="{ROW - 7}" rx="2" fill="{colour}"/>',
            f'<text x="{LEFT + ratio * scale + 6:.1f}" y="{y + 14}" fill="{TEXT}">{ratio:.2f}x</text>',
        ]
    ends = f'x1="{one:.1f}" y1="{TOP - 4}" x2="{one:.1f}" y2="{height - 8}"'
    parts += [f'<line {ends} stroke="{GRID}" stroke-dasharray="3 3"/>', "</svg>"]
    return "\n".join(parts) + "\n"
