// Asks the training process for new frames each second, and for its diagnosis every five seconds, and shows both. All
// text is inserted as text, never as HTML.

import { charts, count, duration, percent } from "/static/charts.js";

const EVERY_MS = 1000;
const HIDDEN_MS = 10000;
const DIAGNOSED_MS = 5000;
const PATIENCE_MS = 5000;
const REASONS = {
  start: "start", "too few": "too few workers", "too many": "too many workers", spread: "uneven batches",
  explore: "trial", undo: "undone", limit: "limit reached", demand: "asked the cluster", cache: "samples cached", failed: "tuning failed",
};

const $ = (id) => document.getElementById(id);
const put = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };
const element = (tag, kind, text) => {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
};
const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
const unbroken = (text) => text.replaceAll(" %", "\u00a0%"); // no line begins with a percent sign
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

const plots = charts(document);
const seen = { session: "", number: 0, loaders: new Map(), chosen: "", since: null };

// -- what is known ----------------------------------------------------------------------------------------------------

function take(state) {
  const session = `${state.process.node}/${state.process.pid}/${state.process.since}`;
  if (session !== seen.session) Object.assign(seen, { session, number: 0, loaders: new Map() });
  const names = new Set(state.loaders.map((one) => one.name));
  for (const name of seen.loaders.keys()) if (!names.has(name)) seen.loaders.delete(name);
  for (const loader of state.loaders) {
    const known = seen.loaders.get(loader.name) ?? { columns: Object.fromEntries(state.columns.map((c) => [c, []])) };
    for (const frame of loader.frames) {
      if (frame[0] <= (known.columns.number.at(-1) ?? 0)) continue;
      state.columns.forEach((column, i) => known.columns[column].push(frame[i]));
    }
    for (const values of Object.values(known.columns)) values.splice(0, values.length - state.keep);
    seen.loaders.set(loader.name, { ...known, ...loader });
  }
  seen.number = state.number;
  if (!seen.loaders.has(seen.chosen)) seen.chosen = busiest();
}

function busiest() {
  const all = [...seen.loaders.values()].sort((a, b) => b.batches - a.batches);
  return all[0]?.name ?? "";
}

// -- what is shown ----------------------------------------------------------------------------------------------------

function show(state) {
  const names = [...seen.loaders.keys()];
  const select = $("loader");
  if ([...select.options].map((o) => o.value).join("\n") !== names.join("\n")) {
    select.replaceChildren(...names.map((name) => new Option(name, name)));
  }
  select.value = seen.chosen;
  $("choice").hidden = names.length < 2;
  const loader = seen.loaders.get(seen.chosen);
  const { run_id, rank, node, pid } = state.process;
  const parts = [`run ${run_id}`, `rank ${rank}`, `machine ${node}`, `process ${pid}`, `dpex ${state.dpex}`];
  if (loader?.info.dataset) parts.push(`dataset ${loader.info.dataset}, batches of ${loader.info.batch_size}`);
  put("about", parts.join(" · "));
  if (loader) showLoader(loader);
}

function showLoader(loader) {
  const columns = loader.columns;
  const last = (column) => columns[column].at(-1) ?? 0;
  const { now } = loader;
  const empty = loader.state === "empty";
  if (empty) undiagnosed();
  put("idle", loader.state === "idle" ? "No batches are asked for right now: training is between epochs, or busy with something else." : "");
  document.title = now.wait_ratio === null ? "dpex" : `wait ${percent(now.wait_ratio)} · dpex`;

  put("wait", now.wait_ratio === null ? "–" : percent(now.wait_ratio));
  const level = now.wait_ratio === null ? "early" : now.wait_ratio < 0.05 ? "good" : now.wait_ratio < 0.2 ? "fair" : "bad";
  $("wait").closest(".tile").dataset.level = level;
  $("gpu-tile").hidden = now.gpu_stall_ratio === null;
  put("gpu", now.gpu_stall_ratio === null ? "–" : percent(now.gpu_stall_ratio));
  put("speed", now.batches_per_second === null ? "–" : `${count(now.batches_per_second)}/s`);
  put("speed-note", now.samples_per_second === null ? "batches per second"
    : `batches; ${plural(Math.round(now.samples_per_second), "sample")} per second`);

  const running = last("local_running") + last("remote_running");
  const wanted = last("local_wanted") + last("remote_wanted");
  const missing = wanted - running;
  put("workers", count(running));
  put("workers-note", wanted + running === 0 ? (loader.in_process ? "the training process makes the batches" : "no worker runs now")
    : `${count(last("local_running"))} local, ${count(last("remote_running"))} remote` +
      (missing > 0 ? `; ${count(missing)} more starting` : "") +
      (now.network_ratio === null ? "" : `; ${count(Math.round(now.network_bytes_per_second / 1e6))} MB/s from there, the network is in use for ${percent(Math.min(1, now.network_ratio))} of the time`));
  put("ready", last("prefetch") ? `${count(last("ready"))} of ${count(last("prefetch"))}` : count(last("ready")));
  put("ready-note", `${count(last("local_in_flight") + last("remote_in_flight"))} in flight; ${count(loader.batches)} delivered so far`);

  $("cache").hidden = !loader.cache;
  if (loader.cache) put("cache", cached(loader.cache, now.cache_hit_ratio));

  const range = Number(document.querySelector("[name=range]:checked").value);
  for (const plot of plots) plot.show(columns, range);
  showDecisions(loader);
  showMachines(loader);
}

