"use strict";
// One chart as an SVG element. A spec, its lines and the page's state come in, an element goes out;
// colors are classes of page.css, so a change of the theme needs no new drawing. Text is only ever
// set as text.

const NAMESPACE = "http://www.w3.org/2000/svg";
const MARGIN = { left: 50, right: 14, top: 20, bottom: 36 };
const HEIGHT = 225;
const SIGNS = { warn: "▲", stop: "■", clear: "○", rollback: "↺", best: "★" };

function make(name, attributes = {}, text = "") {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;

  return element;
}

// Numbers and axes

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

function spell(value) {
  if (value === null || value === undefined) return "–";

  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) {
    const [digits, power] = value.toExponential(3).split("e");
    return `${+digits}e${+power}`;
  }

  return compact.format(value);
}

// From the unit of an axis to pixels and back.
function makeScale([low, high], [from, to], isLog) {
  const warp = isLog ? Math.log10 : (x) => x;
  const start = warp(low);
  const span = warp(high) - start || 1;

  const at = (x) => from + ((to - from) * (warp(x) - start)) / span;
  const back = (pixel) => {
    const x = start + (span * (pixel - from)) / (to - from);
    return isLog ? 10 ** x : x;
  };

  return { at, back };
}

function ticks([low, high], isLog, most) {
  if (isLog) return logTicks(low, high, most);

  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((size) => size >= rough) ?? rough;

  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor((high - first * step) / step + 1e-9) + 1;

  const values = [];
  for (let k = 0; k < Math.min(count, 2 * most + 2); k++) { // fewer than that, or rounding ends them
    values.push(+((first + k) * step).toPrecision(12));
  }

  return values;
}

function logTicks(low, high, most) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / most));
  const factors = last - first <= 2 ? [1, 2, 5] : [1];

  const values = [];
  for (let power = first; power <= last; power += every) {
    for (const factor of factors) values.push(+(factor * 10 ** power).toPrecision(12));
  }

  return values.filter((x) => x >= low * 0.999 && x <= high * 1.001);
}

const isDrawable = (x, isLog) => x !== null && x !== undefined && (!isLog || x > 0);

// The least and the largest of some values, with room around them.
function extent(values, isLog, room) {
  let low = Infinity;
  let high = -Infinity;
  for (const x of values) {
    if (!isDrawable(x, isLog)) continue;
    low = Math.min(low, x);
    high = Math.max(high, x);
  }

  if (low > high) return isLog ? [0.1, 1] : [0, 1]; // no value at all

  if (isLog) {
    const more = low === high ? 2 : (high / low) ** room;
    return [low / more, high * more];
  }

  const more = low === high ? Math.abs(low) / 4 || 0.5 : room * (high - low);
  return [low - more, high + more];
}

// Lines

function points(line, y, scales, isLog) {
  return y.map((value, k) => {
    const isShown = isDrawable(value, isLog.y) && isDrawable(line.x[k], isLog.x);
    return isShown ? [scales.x.at(line.x[k]), scales.y.at(value)] : null;
  });
}

