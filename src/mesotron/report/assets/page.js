// The page: one state for all charts, and what changes it.

const $ = (id) => document.getElementById(id);
const all = (what) => [...document.querySelectorAll(what)];
const data = JSON.parse($("data").textContent);
const key = `mesotron report ${document.title}`;
const THEMES = { auto: "light", light: "dark", dark: "auto" };
const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
const ORDER = ["note", "clear", "warn", "best", "stop", "rollback"]; // the last says most
const MOST_MARKED = 4; // runs whose events have lines; of more, only their signs

const state = {
  axis: "steps",
  smooth: data.smooth,
  hidden: [],
  theme: "auto",
  zoom: null,
  ...recall(),
};

function recall() {
  try {
    return JSON.parse(sessionStorage.getItem(key)) || {};
  } catch {
    return {};
  }
}

// What to draw

// A running mean from both sides, so that nothing comes late.
function smoothed(values) {
  const pass = (list) => {
    let sum = 0;
    let weight = 0;
    return list.map((y) => {
      if (y === null) return null;
      sum = sum * state.smooth + y;
      weight = weight * state.smooth + 1;
      return sum / weight;
    });
  };

  const back = pass([...values].reverse()).reverse();
  return pass(values).map((y, k) => (y === null ? null : (y + back[k]) / 2));
}

function axisOf(line, spec) {
  const grid = spec.xName === null ? data.runs[line.run].x[line.grid] : {};
  return line.x || grid[state.axis] || grid.steps;
}

function linesOf(spec) {
  const shown = spec.lines.filter((line) => !(data.shared && state.hidden.includes(line.group)));

  return shown.map((line) => {
    const known = line.y.filter((y) => y !== null).length;
    const sparse = known < 2 || known * 2 < line.y.length;
    const drawn = { ...line, x: axisOf(line, spec), sparse };

    if (state.smooth > 0 && spec.xName === null && !sparse) {
      drawn.y = smoothed(line.y);
      if (shown.length <= 6) drawn.raw = line.y;
    }

    return drawn;
  });
}

// The events of the runs that a chart shows, as marks on its x axis.
function marksOf(spec, lines) {
  if (spec.xName !== null) return [];

  const isOnly = data.runs.length === 1;
  const colors = new Map(lines.map((line) => [line.run, line.color]));
  const marks = [];
  for (const [run, color] of colors) {
    for (const mark of data.runs[run].marks) {
      const axes = data.runs[run].x.main;
      const near = axes.steps.findIndex((step) => step >= mark.step);
      const who = isOnly ? "" : `${data.runs[run].name}, `;

      marks.push({
        x: state.axis === "steps" ? mark.step : (axes[state.axis] || axes.steps).at(near),
        severity: mark.severity,
        css: isOnly ? mark.severity : `of-run c${color}`,
        line: data.runs.length <= MOST_MARKED,
        text: `${who}step ${mark.step}, ${mark.text}`,
      });
    }
  }

  return merge(marks);
}

// One sign for what happened at one place: a rollback says more than the alarm that led to it.
function merge(marks) {
  const places = new Map();
  for (const mark of marks) {
    const place = `${mark.x} ${mark.css.startsWith("of-run") ? mark.css : ""}`;
    const first = places.get(place);
    const isFirst = !first || ORDER.indexOf(first.severity) <= ORDER.indexOf(mark.severity);
    const [main, other] = isFirst ? [mark, first] : [first, mark];
    places.set(place, other ? { ...main, text: `${first.text}; ${mark.text}` } : mark);
  }

  return [...places.values()];
}

const charts = all(".plot").map((place, number) => ({
  place,
  number,
  spec: data.charts[place.dataset.chart],
  isShared: data.charts[place.dataset.chart].xName === null, // its x axis is the page's
  width: 0,
}));