function cached({ hits, misses, saved_s, memory_bytes, disk_bytes }, ratio) {
  const size = (bytes, where) => (bytes === null ? "" : `, ${count(bytes / 1e6)} MB ${where}`);
  const now = ratio === null ? "" : ` (${percent(ratio)} in the last 5 s)`;
  return `Cache: ${plural(hits, "sample")} of ${count(hits + misses)} came from it${now}, which saved ` +
    `${count(saved_s)} s of workers' time${size(memory_bytes, "in memory")}${size(disk_bytes, "on disk")}.`;
}

function showMachines({ machines, excluded }) {
  $("network").hidden = machines.length + excluded === 0;
  const rate = (bytes) => `${count(bytes / 1e6)} MB/s`;
  $("machines").replaceChildren(row("th", ["machine", "sends", "bandwidth", "round trip", "sent again"]),
    ...machines.map((one) => row("td", [one.name, rate(one.bytes_per_s), rate(one.bandwidth),
      `${count(1e3 * one.round_trip_s)} ms`, percent(one.loss)])));
  $("excluded").hidden = excluded === 0;
  put("excluded", `${plural(excluded, "node")} of the cluster ${excluded === 1 ? "gets" : "get"} no workers for a while, as what ran there failed repeatedly. The diagnosis says why.`);
}

let shownDecisions = "";
function showDecisions(loader) {
  const key = JSON.stringify([loader.name, loader.decisions, loader.tuned]);
  if (key === shownDecisions) return;
  shownDecisions = key;
  $("decisions").replaceChildren(...[...loader.decisions].reverse().map(decided));
  $("no-decisions").hidden = loader.decisions.length > 0;
  put("no-decisions", loader.tuned ? "None so far."
    : 'The number of workers is fixed by the script. With num_workers="auto" dpex chooses it, and says here why.');
  $("decisions-sub").hidden = !loader.tuned;
}

function decided(one) {
  const item = element("li");
  const head = element("div", "head");
  head.append(element("time", "", clock(one.at)), element("span", "what", `${one.from.text} → ${one.to.text}`),
    element("span", "reason", REASONS[one.reason] ?? one.reason));
  item.append(head, element("p", "why", one.text));
  const said = (what) => [
    what.batches_per_second === null ? "" : `${count(what.batches_per_second)} batches/s`,
    what.wait_ratio === null ? "" : `wait ${percent(what.wait_ratio)}`,
  ].filter(Boolean).join(", ");
  const brought = one.outcome ? `measured ${said(one.outcome)}: ${one.outcome.kept ? "kept" : "undone"}` : "not judged yet";
  if (one.predicted) item.append(element("p", "brought", `expected ${said(one.predicted)}; ${brought}`));
  return item;
}

// -- the diagnosis ----------------------------------------------------------------------------------------------------

let shownDiagnosis = "";
function undiagnosed() {
  shownDiagnosis = "";
  $("verdict").dataset.level = "early";
  put("verdict-title", "No batch has been delivered yet");
  put("verdict-text", "The training loop is waiting for its first batch.");
  put("verdict-about", "");
  put("hot-calls", "");
  $("first").hidden = $("evidence").hidden = true;
  showParts([]);
}

