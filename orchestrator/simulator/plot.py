"""Line charts as PNG files, for sweeps and benchmarks. Needs Pillow, which vLLM installs; nothing else does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 900, 520
LEFT, RIGHT, TOP, BOTTOM = 80, 210, 46, 60
# Okabe and Ito's palette: told apart by the colour-blind too.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933"]


class PlotError(ValueError):
    """One line: what cannot be drawn, and the mend."""


def line_chart(
    path: Path,
    title: str,
    x_name: str,
    y_name: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    mark_y: float | None = None,
) -> None:
    """One line per series of (x, y) points; `mark_y` draws a dashed level. Raises PlotError."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise PlotError(f"--plot {path}: needs Pillow; run `pip install pillow`, or leave --plot out") from None
    points = [point for line in series.values() for point in line]
    if not points:
        raise PlotError(f"--plot {path}: there is nothing to draw")
    xs = _ticks(min(x for x, _ in points), max(x for x, _ in points))
    ys = _ticks(min(0.0, *(y for _, y in points)), max(y for _, y in points))
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw: Any = ImageDraw.Draw(image)
    font = ImageFont.load_default(13)

    def at(x: float, y: float) -> tuple[float, float]:
        wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + wide * (x - xs[0]) / (xs[-1] - xs[0]), TOP + high * (1 - (y - ys[0]) / (ys[-1] - ys[0]))

    for x in xs:
        draw.line([at(x, ys[0]), at(x, ys[-1])], fill="#e6e6e6")
        draw.text((at(x, 0)[0], HEIGHT - BOTTOM + 8), f"{x:g}", fill="#333333", font=font, anchor="ma")
    for y in ys:
        draw.line([at(xs[0], y), at(xs[-1], y)], fill="#e6e6e6")
        draw.text((LEFT - 8, at(0, y)[1]), f"{y:g}", fill="#333333", font=font, anchor="rm")
    if mark_y is not None:
        (left, level), (right, _) = at(xs[0], mark_y), at(xs[-1], mark_y)
        for start in range(int(left), int(right), 10):
            draw.line([(start, level), (start + 5, level)], fill="#888888")
    draw.text((LEFT, 4), title, fill="black", font=ImageFont.load_default(16))
    draw.text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 26), x_name, fill="black", font=font, anchor="ma")
    draw.text((LEFT, TOP - 6), y_name, fill="black", font=font, anchor="ls")
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        pixels = [at(x, y) for x, y in sorted(line)]
        if len(pixels) > 1:
            draw.line(pixels, fill=colour, width=2, joint="curve")
        if len(pixels) <= 60:
            for x, y in pixels:
                draw.ellipse([x - 3, y - 3, x + 3, y + 3], fill=colour)
        legend_y = TOP + 20 * number
        draw.line([(WIDTH - RIGHT + 14, legend_y + 7), (WIDTH - RIGHT + 38, legend_y + 7)], fill=colour, width=3)
        draw.text((WIDTH - RIGHT + 44, legend_y), name, fill="black", font=font)
    try:
        image.save(path, format="PNG")
    except OSError as error:
        raise PlotError(
            f"--plot {path}: cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose the range, about six of them."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(n * step, 10) for n in range(first, last + 1)]
