// The page around the charts: which x axis, which runs, how smooth, light or dark, and coming back
// to the same place when a live page is loaded again.

const MEMORY = `mesotron report ${document.title}`;

class Page {
  constructor(data) {
    const kept = this.recall();
    this.runs = data.runs;
    this.cursor = null;
    this.active = null;
    this.zoom = kept.zoom || null;
    this.smooth = kept.smooth ?? data.smooth;
    this.hidden = new Set(kept.hidden || []);
    this.axes = this.commonAxes();
    this.axis = this.axes.includes(kept.axis) ? kept.axis : "steps";
    this.charts = [...document.querySelectorAll(".plot")].map(
      (place) => new Chart(place, data.charts[+place.dataset.chart], this));
    this.setUpBar();
    this.setUpTheme(kept.theme || "auto");
    this.watchCharts();
    for (const place of kept.open || []) {
      const fold = document.querySelectorAll("details")[place];
      if (fold) fold.open = true;
    }
    if (kept.scroll) window.scrollTo(0, kept.scroll);
    this.setUpLive();
  }

  // Axes that every run has, so that a line never stands on another's unit.
  commonAxes() {
    if (!this.runs.length) return ["steps"];
    return Object.keys(this.runs[0].x.main).filter((name) =>
      this.runs.every((run) => name in run.x.main && run.x.main[name].at(-1) > 0));
  }

  setUpBar() {
    const bar = document.getElementById("bar");
    if (!bar) return;
    bar.hidden = false;
    const axis = document.getElementById("axis");
    for (const name of this.axes) axis.add(new Option(name, name, false, name === this.axis));
    axis.addEventListener("change", () => { this.axis = axis.value; this.zoom = null; this.redraw(); });
    const smooth = document.getElementById("smooth");
    smooth.value = this.smooth;
    smooth.addEventListener("input", () => { this.smooth = +smooth.value; this.redraw(); });
    this.reset = document.getElementById("reset");
    this.reset.hidden = this.zoom === null;
    this.reset.addEventListener("click", () => this.setZoom(null));
    for (const chip of document.querySelectorAll("[data-run]")) {
      const run = +chip.dataset.run;
      chip.setAttribute("aria-pressed", String(!this.hidden.has(run)));
      chip.addEventListener("click", () => {
        if (!this.hidden.delete(run)) this.hidden.add(run);
        chip.setAttribute("aria-pressed", String(!this.hidden.has(run)));
        this.redraw();
      });
    }
  }

  setUpTheme(theme) {
    const order = ["auto", "light", "dark"], button = document.getElementById("theme");
    const set = (name) => {
      this.theme = name;
      document.documentElement.dataset.theme = name;
      button.textContent = `Theme: ${name}`;
    };
    set(theme);
    button.hidden = false;
    button.addEventListener("click", () => set(order[(order.indexOf(this.theme) + 1) % 3]));
  }

  // A chart is drawn when it comes into view: twenty runs open as fast as one.
  watchCharts() {
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = this.charts.find((each) => each.place === entry.target);
        chart.inView = entry.isIntersecting;
        if (chart.inView && (!chart.drawn || chart.stale)) { chart.stale = false; chart.draw(); }
      }
    }, { rootMargin: "300px" });
    for (const chart of this.charts) seen.observe(chart.place);
    let width = document.documentElement.clientWidth;
    window.addEventListener("resize", () => {
      if (document.documentElement.clientWidth === width) return;
      width = document.documentElement.clientWidth;
      this.redraw();
    });
    window.addEventListener("beforeprint", () => this.charts.forEach((chart) => chart.draw()));
  }

  redraw() {
    if (this.reset) this.reset.hidden = this.zoom === null;
    for (const chart of this.charts) {
      if (chart.inView) chart.draw(); else chart.stale = chart.drawn;
    }
  }

  setZoom(range) {
    this.zoom = range;
    this.redraw();
  }

  setCursor(x) {
    this.cursor = x;
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      for (const chart of this.charts) if (chart.shared && chart.inView) chart.point();
    });
  }

  // Tells a screen reader what the keyboard's cursor stands on, after the frame that moved it.
  announce() {
    requestAnimationFrame(() => requestAnimationFrame(() => {
      const { spec, readout, read } = this.active;
      const words = read && read.read.length > MOST_READ
        ? read.read.map(({ line, y }) => `${line.name} ${show(y)}`).join(", ") : "";
      document.getElementById("said").textContent = `${spec.title}, ${readout.textContent} ${words}`;
    }));
  }

  setUpLive() {
    const seconds = +document.body.dataset.live;
    window.addEventListener("pagehide", () => this.remember());
    if (!seconds) return;
    const again = () => {
      if (document.hidden) { setTimeout(again, 1000 * seconds); return; }
      this.remember();
      location.reload();
    };
    setTimeout(again, 1000 * seconds);
  }

  remember() {
    const open = [...document.querySelectorAll("details")].flatMap((fold, k) => (fold.open ? [k] : []));
    const { axis, zoom, smooth, theme } = this;
    const kept = { axis, zoom, smooth, theme, open, hidden: [...this.hidden], scroll: window.scrollY };
    try { sessionStorage.setItem(MEMORY, JSON.stringify(kept)); } catch (error) {
      console.info(`nothing is remembered here: ${error.message}`); // a browser may keep no storage
    }
  }

  recall() {
    try { return JSON.parse(sessionStorage.getItem(MEMORY)) || {}; } catch (error) {
      console.info(`nothing was remembered here: ${error.message}`);
      return {};
    }
  }
}

new Page(JSON.parse(document.getElementById("data").textContent));
