// The dashboard: listens to /fleet/stream, shows the fleet as cards and flows, and sends an operator's orders.

import { draw } from "./plots.js";

const HOUR_S = 3600;
const SEVERAL = 6; // workers of a role, above which cards stand in columns ...
const MANY = 48; // ... and above which they become small
const SHOWN = 400; // workers of a role
const STAGES = ["frontend", "place", "queue", "claim", "prefill", "transfer", "decode"];
const $ = (id) => document.getElementById(id);
const cards = new Map(); // by worker id
let history = null;
let sample = null;
let minutes = 15;

// ---- the stream ---------------------------------------------------------------------------------------------------

function listen() {
  const source = new EventSource("fleet/stream");
  source.addEventListener("history", (event) => { history = JSON.parse(event.data); plot(); });
  source.addEventListener("sample", (event) => { sample = JSON.parse(event.data); take(); });
  source.onopen = () => live(true, "live");
  source.onerror = () => {
    live(false, "no answer, trying again");
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

function live(on, text) {
  $("live").className = on ? "on" : "off";
  $("live").textContent = text;
}

function take() {
  const point = sample.point;
  if (point && history && point.at !== history.at.at(-1)) { // its clock may have been set back
    for (const [name, column] of Object.entries(history)) {
      column.push(point[name]);
      if (column.length > HOUR_S) column.shift();
    }
    plot();
  }
  show();
}

function plot() {
  if (history && window.Plotly && !document.hidden) draw(history, minutes);
}

// ---- the fleet ----------------------------------------------------------------------------------------------------

function show() {
  const { workers, queue, desired, point } = sample;
  $("model").textContent = sample.model;
  document.title = `${sample.model} · pd-orchestrator`;
  const running = workers.reduce((sum, worker) => sum + (worker.running ?? 0), 0);
  $("summary").textContent = `${workers.length} workers, ${running} requests running` +
    (point ? `, ${point.output_tokens} tokens/s` : "");
  $("whose").textContent = sample.silent_frontends.length
    ? `of ${sample.frontends} frontends ${sample.silent_frontends.join(", ")} did not answer: figures are without it` : "";
  for (const role of ["prefill", "decode"]) showPool(role, workers.filter((worker) => worker.role === role));
  for (const [id, card] of cards) {
    if (!workers.some((worker) => worker.id === id)) { card.remove(); cards.delete(id); }
  }
  $("queue-requests").textContent = queue ? queue.requests : "–";
  $("queue-wait").textContent = queue?.requests === 1 ? "prefill waits" : "prefills wait";
  $("queue-detail").textContent = queue ? `${queue.tokens} tokens, ${queue.claimed} claimed` : "Redis is away";
  const decodes = workers.some((worker) => worker.role === "decode" && worker.state === "ready");
  const by = desired ? desired.set_by : "";
  const resting = by === "idle" ? "idle; " : by === "wake" && !decodes ? "waking; " : "";
  $("desired").textContent = desired
    ? `${resting}desired: ${desired.prefill} prefill, ${desired.decode} decode (${desired.set_by}` +
      ` ${new Date(desired.set_at * 1000).toLocaleTimeString()}${desired.why ? ": " + desired.why : ""})` : "";
  for (const role of ["prefill", "decode"]) {
    const field = $("scale").elements[role];
    if (desired && document.activeElement !== field && !field.dataset.typed) field.value = desired[role];
  }
  document.body.dataset.samples = Number(document.body.dataset.samples ?? 0) + 1;
  showFlows(sample.flows);
  showSlowest(sample.slowest);
}

function showPool(role, workers) {
  const pool = $(`${role}-pool`);
  pool.classList.toggle("several", workers.length > SEVERAL);
  pool.classList.toggle("many", workers.length > MANY);
  const units = new Set(workers.map((worker) => worker.unit)); // as the desired ratio counts them
  const unready = new Set(workers.filter((worker) => worker.state !== "ready").map((worker) => worker.unit));
  $(`${role}-count`).textContent = `${units.size - unready.size} of ${units.size} ready` +
    (units.size < workers.length ? `, ${workers.length} ranks` : "") +
    (workers.length > SHOWN ? `, ${SHOWN} shown` : "");
  const byHost = Map.groupBy ? Map.groupBy(workers.slice(0, SHOWN), (worker) => worker.host) : grouped(workers);
  const wanted = [];
  for (const [host, there] of [...byHost].sort(([a], [b]) => a.localeCompare(b))) {
    if (byHost.size > 1) wanted.push(hostTitle(role, host));
    for (const worker of there) wanted.push(cardOf(worker));
  }
  const shown = pool.lastElementChild;
  if (wanted.length !== shown.children.length || wanted.some((node, i) => shown.children[i] !== node)) {
    shown.replaceChildren(...wanted);
  }
}

function grouped(workers) {
  const groups = new Map();
  for (const worker of workers.slice(0, SHOWN)) groups.set(worker.host, [...(groups.get(worker.host) ?? []), worker]);
  return groups;
}

const titles = new Map();
function hostTitle(role, host) {
  const key = `${role} ${host}`;
  if (!titles.has(key)) titles.set(key, element("div", "host", host));
  return titles.get(key);
}

function cardOf(worker) {
  let card = cards.get(worker.id);
  if (!card) {
    card = element("article", "worker");
    card.dataset.worker = worker.id;
    card.append(element("div", "name"), element("div", "bar"), element("div", "figures"), element("div", "orders"));
    card.children[0].append(element("span", "id", worker.id), element("span", "state"));
    card.children[1].append(document.createElement("i"));
    const role = element("button", "role"), drain = element("button", "drain", "drain");
    role.onclick = () => askRole(worker.unit, card.dataset.role === "prefill" ? "decode" : "prefill");
    drain.onclick = () => askDrain(worker.unit);
    card.children[3].append(role, drain);
    cards.set(worker.id, card);
  }
  const [name, bar, figures, orders] = card.children;
  card.dataset.role = worker.role;
  card.classList.toggle("not-ready", worker.state !== "ready");
  name.lastChild.textContent = worker.state;
  name.lastChild.className = `state ${worker.state}`;
  const known = worker.blocks_free !== null;
  const used = known && worker.blocks_total ? 1 - worker.blocks_free / worker.blocks_total : 0;
  bar.firstChild.style.width = `${100 * used}%`;
  bar.firstChild.className = used > 0.9 ? "high" : "";
  bar.title = known ? `${worker.blocks_total - worker.blocks_free} of ${worker.blocks_total} KV blocks in use` : "not heard yet";
  figures.textContent = known
    ? `KV ${Math.round(100 * used)}%  ·  ${worker.running} running  ·  ${worker.waiting} waiting  ·  step ${worker.step_ms.toFixed(1)} ms`
    : "no load heard yet";
  card.title = `${worker.id} on ${worker.host}, ${figures.textContent}`;
  orders.firstChild.textContent = `to ${worker.role === "prefill" ? "decode" : "prefill"}`;
  return card;
}

function showFlows(flows) {
  const svg = $("flows"), box = svg.getBoundingClientRect();
  const most = Math.max(1, ...flows.map((flow) => flow.bytes));
  const paths = [];
  for (const flow of flows) {
    const from = cards.get(flow.source)?.getBoundingClientRect(), to = cards.get(flow.target)?.getBoundingClientRect();
    if (!from || !to) continue;
    const [x1, y1] = [from.right - box.left, from.top + from.height / 2 - box.top];
    const [x2, y2] = [to.left - box.left, to.top + to.height / 2 - box.top];
    const bend = Math.max(24, Math.abs(x2 - x1) / 2);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`);
    path.setAttribute("stroke-width", (1.5 + 5 * flow.bytes / most).toFixed(1));
    path.dataset.flow = `${flow.source} ${flow.target}`;
    paths.push(path);
  }
  svg.replaceChildren(...paths);
}

// ---- the slowest requests -----------------------------------------------------------------------------------------

function showSlowest(requests) {
  const longest = Math.max(1, ...requests.map((request) => request.stages.at(-1).end_ms));
  $("slowest").firstElementChild.replaceChildren(...requests.map((request) => {
    const row = document.createElement("tr");
    const bar = element("div", "stagebar");
    for (const stage of request.stages) {
      const part = element("i", stage.name);
      part.style.left = `${100 * stage.begin_ms / longest}%`;
      part.style.width = `${100 * (stage.end_ms - stage.begin_ms) / longest}%`;
      part.title = `${stage.name} ${milliseconds(stage.end_ms - stage.begin_ms)} ${stage.worker}`;
      bar.append(part);
    }
    const fall = element("td", "waterfall");
    fall.append(bar);
    const how = `${request.outcome}, ${request.decision || "not placed"} (${request.reason}), ` +
      `${request.prompt_tokens} + ${request.output_tokens} tokens` + (request.retries ? `, ${request.retries.length} retries` : "");
    const id = element("td", "id", request.id);
    id.title = `orchestrator trace ${request.id}`;
    row.append(id, element("td", "time", milliseconds(request.stages.at(-1).end_ms)), fall, element("td", "how", how));
    return row;
  }));
}

const milliseconds = (ms) => ms >= 10000 ? `${(ms / 1000).toFixed(1)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;

// ---- orders -------------------------------------------------------------------------------------------------------

async function order(path, body, question, forcible) {
  const dialog = $("confirm");
  $("question").textContent = question;
  $("refused").textContent = "";
  $("forced").hidden = !forcible;
  const force = dialog.querySelector("[name=force]");
  force.checked = false;
  $("do").onclick = async (event) => {
    event.preventDefault();
    $("do").disabled = true;
    try {
      const answer = await fetch(`operator/${path}`, {
        method: "POST", headers: { "content-type": "application/json" },
        body: JSON.stringify(forcible ? { ...body, force: force.checked } : body),
      });
      if (answer.ok) dialog.close("yes");
      else {
        const { error } = await answer.json(); // an order's is text, one of its key or page an object
        $("refused").textContent = error?.message ?? error ?? `refused with ${answer.status}`;
      }
    } catch (error) {
      $("refused").textContent = `no answer: ${error.message}`;
    } finally {
      $("do").disabled = false;
    }
  };
  dialog.showModal();
}

const askRole = (worker, role) => order("role", { worker, role }, `${worker} becomes a ${role} worker?`, true);
const askDrain = (worker) => order("drain", { worker }, `${worker} finishes what it has, and ends?`, true);

$("scale").onsubmit = (event) => {
  event.preventDefault();
  const { prefill, decode } = event.target.elements;
  const body = { prefill: prefill.valueAsNumber, decode: decode.valueAsNumber };
  if (Object.values(body).some(Number.isNaN)) return;
  delete prefill.dataset.typed;
  delete decode.dataset.typed;
  order("scale", body, `The fleet gets ${body.prefill} prefill and ${body.decode} decode workers?`, false);
};
$("scale").oninput = (event) => { event.target.dataset.typed = "1"; };

for (const button of document.querySelectorAll("#range button")) {
  button.onclick = () => {
    minutes = Number(button.dataset.minutes);
    for (const other of document.querySelectorAll("#range button")) other.setAttribute("aria-pressed", other === button);
    plot();
  };
}

function element(tag, name, text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

for (const stage of STAGES) $("stages").append(element("i", `stage ${stage}`), stage);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", plot);
document.addEventListener("visibilitychange", plot);
addEventListener("resize", () => sample && showFlows(sample.flows));
listen();
