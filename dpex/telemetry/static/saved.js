// Draws the charts of a saved page or a notebook, see dpex/system/chart.py. uPlot (Copyright (c) 2022 Leon Sorokin, MIT
// licence) is defined before this in the same scope, so that notebooks get no global names.

const percent = (v) => (v > 0 && v < 0.0995 ? `${(100 * v).toFixed(1)} %` : `${Math.round(100 * v)} %`);
const count = (v) => v.toLocaleString("en", { maximumFractionDigits: v < 10 ? 2 : 1 });

function drawAll(name, content) {
  for (const place of document.querySelectorAll(`[data-chart="${name}"]:not([data-drawn])`)) {
    place.dataset.drawn = "";
    place.replaceChildren(...content.panels.map((panel) => drawn(panel, content, name)));
  }
}

function drawn(panel, { times, events }, name) {
  const place = document.createElement("div");
  const title = document.createElement("h3");
  title.textContent = panel.title;
  place.append(title);
  const shown = panel.is_share ? percent : count;
  const whole = panel.series.every(({ values }) => values.every((v) => v === null || Number.isInteger(v)));
  // The colour of the page's text is known once the place is in the page.
  requestAnimationFrame(() => {
    const ink = getComputedStyle(place).color;
    const axis = { stroke: ink, grid: { stroke: "#8886", width: 0.5 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const plot = new uPlot({
      width: place.clientWidth || 800, height: panel.height,
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false }, sync: { key: name } },
      scales: { x: { time: false, range: (u, low, high) => [low, high] },
        y: { range: (u, low, high) => [0, panel.is_share ? 1 : Math.max(panel.least_top, 1.05 * (high ?? 0))] } },
      axes: [
        { ...axis, size: 28, values: (u, ticks) => ticks.map((v) => `${count(v)} s`) },
        { ...axis, size: 60, incrs: whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] : undefined,
          values: (u, ticks) => ticks.map(shown) },
      ],
      series: [
        { label: "time", value: (u, v) => (v === null ? "–" : `${count(v)} s`) },
        ...panel.series.map(({ name: label, colour }) => ({
          label, stroke: colour, fill: `${colour}47`, width: 1.6, points: { show: false },
          paths: uPlot.paths.stepped({ align: 1 }), value: (u, v) => (v === null ? "–" : shown(v)),
        })),
      ],
      hooks: { draw: [(u) => events.forEach((event) => mark(u, event, ink))] },
    }, [times, ...panel.series.map(({ values }) => values)], place);
    new ResizeObserver(() => place.clientWidth && plot.setSize({ width: place.clientWidth, height: panel.height })).observe(place);
  });
  return place;
}

function mark(u, { at_s, number }, ink) {
  const { ctx, bbox } = u;
  const x = u.valToPos(at_s, "x", true);
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  const size = devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = ink;
  ctx.setLineDash([3 * size, 4 * size]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.font = `600 ${11 * size}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.fillText(number, x + 3 * size, bbox.top + 11 * size);
  ctx.restore();
}
