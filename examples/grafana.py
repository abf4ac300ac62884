"""The panels of `deploy/grafana-dashboard.json`, without Grafana: `python examples/grafana.py [--prometheus URL]`.

Asks Prometheus what Grafana would ask it, and saves what a screenshot shows: each panel's series as JSON, and all
panels as a picture.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path

import httpx
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana-dashboard.json"
POINTS = 60
Series = dict[str, list[tuple[float, float]]]  # by name: seconds before the end, value


def name_of(legend: str, labels: dict[str, str]) -> str:
    """As Grafana fills in `{{label}}`."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), legend)


def panel_series(client: httpx.Client, panel: dict, last_s: float, rate_s: float) -> Series:
    """What the panel shows of the last `last_s` seconds. Raises httpx.HTTPStatusError for a query that is refused."""
    end = time.time()
    series: Series = {}
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", f"{rate_s:.0f}s").replace("$job", ".*")
        asked = {"query": query, "start": end - last_s, "end": end, "step": last_s / POINTS}
        answer = client.get("/api/v1/query_range", params=asked).raise_for_status().json()
        for found in answer["data"]["result"]:
            values = [(at - end, float(value)) for at, value in found["values"]]
            shown = [(round(at, 1), value) for at, value in values if not math.isnan(value)]
            if shown:
                series[name_of(target["legendFormat"], found["metric"])] = shown
    return series


def draw(panels: dict[str, Series], units: dict[str, str], picture: Path) -> None:
    figure, axes = plt.subplots(math.ceil(len(panels) / 3), 3, figsize=(15, 2.6 * math.ceil(len(panels) / 3)))
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (title, series) in zip(axes.flat, panels.items(), strict=False):
        for name, points in series.items():
            axis.plot(*zip(*points, strict=True), label=name)
        axis.set_title(f"{title} ({units[title]})" if units[title] not in ("none", "short") else title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.set_ylim(bottom=0)
        if series:
            axis.legend(fontsize=6, loc="upper left")
    figure.tight_layout()
    figure.savefig(picture, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--last", type=float, default=3600, help="seconds")
    parser.add_argument("--rate", type=float, default=30, help="seconds of a rate; four scrapes at least")
    parser.add_argument("--out", type=Path, default=Path("grafana"), help="OUT.json and OUT.png are written")
    asked = parser.parse_args()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    with httpx.Client(base_url=asked.prometheus, timeout=30) as client:
        shown = {panel["title"]: panel_series(client, panel, asked.last, asked.rate) for panel in panels}
    asked.out.with_suffix(".json").write_text(json.dumps(shown, indent=1) + "\n")
    draw(
        shown,
        {panel["title"]: panel["fieldConfig"]["defaults"]["unit"] for panel in panels},
        asked.out.with_suffix(".png"),
    )
    print(f"{sum(map(bool, shown.values()))} of {len(shown)} panels have data: {asked.out}.json, {asked.out}.png")


if __name__ == "__main__":
    main()
