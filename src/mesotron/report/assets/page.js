"use strict";
// Draws every chart with Plotly from the page's JSON, and applies one state to all of them.
const $ = (id) => document.getElementById(id), all = (what) => [...document.querySelectorAll(what)];
const data = JSON.parse($("data").textContent), key = `mesotron report ${document.title}`;
const recall = () => { try { return JSON.parse(sessionStorage.getItem(key)) || {}; } catch { return {}; } };
const state = { axis: "steps", smooth: data.smooth, hidden: [], theme: "auto", zoom: null, ...recall() };
const SIGNS = { warn: "▲", stop: "■", clear: "○", rollback: "↺" }, LEVELS = { warn: "fair", stop: "bad" };
const DASHES = ["solid", "dash", "dot", "dashdot"], SHAPES = ["circle", "square", "diamond", "triangle-up"];
const colors = {}; // of the current theme
function color(name) {
  if (!colors[name]) { $("said").style.color = `var(--${name})`; colors[name] = getComputedStyle($("said")).color; }
  return colors[name];
}
const fade = (rgb, share) => rgb.replace("rgb(", "rgba(").replace(")", `, ${share})`);
const escape = (text) => text.replace(/[&<>]/g, (c) => `&#${c.charCodeAt(0)};`); // Plotly knows some tags

function smoothed(values) { // a running mean from both sides, so that nothing comes late
  const pass = (list) => {
    let sum = 0, weight = 0;
    return list.map((y) => (y === null ? null : (sum = sum * state.smooth + y) / (weight = weight * state.smooth + 1)));
  };
  const back = pass([...values].reverse()).reverse();
  return pass(values).map((y, k) => (y === null ? null : (y + back[k]) / 2));
}

function figure(spec, width) {
  const own = spec.xName !== null, traces = [], shapes = [], annotations = [], runs = new Map();
  const lines = spec.lines.filter((line) => !(data.shared && state.hidden.includes(line.group)));
  for (const line of lines) {
    const grid = own ? {} : data.runs[line.run].x[line.grid], x = line.x || grid[state.axis] || grid.steps;
    const ink = color(line.dots === "crosses" ? "bad" : `c${line.color}`), known = line.y.filter((y) => y !== null).length;
    const sparse = known < 2 || known * 2 < line.y.length, smooth = state.smooth > 0 && !own && !sparse;
    const base = { x, connectgaps: sparse, legendgroup: line.name, hoverinfo: "skip", showlegend: false, mode: "lines" };
    if (!own) runs.set(line.run, ink);
    if (line.low) traces.push({ ...base, y: line.low, line: { width: 0 } },
      { ...base, y: line.high, line: { width: 0 }, fill: "tonexty", fillcolor: fade(ink, 0.15) });
    if (smooth && lines.length <= 6) traces.push({ ...base, y: line.y, line: { width: 1, color: fade(ink, 0.3) } });
    traces.push({ ...base, y: smooth ? smoothed(line.y) : line.y, name: escape(line.name), showlegend: true, hoverinfo: "all",
      hovertemplate: `%{y:.4~g}${lines.length > 1 ? "  %{fullData.name}" : ""}<extra></extra>`,
      mode: line.dots === "crosses" ? "markers" : line.dots || sparse ? "lines+markers" : "lines",
      line: { color: ink, width: 1.9, dash: DASHES[line.dash] },
      marker: { color: ink, size: line.dots === "crosses" ? 11 : 7, symbol: line.dots === "crosses" ? "x-thin-open" : SHAPES[line.dash] } });
  }
  for (const [y, label] of spec.rules) {
    shapes.push({ xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: color("soft"), width: 1, dash: "dot" } });
    annotations.push({ xref: "paper", x: 0, xanchor: "left", y: spec.log ? Math.log10(y) : y, yanchor: "bottom", text: label, showarrow: false });
  }
  for (const [run, ink] of runs) for (const mark of data.runs[run].marks) {
    const axes = data.runs[run].x.main, near = axes.steps.findIndex((step) => step >= mark.step);
    const x = state.axis === "steps" ? mark.step : (axes[state.axis] || axes.steps).at(near), one = data.runs.length === 1;
    const line = { color: one ? color(LEVELS[mark.severity] || "good") : ink, width: 1, dash: "dash" };
    if (data.runs.length <= 4) shapes.push({ yref: "paper", x0: x, x1: x, y0: 0, y1: 1, opacity: 0.75, line });
    annotations.push({ x, yref: "paper", y: 1, yanchor: "bottom", text: SIGNS[mark.severity] || "●", showarrow: false,
      font: { color: line.color, size: 11 }, hovertext: escape(`${one ? "" : `${data.runs[run].name}, `}step ${mark.step}, ${mark.text}`) });
  }
  const legend = lines.length > 1 && (own || !data.shared), soft = color("soft"), hair = color("hair"), card = color("card");
  const entry = 45 + 6.5 * Math.max(0, ...lines.map((line) => line.name.length)); // pixels
  const rows = legend ? Math.ceil(lines.length / Math.max(1, Math.floor((width - 60) / entry))) : 0;
  const axis = { gridcolor: hair, linecolor: hair, zeroline: false, color: soft, automargin: true, exponentformat: "power" };
  return { data: traces, layout: { shapes, annotations, height: 215 + 19 * rows, showlegend: legend, hovermode: "x unified",
    margin: { l: 46, r: 12, t: 16, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 11, color: soft }, legend: { orientation: "h", y: 1.05, yanchor: "bottom", x: 0, tracegroupgap: 0, font: { size: 12 } },
    hoverlabel: { bgcolor: card, bordercolor: hair, font: { color: color("ink") }, align: "left" },
    xaxis: { ...axis, showgrid: false, title: { text: own ? spec.xName : state.axis, standoff: 4 }, type: spec.logX ? "log" : "linear",
      ...(state.zoom && !own ? { range: [...state.zoom] } : { autorange: true }) },
    yaxis: { ...axis, fixedrange: true, type: spec.log ? "log" : "linear", nticks: 5 } } };
}

