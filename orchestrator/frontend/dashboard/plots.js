// The plots: columns of points in, plotly figures out. PLOTS is the only list of the lines.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const MAX_DRAWN = 400; // points of one line; what lies between is shown by its maximum

const PLOTS = [
  { title: "Prefill queue", unit: "requests", lines: [["queue_requests", "waiting", "--queue-stage"]] },
  { title: "Wait in the queue", unit: "ms", lines: [["wait_p50", "P50", "--prefill"], ["wait_p99", "P99", "--warn"]] },
  { title: "Time to first token", unit: "ms",
    lines: [["ttft_p50", "P50", "--prefill"], ["ttft_p90", "P90", "--transfer"], ["ttft_p99", "P99", "--warn"]] },
  { title: "Inter-token latency", unit: "ms", lines: [["itl_p50", "P50", "--decode"], ["itl_p99", "P99", "--warn"]] },
  { title: "Output tokens", unit: "tokens/s", lines: [["output_tokens", "sent", "--decode"]] },
  { title: "Within objectives in the last minute, by class", unit: "%", factor: 100, top: 103, named: "in_time" },
  { title: "Decisions by reason", unit: "requests/s", named: "decisions", stacked: true },
  { title: "KV blocks in use", unit: "%", factor: 100, top: 100,
    lines: [["prefill_kv", "prefill", "--prefill"], ["decode_kv", "decode", "--decode"]] },
  { title: "Workers: ready, and desired (dotted)", unit: "workers", steps: true,
    lines: [["prefill_ready", "prefill", "--prefill"], ["decode_ready", "decode", "--decode"],
            ["prefill_desired", "prefill desired", "--prefill", "dot"],
            ["decode_desired", "decode desired", "--decode", "dot"]] },
];
const COLOURS = ["--prefill", "--decode", "--queue-stage", "--transfer", "--bad", "--place", "--frontend"];

for (const plot of PLOTS) {
  const box = document.createElement("div");
  box.className = "plot";
  box.innerHTML = "<h2></h2><div></div>";
  box.firstChild.textContent = plot.title + " ";
  const unit = document.createElement("span");
  unit.textContent = plot.unit;
  box.firstChild.append(unit);
  document.getElementById("plots").append(box);
  plot.at = box.lastChild;
}

function thinned(values, step) {
  if (step === 1) return values;
  const kept = [];
  for (let i = 0; i < values.length; i += step) {
    const known = values.slice(i, i + step).filter((value) => value !== null);
    kept.push(known.length ? Math.max(...known) : null);
  }
  return kept;
}

function namedLines(points, missing) {
  const names = [...new Set(points.flatMap((counts) => Object.keys(counts)))].sort();
  return names.map((name, i) =>
    [points.map((counts) => counts[name] ?? missing), name || "no class", COLOURS[i % COLOURS.length], "solid"]);
}

export function draw(history, minutes) {
  const from = Math.max(0, history.at.length - minutes * 60);
  const step = Math.ceil((history.at.length - from) / MAX_DRAWN) || 1;
  const times = history.at.slice(from).filter((_, i) => i % step === 0).map((at) => new Date(at * 1000));
  const ink = css("--dim"), grid = css("--line");
  for (const plot of PLOTS) {
    const lines = plot.named ? namedLines(history[plot.named].slice(from), plot.stacked ? 0 : null)
      : plot.lines.map(([key, ...rest]) => [history[key].slice(from), ...rest]);
    const traces = lines.map(([values, name, colour, dash]) => ({
      x: times, y: thinned(values, step).map((value) => value === null ? null : value * (plot.factor ?? 1)),
      name, mode: "lines", connectgaps: false, stackgroup: plot.stacked ? "one" : undefined,
      line: { color: css(colour), width: dash === "dot" ? 1.3 : 1.8, dash: dash ?? "solid", shape: plot.steps ? "hv" : "linear" },
      hovertemplate: `%{y:.4~g} ${plot.unit}<extra>${name}</extra>`,
    }));
    const layout = {
      margin: { l: 44, r: 8, t: lines.length > 1 ? 30 : 8, b: 34 }, showlegend: lines.length > 1, hovermode: "x unified",
      legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, font: { size: 11 } },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11 },
      hoverlabel: { bgcolor: css("--card"), font: { color: css("--ink") } },
      xaxis: { gridcolor: grid, type: "date", nticks: 6 },
      yaxis: { gridcolor: grid, rangemode: "tozero", zerolinecolor: grid,
               ...(plot.top ? { range: [0, plot.top] } : {}) },
    };
    window.Plotly.react(plot.at, traces, layout, { displayModeBar: false, responsive: true });
  }
}
