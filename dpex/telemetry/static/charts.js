// The four charts: their series, and drawing by uPlot. Colours come from page.css, so that they follow the scheme.

const SMOOTH = 5; // frames that are summed for one point, because shares of single seconds vary too much

const LEAST_S = 60;

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const percent = (v) => (v < 0.0995 && v > 0 ? `${(100 * v).toFixed(1)} %` : `${(100 * v).toFixed(0)} %`);
const count = (v) => v.toLocaleString("en", { maximumFractionDigits: 1 });
export const duration = (s) =>
  s >= 1 ? `${s.toFixed(2)} s` : s >= 0.001 ? `${(1000 * s).toFixed(s >= 0.1 ? 0 : 1)} ms` : `${(1e6 * s).toFixed(0)} µs`;
export { percent, count };

// Sum of a column over the last SMOOTH frames, for each frame; null if none of them was measured.
function sums(values) {
  return values.map((_, i) => {
    let total = null;
    for (let k = Math.max(0, i - SMOOTH + 1); k <= i; k++) if (values[k] !== null) total = (total ?? 0) + values[k];
    return total;
  });
}
const over = (a, b) => a.map((v, i) => (v === null || !b[i] ? null : v / b[i]));
const inNext = (c) => c.wait_s.map((v, i) => v + c.transfer_s[i]);
const spent = (c) => sums(c.wait_s.map((v, i) => v + c.transfer_s[i] + c.work_s[i]));

// always: the series is listed even if all its values are 0. stacked: series lie on top of each other.
const CHARTS = {
  wait: {
    format: percent, top: 0.2, most: 1,
    series: [
      { label: "training loop", color: "orange", fill: true, always: true, values: (c) => over(sums(inNext(c)), spent(c)) },
      { label: "GPU", color: "violet", values: (c) => over(sums(c.gpu_stall_s), spent(c)).map((v) => v && Math.min(1, v)) },
    ],
  },
  workers: {
    format: count, top: 2, stepped: true, whole: true,
    series: [
      { label: "local", color: "blue", always: true, values: (c) => c.local_running },
      { label: "local, wanted", color: "blue", dashed: true, values: (c) => c.local_wanted },
      { label: "remote", color: "green", values: (c) => c.remote_running },
      { label: "remote, wanted", color: "green", dashed: true, values: (c) => c.remote_wanted },
    ],
  },
  queue: {
    format: count, top: 2, stepped: true, whole: true,
    series: [
      { label: "ready", color: "blue", fill: true, always: true, values: (c) => c.ready },
      { label: "in flight", color: "amber", always: true, values: (c) => c.local_in_flight.map((v, i) => v + c.remote_in_flight[i]) },
      { label: "prefetch", color: "gray", dashed: true, always: true, values: (c) => c.prefetch },
    ],
  },
  stages: {
    format: duration, top: 0.001, stacked: true,
    series: [
      { label: "load", color: "blue", always: true, values: (c) => over(sums(c.make_read_s), sums(c.made)) },
      { label: "transform", color: "amber", always: true, values: (c) => over(sums(c.make_transform_s), sums(c.made)) },
      { label: "collate", color: "green", values: (c) => over(sums(c.make_collate_s), sums(c.made)) },
      { label: "encode", color: "violet", values: (c) => over(sums(c.make_encode_s), sums(c.made)) },
    ],
  },
};

class Chart {
  constructor(figure, kind) {
    this.figure = figure;
    this.kind = kind;
    this.plotPlace = figure.querySelector(".plot");
    this.legend = figure.querySelector(".legend");
    this.plotPlace.setAttribute("role", "img");
    this.items = kind.series.map((one) => this.listed(one));
    this.range = 180;
    this.build();
    new ResizeObserver(() => this.fit()).observe(this.plotPlace);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
  }

