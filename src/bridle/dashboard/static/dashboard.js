// What pages do beyond HTML: draw a training's curves, keep what is open while htmx refreshes, move
// by keys. Everything here is a comfort; each page tells the same without it.
"use strict";

(() => {
  const charts = new Map(); // id of a .charts element -> {element, text, plots}
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function short(value) {
    if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
    return Number(value.toPrecision(4)).toString();
  }

  function columns(chart) {
    return [chart.steps, ...chart.curves.map((curve) => curve.values)];
  }

  function draw(element, chart) {
    const inks = ["--ink-1", "--ink-2", "--ink-3"].map(css);
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 44 };
    const plot = new uPlot(
      {
        title: chart.title,
        width: element.clientWidth - 10,
        height: 170,
        scales: { x: { time: false }, y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.05 : 1] } },
        axes: [{ ...axis, size: 24 }, { ...axis, values: (_, splits) => splits.map(short) }],
        series: [
          { label: "step" },
          ...chart.curves.map((curve, n) => ({
            label: curve.label,
            stroke: inks[n % inks.length],
            width: 1.5,
            spanGaps: true,
            points: { show: curve.name === "held_out", size: 6, fill: inks[n % inks.length] },
            value: (_, value) => (value == null ? "–" : short(value)),
          })),
        ],
      },
      columns(chart),
      element,
    );
    return plot;
  }

  function show(element) {
    const text = element.dataset.charts;
    const known = charts.get(element.id);
    if (known && known.element === element && known.text === text) return;
    const wanted = JSON.parse(text);
    if (known && known.plots.length === wanted.length) {
      // The canvas stays, with the zoom that somebody chose; only its numbers change.
      if (known.element !== element) element.replaceWith(known.element);
      known.element.dataset.charts = text;
      if (known.text !== text) known.plots.forEach((plot, n) => plot.setData(columns(wanted[n])));
      known.text = text;
      return;
    }
    const places = wanted.map(() => {
      const place = element.appendChild(document.createElement("div"));
      place.className = "chart";
      return place;
    });
    // All places first: each is as wide as their number lets it be.
    const plots = wanted.map((chart, n) => draw(places[n], chart));
    charts.set(element.id, { element, text, plots });
  }

  function redraw() {
    for (const one of charts.values()) {
      for (const plot of one.plots) plot.destroy();
      one.element.replaceChildren();
    }
    charts.clear();
    document.querySelectorAll(".charts").forEach(show);
  }

  function mark() {
    document.querySelectorAll("a.turn").forEach((link) => {
      if (link.pathname === location.pathname) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
  }

  let open = new Set();
  let focused = null;
  document.addEventListener("htmx:beforeRequest", (event) => {
    // Nobody looks at a page that is hidden.
    if (document.hidden && !event.detail.requestConfig?.triggeringEvent) event.preventDefault();
  });
  document.addEventListener("htmx:beforeSwap", () => {
    open = new Set([...document.querySelectorAll("details[open][id]")].map((one) => one.id));
    focused = document.activeElement && document.activeElement.getAttribute("href");
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    if (focused && document.activeElement === document.body) {
      const again = [...document.querySelectorAll("main a[href]")].find((link) => link.getAttribute("href") === focused);
      again?.focus({ preventScroll: true });
    }
    document.querySelectorAll(".charts").forEach(show);
    mark();
    if (event.detail.target?.id === "exchange") document.getElementById("exchange")?.scrollIntoView({ block: "nearest" });
  });
  document.addEventListener("htmx:pushedIntoHistory", mark);
  const stale = (on) => () => {
    document.querySelector(".stale").hidden = !on;
  };
  for (const name of ["htmx:sendError", "htmx:responseError", "htmx:timeout"]) document.addEventListener(name, stale(true));
  document.addEventListener("htmx:afterOnLoad", stale(false));

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea")) return;
    if (event.key === "/") {
      event.preventDefault();
      document.querySelector(".find input").focus();
      return;
    }
    if (event.key !== "j" && event.key !== "k") return;
    const rows = [...document.querySelectorAll("a[data-row]")];
    if (!rows.length) return;
    const at = rows.findIndex((row) => row === document.activeElement);
    const current = at >= 0 ? at : rows.findIndex((row) => row.getAttribute("aria-current") === "true");
    const next = current < 0 ? 0 : current + (event.key === "j" ? 1 : -1);
    rows[Math.max(0, Math.min(rows.length - 1, next))].focus();
  });

  let wide = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== wide) redraw();
    wide = window.innerWidth;
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.querySelectorAll(".charts").forEach(show);
})();