function showDiagnosis(one) {
  const key = JSON.stringify(one);
  if (key === shownDiagnosis) return;
  shownDiagnosis = key;
  const { shown, stretch } = one;
  const { batches, wall_s } = one.diagnosis.facts;
  $("verdict").dataset.level = one.level;
  put("verdict-title", shown.title);
  put("verdict-text", unbroken(shown.sentence));
  const end = shown.end ? [element("br", ""), element("b", "", "To end the stall: "), unbroken(shown.end)] : [];
  put("hot-calls", unbroken(shown.hot));
  $("first").replaceChildren(element("b", "", "First: "), unbroken(shown.first), ...end);
  $("first").hidden = one.level === "early";
  const about = one.is_whole ? (stretch === "run" ? "About the whole run" : "About the whole run so far, which is short")
    : "About the latest stretch";
  put("verdict-about", `${about}: ${plural(batches, "batch", "batches")} in ${count(wall_s)} s, at ${clock(one.at)}. ` +
    `${shown.confidence[0].toUpperCase()}${shown.confidence.slice(1)}.`);
  $("sections").replaceChildren(...shown.sections.map(section));
  $("evidence").hidden = false;
  showParts(shown.parts);
}

function section({ title, header, rows, lines }) {
  const made = element("section");
  made.append(element("h3", "", title));
  if (rows.length) {
    const table = element("table");
    table.append(row("th", header), ...rows.map((values) => row("td", values)));
    const scroll = element("div", "scroll");
    scroll.append(table);
    made.append(scroll);
  }
  const list = element("ul");
  list.append(...lines.map((line) => element("li", "", line)));
  if (lines.length) made.append(list);
  return made;
}

function row(kind, values) {
  const made = element("tr");
  made.append(...values.map((value) => element(kind, "", value)));
  return made;
}

function showParts(parts) {
  const shown = parts.filter(({ cause, ratio }) => ratio >= 0.005 || (cause === "consumer" && parts.length > 1));
  $("no-parts").hidden = shown.length > 0;
  $("parts").replaceChildren(...shown.map(({ cause, name, ratio, colour }) => {
    const item = element("li");
    item.dataset.cause = cause;
    const track = element("div", "track");
    const fill = element("div", "fill");
    fill.style.width = `${Math.min(100, 100 * ratio)}%`;
    fill.style.background = colour;
    track.append(fill);
    item.append(element("span", "", name), element("b", "", percent(ratio)), track);
    return item;
  }));
}

let asked = 0;
async function diagnose() {
  const number = ++asked;
  const loader = seen.chosen;
  const stretch = document.querySelector("[name=stretch]:checked").value;
  if (!loader || seen.loaders.get(loader).state === "empty") return;
  diagnosedAt = performance.now();
  try {
    const answer = await fetch(`/diagnosis.json?${new URLSearchParams({ loader, stretch })}`, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
    if (!answer.ok) return;
    const [one] = (await answer.json()).loaders;
    if (number === asked) showDiagnosis(one);
    if (one.level === "early" && seen.loaders.get(loader)?.state === "running") diagnosedAt = -DIAGNOSED_MS;
  } catch { /* the next turn says that nobody answers */ }
}

function linked(good) {
  if (good) seen.since = null;
  else seen.since ??= Date.now() / 1000;
  $("link").dataset.level = good ? "good" : "bad";
  put("link", good ? "live" : "no connection");
  $("lost").hidden = good;
  if (!good) {
    put("lost", `No connection to the training process since ${clock(seen.since)}. It has probably ended; this page shows its ` +
      "last measurements and tries again every second.");
  }
}

// -- once a second ----------------------------------------------------------------------------------------------------

let latest = null;
let diagnosedAt = -DIAGNOSED_MS;
async function turn() {
  try {
    const answer = await fetch(`/api/state?since=${seen.number}`, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    latest = await answer.json();
  } catch {
    linked(false);
    return;
  }
  const before = seen.session;
  take(latest);
  if (before && before !== seen.session) return turn(); // another process: ask for all it has
  linked(true);
  show(latest);
  if (!document.hidden && performance.now() - diagnosedAt >= DIAGNOSED_MS) diagnose();
}

async function forever() {
  await turn();
  setTimeout(forever, document.hidden ? HIDDEN_MS : EVERY_MS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });
$("loader").addEventListener("change", (event) => { seen.chosen = event.target.value; show(latest); diagnose(); });
for (const input of document.querySelectorAll("[name=stretch]")) input.addEventListener("change", diagnose);
for (const input of document.querySelectorAll("[name=range]")) input.addEventListener("change", () => latest && show(latest));
forever();
