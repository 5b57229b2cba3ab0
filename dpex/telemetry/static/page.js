// Asks the training process for what is new once a second and shows it. All text goes in as text, never as HTML.

import { charts, count, duration, percent } from "/static/charts.js";

const EVERY_MS = 1000;
const HIDDEN_MS = 10000;
const PATIENCE_MS = 5000;
const CAUSES = {
  read: "Reading samples (storage or network)",
  transform: "Computing samples (decoding, augmenting)",
  collate: "Collate function",
  serialize: "Handing batches over (shared memory)",
  fetch: "Network from the workers",
  h2d: "Copy into page-locked memory",
  straggler: "Single slow batches",
  startup: "Workers starting, first batch of a pass",
  unknown: "Anything else",
};
const REASONS = {
  start: "first choice", "too few": "too few workers", "too many": "too many workers", elsewhere: "better elsewhere",
  "in-process": "no workers needed", spread: "uneven batches", explore: "trying", undo: "taken back", limit: "limit",
  lost: "workers lost", changed: "work has changed",
};

const $ = (id) => document.getElementById(id);
const put = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };
const element = (tag, kind, text) => {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
};
const plural = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;
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
  const idle = loader.state === "idle";
  $("verdict").dataset.level = empty ? "early" : loader.verdict.level;
  put("verdict-text", empty ? "No batch yet: the training loop is waiting for its first one."
    : loader.verdict.text + (idle ? " Right now nobody asks for batches: training is between passes, or at something else." : ""));
  document.title = now.stall_ratio === null ? "dpex" : `${percent(now.stall_ratio)} waiting · dpex`;

  put("stall", now.stall_ratio === null ? "–" : percent(now.stall_ratio));
  const level = now.stall_ratio === null ? "early" : now.stall_ratio < 0.05 ? "good" : now.stall_ratio < 0.2 ? "fair" : "bad";
  $("stall").closest(".tile").dataset.level = level;
  $("gpu-tile").hidden = now.gpu_stall_ratio === null;
  put("gpu", now.gpu_stall_ratio === null ? "–" : percent(now.gpu_stall_ratio));
  put("speed", now.batches_per_second === null ? "–" : `${count(now.batches_per_second)}/s`);
  put("speed-note", now.samples_per_second === null ? "batches per second"
    : `batches; ${plural(Math.round(now.samples_per_second), "sample")} per second`);

  const running = last("local_running") + last("remote_running");
  const wanted = last("local_wanted") + last("remote_wanted");
  const missing = wanted - running;
  put("workers", count(running));
  put("workers-note", wanted + running === 0 ? "batches are made in the training process"
    : `${count(last("local_running"))} here, ${count(last("remote_running"))} on the cluster` +
      (missing > 0 ? `; ${count(missing)} more starting` : ""));
  put("ready", last("limit") ? `${count(last("ready"))} of ${count(last("limit"))}` : count(last("ready")));
  put("ready-note", `${count(last("local_in_flight") + last("remote_in_flight"))} being made; ${count(loader.batches)} delivered so far`);

  const range = Number(document.querySelector("[name=range]:checked").value);
  for (const plot of plots) plot.show(columns, range);
  showCauses(loader.judged.causes);
  showDecisions(loader);
}

function showCauses(causes) {
  const shares = Object.entries(causes).filter(([, share]) => share >= 0.0005).sort((a, b) => b[1] - a[1]);
  $("no-causes").hidden = shares.length > 0;
  const items = shares.map(([cause, share]) => {
    const item = element("li");
    const track = element("div", "track");
    const fill = element("div", "fill");
    fill.style.width = `${Math.min(100, 100 * share)}%`;
    track.append(fill);
    item.append(element("span", "", CAUSES[cause] ?? cause), element("b", "", percent(share)), track);
    return item;
  });
  $("causes").replaceChildren(...items);
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
    what.stall_ratio === null ? "" : `${percent(what.stall_ratio)} waiting`,
  ].filter(Boolean).join(", ");
  const brought = one.outcome ? `brought ${said(one.outcome)}: ${one.outcome.kept ? "kept" : "taken back"}` : "being judged";
  item.append(element("p", "brought", `expected ${said(one.predicted)}; ${brought}`));
  return item;
}

function linked(good) {
  if (good) seen.since = null;
  else seen.since ??= Date.now() / 1000;
  $("link").dataset.level = good ? "good" : "bad";
  put("link", good ? "live" : "no connection");
  $("lost").hidden = good;
  if (!good) {
    put("lost", `No connection to the training process since ${clock(seen.since)}. It has probably ended; what you see is ` +
      "the last that it said. Trying again every second.");
  }
}

// -- once a second ----------------------------------------------------------------------------------------------------

let latest = null;
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
}

async function forever() {
  await turn();
  setTimeout(forever, document.hidden ? HIDDEN_MS : EVERY_MS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });
$("loader").addEventListener("change", (event) => { seen.chosen = event.target.value; show(latest); });
for (const input of document.querySelectorAll("[name=range]")) input.addEventListener("change", () => latest && show(latest));
forever();