function draw(chart) {
  chart.width = chart.place.clientWidth;
  if (!chart.width) return; // in a closed fold; its opening draws it

  const { spec } = chart;
  chart.lines = linesOf(spec);
  chart.drawing = drawChart(spec, chart.lines, {
    number: chart.number,
    width: chart.width,
    zoom: chart.isShared ? state.zoom : null,
    xName: spec.xName ?? state.axis,
    marks: marksOf(spec, chart.lines),
  });

  const parts = [chart.drawing.svg];
  if (chart.lines.length > 1 && !(data.shared && chart.isShared)) parts.unshift(legend(chart.lines));

  chart.tip = html("div", "tip");
  chart.place.replaceChildren(...parts, chart.tip);
  chart.drawing.svg.addEventListener("pointermove", (event) => hover(chart, event));
  chart.drawing.svg.addEventListener("pointerleave", () => charts.forEach(leave));
  chart.drawing.svg.addEventListener("pointerdown", (event) => startZoom(chart, event));
  chart.drawing.svg.addEventListener("pointerup", (event) => endZoom(chart, event));
  chart.drawing.svg.addEventListener("dblclick", () => update({ zoom: null }));
}

function html(name, css, text = "") {
  const element = document.createElement(name);
  element.className = css;
  element.textContent = text;
  return element;
}

function swatch(line) {
  const svg = make("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" });
  svg.append(make("line", { x1: 0, x2: 26, y1: 5, y2: 5, class: `line c${line.color} d${line.dash}` }));
  return svg;
}

function legend(lines) {
  const list = html("div", "legend");
  for (const line of lines) {
    const entry = html("span", "");
    entry.append(swatch(line), line.name);
    list.append(entry);
  }

  return list;
}

function update(change) {
  Object.assign(state, change);
  document.documentElement.dataset.theme = state.theme;
  $("theme").textContent = `Theme: ${state.theme}`;

  if ($("reset")) $("reset").hidden = !state.zoom;
  for (const chip of all("[data-run]")) {
    chip.setAttribute("aria-pressed", !state.hidden.includes(+chip.dataset.run));
  }

  charts.forEach(draw);
}

// Reading values: pointer and keyboard

function pixel(chart, event) {
  const frame = chart.drawing.svg.getBoundingClientRect();
  return ((event.clientX - frame.left) * chart.width) / frame.width;
}

function nearest(values, x, y) {
  let best = -1;
  values.forEach((value, k) => {
    if (y && y[k] === null) return;
    if (best < 0 || Math.abs(value - x) < Math.abs(values[best] - x)) best = k;
  });

  return best;
}

function hover(chart, event) {
  const at = pixel(chart, event);
  if (chart.from !== undefined) drag(chart, at);

  const x = chart.drawing.scale.back(at);
  const others = chart.isShared ? charts.filter((each) => each.isShared) : [chart];
  for (const each of others) {
    if (each.drawing) show(each, x);
  }
}

function show(chart, x) {
  const { drawing, lines, tip } = chart;
  const known = lines.map((line) => [line, nearest(line.x, x, line.y)]).filter(([, k]) => k >= 0);
  if (!known.length) return;

  const [first, k] = known.reduce((a, b) => (Math.abs(b[0].x[b[1]] - x) < Math.abs(a[0].x[a[1]] - x) ? b : a));
  const place = drawing.scale.at(first.x[k]);
  if (place < drawing.box.left - 1 || place > drawing.box.right + 1) return leave(chart);

  drawing.cursor.setAttribute("x1", place);
  drawing.cursor.setAttribute("x2", place);
  drawing.cursor.classList.add("on");

  tip.replaceChildren(html("b", "", `${chart.spec.xName ?? state.axis} ${spell(first.x[k])}`));
  for (const [line, near] of known) {
    const row = html("div", "");
    row.append(swatch(line), `${spell(line.y[near])}${known.length > 1 ? ` ${line.name}` : ""}`);
    tip.append(row);
  }

  tip.classList.add("on");
  tip.classList.toggle("left", place > chart.width / 2);
  tip.style.setProperty("--at", `${((100 * place) / chart.width).toFixed(2)}%`);
}

