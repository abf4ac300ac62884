"""Line charts as PNG files, for sweeps and benchmarks. They need matplotlib, which the extra `bench` installs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.config.explain import missing
from orchestrator.config.settings import ConfigError

# Okabe and Ito's palette, whose colours colour-blind people can tell apart.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933"]
MAX_MARKED_POINTS = 60  # on one line; more marks would hide it


def line_chart(
    path: Path,
    title: str,
    x_name: str,
    y_name: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    mark_y: float | None = None,
) -> None:
    """Draw one line per series of (x, y) points, and a dashed level at `mark_y`. Raises ConfigError without matplotlib,
    without points, and if the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(missing(f"--plot {path}", "matplotlib", "bench")) from None
    if not any(series.values()):
        raise ConfigError(f"--plot {path}: there is nothing to draw")
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x_name, ylabel=y_name)
    for number, (name, points) in enumerate(series.items()):
        xs, ys = zip(*sorted(points), strict=True)
        marker = "o" if len(points) <= MAX_MARKED_POINTS else ""
        colour, dashed = COLOURS[number % len(COLOURS)], number >= len(COLOURS)  # the second of a colour is dashed
        axes.plot(xs, ys, "--" if dashed else "-", color=colour, marker=marker, markersize=4, label=name)
    if mark_y is not None:
        axes.axhline(mark_y, color="#888888", linestyle="--", linewidth=1)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(color="#e6e6e6")
    figure.legend(loc="outside right upper", frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(
            f"--plot {path}: cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from None