const spot = ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`;

// A path through the points; it breaks at a gap unless the line has points only now and then.
function trace(spots, crossesGaps) {
  let path = "";
  let isOpen = false;
  for (const one of spots) {
    if (one) path += `${isOpen ? "L" : "M"}${spot(one)}`;
    if (one || !crossesGaps) isOpen = Boolean(one);
  }

  return path;
}

function band(low, high) {
  let path = "";
  let start = 0;
  for (let k = 0; k <= low.length; k++) {
    if (low[k] && high[k]) continue;
    if (k - start > 1) {
      const back = low.slice(start, k).reverse();
      path += `M${[...high.slice(start, k), ...back].map(spot).join("L")}Z`;
    }
    start = k + 1;
  }

  return path;
}

function drawLine(line, scales, isLog) {
  const group = make("g", { class: `c${line.color}` });
  const spots = points(line, line.y, scales, isLog);

  if (line.low) {
    const low = points(line, line.low, scales, isLog);
    const high = points(line, line.high, scales, isLog);
    group.append(make("path", { class: "band", d: band(low, high) }));
  }

  if (line.raw) {
    const raw = points(line, line.raw, scales, isLog);
    group.append(make("path", { class: "line raw", d: trace(raw, line.sparse) }));
  }

  if (line.dots !== "crosses") {
    group.append(make("path", { class: `line d${line.dash}`, d: trace(spots, line.sparse) }));
  }

  for (const one of line.dots || line.sparse ? spots : []) {
    if (one) group.append(marker(one, line.dots === "crosses"));
  }

  return group;
}

function marker([x, y], isCross) {
  if (!isCross) return make("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 3 });

  const d = `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`;
  return make("path", { class: "cross", d });
}

// Everything around the lines

function drawAxes(svg, scales, ranges, isLog, box, xName) {
  const grid = make("g", { class: "grid" });
  for (const value of ticks(ranges.y, isLog.y, 4)) {
    const y = scales.y.at(value).toFixed(1);
    grid.append(make("line", { x1: box.left, x2: box.right, y1: y, y2: y }));
    grid.append(make("text", { x: box.left - 7, y, "text-anchor": "end", dy: "0.32em" }, spell(value)));
  }

  const count = Math.max(2, Math.floor((box.right - box.left) / 75));
  for (const value of ticks(ranges.x, isLog.x, count)) {
    const x = scales.x.at(value).toFixed(1);
    grid.append(make("text", { x, y: box.bottom + 15, "text-anchor": "middle" }, spell(value)));
  }

  const middle = (box.left + box.right) / 2;
  grid.append(make("text", { x: middle, y: box.bottom + 30, "text-anchor": "middle" }, xName));
  svg.append(grid);
}

function drawRules(svg, rules, scale, box) {
  for (const [height, label] of rules) {
    const y = scale.at(height).toFixed(1);
    const group = make("g", { class: "rule" });
    group.append(make("line", { x1: box.left, x2: box.right, y1: y, y2: y }));
    group.append(make("text", { x: box.left + 3, y: y - 4 }, label));
    svg.append(group);
  }
}

function drawMarks(svg, marks, scale, box) {
  for (const mark of marks) {
    const x = scale.at(mark.x);
    if (!(x >= box.left - 0.5 && x <= box.right + 0.5)) continue;

    const group = make("g", { class: `mark ${mark.css}` });
    if (mark.line) group.append(make("line", { x1: x, x2: x, y1: box.top, y2: box.bottom }));

    const sign = make("text", { x, y: box.top - 5, "text-anchor": "middle" }, SIGNS[mark.severity] || "●");
    sign.append(make("title", {}, mark.text));
    group.append(sign);
    svg.append(group);
  }
}

// A drawing: its SVG, and the scale by which a pointer is read.
function drawChart(spec, lines, view) {
  const box = {
    left: MARGIN.left,
    right: Math.max(view.width - MARGIN.right, MARGIN.left + 40),
    top: MARGIN.top,
    bottom: HEIGHT - MARGIN.bottom,
  };
  const isLog = { x: spec.logX, y: spec.log };
  const x = view.zoom || extent(lines.flatMap((line) => line.x), isLog.x, spec.logX ? 0.04 : 0);
  const heights = lines.flatMap((line) => visible(line, x)).concat(spec.rules.map(([height]) => height));
  const ranges = { x, y: extent(heights, isLog.y, 0.06) };
  const scales = {
    x: makeScale(ranges.x, [box.left, box.right], isLog.x),
    y: makeScale(ranges.y, [box.bottom, box.top], isLog.y),
  };

  const svg = make("svg", { viewBox: `0 0 ${view.width} ${HEIGHT}`, "aria-hidden": "true" });
  const clip = make("clipPath", { id: `clip${view.number}` });
  clip.append(make("rect", { x: box.left, y: box.top - 4, width: box.right - box.left, height: box.bottom - box.top + 8 }));
  svg.append(clip);

  drawAxes(svg, scales, ranges, isLog, box, view.xName);
  drawRules(svg, spec.rules, scales.y, box);
  drawMarks(svg, view.marks, scales.x, box);

  const curves = make("g", { "clip-path": `url(#clip${view.number})` });
  for (const line of lines) curves.append(drawLine(line, scales, isLog));
  svg.append(curves);

  const cursor = make("line", { class: "cursor", y1: box.top, y2: box.bottom });
  const chosen = make("rect", { class: "chosen", y: box.top, height: box.bottom - box.top });
  svg.append(cursor, chosen);

  return { svg, scale: scales.x, box, cursor, chosen };
}

// What a line shows between two ends of the x axis, its band included.
function visible(line, [low, high]) {
  const values = [];
  line.x.forEach((x, k) => {
    if (x < low || x > high) return;
    values.push(line.y[k]);
    if (line.raw) values.push(line.raw[k]);
    if (line.low) values.push(line.low[k], line.high[k]);
  });

  return values;
}