const charts = all(".plot").map((place) => ({ place, spec: data.charts[place.dataset.chart], shown: false, stale: true }));
const draw = async (chart) => {
  const first = !chart.place.on, { data: traces, layout } = figure(chart.spec, chart.place.clientWidth);
  chart.stale = false;
  await Plotly.react(chart.place, traces, layout, { displayModeBar: false, responsive: true });
  if (!first || chart.spec.xName !== null) return;
  chart.place.on("plotly_relayout", (change) => {
    if ("xaxis.range[0]" in change) update({ zoom: [change["xaxis.range[0]"], change["xaxis.range[1]"]] });
    else if (change["xaxis.autorange"] && state.zoom) update({ zoom: null });
  });
  const others = (act) => charts.forEach((each) => each !== chart && each.shown && each.place.on && each.spec.xName === null && act(each.place));
  chart.place.on("plotly_hover", ({ event, xvals }) => event?.isTrusted && others((place) => Plotly.Fx.hover(place, { xval: xvals[0] })));
  chart.place.on("plotly_unhover", ({ event }) => event?.isTrusted && others((place) => Plotly.Fx.unhover(place)));
};
function update(change) {
  Object.assign(state, change);
  document.documentElement.dataset.theme = state.theme;
  Object.keys(colors).forEach((name) => delete colors[name]);
  $("theme").textContent = `Theme: ${state.theme}`;
  if ($("reset")) $("reset").hidden = !state.zoom;
  all("[data-run]").forEach((chip) => chip.setAttribute("aria-pressed", !state.hidden.includes(+chip.dataset.run)));
  charts.forEach((chart) => { chart.stale = true; if (chart.shown) draw(chart); });
}
function read(chart, step) { // the keyboard's cursor: hover the next point and say it
  const line = chart.spec.lines[0], grid = chart.spec.xName === null ? data.runs[line.run].x[line.grid] : {};
  const x = line.x || grid[state.axis] || grid.steps;
  chart.point = Math.min(Math.max((chart.point ?? (step > 0 ? -1 : x.length)) + step, 0), x.length - 1);
  Plotly.Fx.hover(chart.place, { xval: x[chart.point] });
  const values = chart.spec.lines.map((each) => `${each.name} ${each.y[chart.point] ?? "–"}`).join(", ");
  $("said").textContent = `${chart.spec.title}, ${chart.spec.xName ?? state.axis} ${x[chart.point]}: ${values}`;
}

(async () => { // the policy of the page knows Plotly's script by its hash
  const packed = Uint8Array.from(atob($("plotly").textContent), (c) => c.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
  if ($("bar")) {
    $("bar").hidden = false;
    Object.keys(data.runs[0].x.main).filter((name) => data.runs.every((run) => run.x.main[name]?.at(-1) > 0))
      .forEach((name) => $("axis").add(new Option(name, name, false, name === state.axis)));
    $("smooth").value = state.smooth;
    $("axis").addEventListener("change", (event) => update({ axis: event.target.value, zoom: null }));
    $("smooth").addEventListener("input", (event) => update({ smooth: +event.target.value }));
    $("reset").addEventListener("click", () => update({ zoom: null }));
  }
  $("theme").hidden = false;
  $("theme").addEventListener("click", () => update({ theme: { auto: "light", light: "dark", dark: "auto" }[state.theme] }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => update({}));
  all("[data-run]").forEach((chip) => chip.addEventListener("click", () => {
    const run = +chip.dataset.run;
    update({ hidden: state.hidden.includes(run) ? state.hidden.filter((each) => each !== run) : [...state.hidden, run] });
  }));
  const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
  for (const chart of charts) chart.place.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { Plotly.Fx.unhover(chart.place); update({ zoom: null }); }
    if (event.key in STEPS && chart.place.on) { event.preventDefault(); read(chart, STEPS[event.key]); }
  });
  update({});
  const seen = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
    const chart = charts.find((each) => each.place === target);
    chart.shown = isIntersecting;
    if (isIntersecting && chart.stale) draw(chart); // twenty runs open as fast as one
  }), { rootMargin: "300px" });
  charts.forEach(({ place }) => seen.observe(place));
  addEventListener("beforeprint", () => charts.filter((chart) => chart.stale).forEach(draw));
  (state.open || []).forEach((k) => { if (all("details")[k]) all("details")[k].open = true; });
  if (state.scroll) scrollTo(0, state.scroll);
  addEventListener("pagehide", () => {
    const open = all("details").flatMap((fold, k) => (fold.open ? [k] : []));
    sessionStorage.setItem(key, JSON.stringify({ ...state, open, scroll: scrollY }));
  });
  const live = +document.body.dataset.live;
  if (live) setInterval(() => document.hidden || location.reload(), 1000 * live);
})();