  listed(one) {
    const item = document.createElement("li");
    const line = document.createElement("i");
    line.style.color = `var(--${one.color})`;
    if (one.dashed) line.className = "dashed";
    const value = document.createElement("b");
    item.append(line, `${one.label} `, value);
    this.legend.append(item);
    return { item, value };
  }

  build() {
    const kind = this.kind;
    const axis = { stroke: color("soft"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const order = kind.stacked ? [...kind.series].reverse() : kind.series;
    this.order = order;
    const before = this.plot?.data;
    this.plot?.destroy();
    this.plot = new uPlot({
      width: Math.max(200, this.plotPlace.clientWidth), height: this.plotPlace.clientHeight || 190,
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: {
        x: { time: true, range: (u, low, high) => [Math.max(high - this.range, Math.min(low, high - LEAST_S)), high] },
        y: { range: (u, low, high) => [0, Math.min(kind.most ?? Infinity, Math.max(kind.top, 1.1 * (high ?? 0)))] },
      },
      axes: [
        { ...axis, size: 28, space: 70, values: (u, ticks) => ticks.map(clock) },
        { ...axis, size: 58, incrs: kind.whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] : undefined,
          values: (u, ticks) => ticks.map((v) => (kind.format === percent ? `${Math.round(100 * v)} %` : v === 0 ? "0" : kind.format(v))) },
      ],
      series: [{}, ...order.map((one) => this.drawn(one))],
      hooks: { setCursor: [() => this.tell()] },
    }, before ?? [[], ...order.map(() => [])], this.plotPlace);
  }

  drawn(one) {
    const stroke = color(one.color);
    const fill = this.kind.stacked ? stroke : one.fill ? `${stroke}33` : undefined;
    return {
      stroke, fill, width: this.kind.stacked ? 0 : one.dashed ? 1.5 : 2, dash: one.dashed ? [5, 4] : undefined,
      points: { show: false }, paths: this.kind.stepped ? uPlot.paths.stepped({ align: -1 }) : undefined,
    };
  }

  fit() {
    const { clientWidth, clientHeight } = this.plotPlace;
    if (clientWidth) this.plot.setSize({ width: clientWidth, height: clientHeight });
  }

  show(columns, range) {
    this.range = range;
    this.values = this.kind.series.map((one) => one.values(columns));
    this.used = this.values.map((values, i) => this.kind.series[i].always || values.some((v) => v));
    const byName = new Map(this.kind.series.map((one, i) => [one, this.values[i]]));
    const stack = this.kind.stacked ? stacked(this.kind.series, byName) : byName;
    this.kind.series.forEach((one, i) => {
      this.items[i].item.hidden = !this.used[i];
      this.plot.series[this.order.indexOf(one) + 1].show = this.used[i];
    });
    this.plot.setData([columns.at, ...this.order.map((one) => stack.get(one))]);
    this.tell();
  }

  // The legend says the values under the cursor, or the latest.
  tell() {
    if (!this.values?.[0]?.length) return;
    const at = this.plot.cursor.idx ?? this.values[0].length - 1;
    const texts = this.values.map((values) => (values[at] == null ? "–" : this.kind.format(values[at])));
    texts.forEach((text, i) => (this.items[i].value.textContent = text));
    const said = this.kind.series.map((one, i) => (this.used[i] ? `${one.label} ${texts[i]}` : "")).filter(Boolean);
    this.plotPlace.setAttribute("aria-label", `${this.figure.querySelector("h3").textContent}, now: ${said.join(", ")}`);
  }
}

function stacked(series, values) {
  const found = new Map();
  let below = null;
  for (const one of series) {
    const mine = values.get(one);
    below = mine.map((v, i) => (v === null && !below?.[i] ? null : (v ?? 0) + (below?.[i] ?? 0)));
    found.set(one, below);
  }
  return found;
}

const clock = (seconds) =>
  new Date(1000 * seconds).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function charts(root) {
  return [...root.querySelectorAll("[data-chart]")].map((figure) => new Chart(figure, CHARTS[figure.dataset.chart]));
}