function leave(chart) {
  if (!chart.drawing) return;

  chart.drawing.cursor.classList.remove("on");
  chart.drawing.chosen.classList.remove("on");
  chart.tip.classList.remove("on");
  delete chart.from;
}

function read(chart, step) {
  const [line] = chart.lines;
  const start = chart.point ?? (step > 0 ? -1 : line.x.length);
  chart.point = Math.min(Math.max(start + step, 0), line.x.length - 1);

  const x = line.x[chart.point];
  show(chart, x);
  const values = chart.spec.lines.map((each) => `${each.name} ${each.y[chart.point] ?? "–"}`).join(", ");
  $("said").textContent = `${chart.spec.title}, ${chart.spec.xName ?? state.axis} ${x}: ${values}`;
}

// Zooming by a drag with the mouse; a finger scrolls the page

function startZoom(chart, event) {
  if (event.pointerType === "mouse" && event.button === 0 && chart.isShared) {
    chart.from = pixel(chart, event);
    event.preventDefault();
  }
}

function drag(chart, at) {
  const { chosen, box } = chart.drawing;
  const [low, high] = [chart.from, at].sort((a, b) => a - b);
  chosen.setAttribute("x", Math.max(low, box.left));
  chosen.setAttribute("width", Math.max(Math.min(high, box.right) - Math.max(low, box.left), 0));
  chosen.classList.add("on");
}

function endZoom(chart, event) {
  if (chart.from === undefined) return;

  const { box, scale } = chart.drawing;
  const ends = [chart.from, pixel(chart, event)].sort((a, b) => a - b);
  leave(chart);
  if (ends[1] - ends[0] < 6) return;

  update({ zoom: ends.map((at) => scale.back(Math.min(Math.max(at, box.left), box.right))) });
}

// Controls

function addControls() {
  if ($("bar")) {
    $("bar").hidden = false;
    const names = Object.keys(data.runs[0].x.main);
    for (const name of names.filter((one) => data.runs.every((run) => run.x.main[one]?.at(-1) > 0))) {
      $("axis").add(new Option(name, name, false, name === state.axis));
    }

    $("smooth").value = state.smooth;
    $("axis").addEventListener("change", (event) => update({ axis: event.target.value, zoom: null }));
    $("smooth").addEventListener("input", (event) => update({ smooth: +event.target.value }));
    $("reset").addEventListener("click", () => update({ zoom: null }));
  }

  $("theme").hidden = false;
  $("theme").addEventListener("click", () => update({ theme: THEMES[state.theme] }));

  for (const chip of all("[data-run]")) {
    chip.addEventListener("click", () => {
      const run = +chip.dataset.run;
      const others = state.hidden.filter((each) => each !== run);
      update({ hidden: others.length < state.hidden.length ? others : [...state.hidden, run] });
    });
  }

  for (const chart of charts) {
    chart.place.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        charts.forEach(leave);
        update({ zoom: null });
      }
      if (event.key in STEPS && chart.lines?.length) {
        event.preventDefault();
        read(chart, STEPS[event.key]);
      }
    });
  }
}

// A page that loads itself anew stays where it was.
function keepPlace() {
  for (const k of state.open || []) {
    if (all("details")[k]) all("details")[k].open = true;
  }
  if (state.scroll) scrollTo(0, state.scroll);

  addEventListener("pagehide", () => {
    const open = all("details").flatMap((fold, k) => (fold.open ? [k] : []));
    sessionStorage.setItem(key, JSON.stringify({ ...state, open, scroll: scrollY }));
  });

  const live = +document.body.dataset.live;
  if (live) setInterval(() => document.hidden || location.reload(), 1000 * live);
}

addControls();
update({});
keepPlace();

// Another width of the window, or a fold that opens.
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = charts.find((each) => each.place === target);
    if (target.clientWidth !== chart.width) draw(chart);
  }
});
charts.forEach(({ place }) => sizes.observe(place));
