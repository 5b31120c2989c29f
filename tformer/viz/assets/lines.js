// Line plots: tformer.lines(svg, options) → {redraw(changes), cursor(series, index), svg(), rows(), element}.
// options: series = [{label, x, y, spread, colour, dash, width, opacity, points, faint}], where faint ones are drawn behind the
//   others and have no legend and spread is half the height of error bars, xLabel, yLabel, logX, logY, xMin, xMax, yMin, yMax,
//   xNames (of the x values 0, 1, ..., in their place), height, square, label (for screen readers), legend: false, ramp = {colours, low, high, label}: a colour bar for many lines,
//   describe(series, index), onCursor(series, index).
"use strict";
tformer.lines = (svgElement, settings) => {
  const { element, number } = tformer;
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  let options = { xLabel: "", yLabel: "", height: 340, label: "line plot", ...settings };
  let frame = null, at = null;
  const hidden = new Set();

  const wrap = element("div", { class: "plot" });
  const legend = element("div", { class: "legend", role: "group", "aria-label": "Lines shown" });
  const bar = element("div", { class: "bar" });
  const readout = element("p", { class: "readout", "aria-live": "polite" });
  svgElement.replaceWith(wrap);
  svgElement.classList.add("lines");
  svgElement.setAttribute("tabindex", "0");
  svgElement.setAttribute("role", "application");
  svgElement.setAttribute("aria-roledescription", "line plot");
  wrap.append(svgElement, legend, bar, readout);

  const shown = () => options.series.map((series, index) => ({ series, index })).filter(({ series }) => !hidden.has(series.label));
  const pointed = () => shown().filter(({ series }) => !series.faint);
  const colourOf = (series, index) => series.colour || tformer.palette[index % tformer.palette.length];
  const dashOf = (series, index) => series.dash ?? DASHES[Math.floor(index / tformer.palette.length) % DASHES.length];
  const nameOf = (x) => (options.xNames ? options.xNames[x] : number(x));
  const usable = (x, y) => Number.isFinite(x) && Number.isFinite(y) && (!options.logX || x > 0) && (!options.logY || y > 0);

  function extent(axis, log, low, high) {
    let [from, to] = [Infinity, -Infinity];
    for (const { series } of shown()) {
      for (let n = 0; n < series.x.length; n++) {
        if (!usable(series.x[n], series.y[n])) continue;
        const around = axis === "y" && series.spread ? series.spread[n] : 0;
        from = Math.min(from, series[axis][n] - around);
        to = Math.max(to, series[axis][n] + around);
      }
    }
    if (from === Infinity) [from, to] = log ? [1, 10] : [0, 1];
    if (axis === "y" && !log && low === undefined && high === undefined && to > from) {
      const pad = 0.04 * (to - from);
      [from, to] = [from - pad, to + pad];
    }
    [from, to] = [low ?? from, high ?? to];
    if (from === to) [from, to] = log ? [from / 2, to * 2] : [from - 0.5, to + 0.5];
    return [from, to];
  }
  function ticks([from, to], log, room) {
    const most = Math.max(2, Math.floor(room));
    if (log) {
      const decades = Math.log10(to / from);
      const factors = decades > most / 2 ? [1] : decades > 1 ? [1, 3] : [1, 2, 3, 5, 7];
      const every = Math.max(1, Math.ceil(decades / most));
      const found = [];
      for (let power = Math.floor(Math.log10(from)); power <= Math.ceil(Math.log10(to)); power++) {
        if (power % every === 0) for (const factor of factors) found.push(factor * 10 ** power);
      }
      return found.filter((value) => value >= from * 0.999 && value <= to * 1.001);
    }
    const raw = (to - from) / most;
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = unit * [1, 2, 2.5, 5, 10].find((factor) => factor * unit >= raw * 0.999);
    const found = [];
    for (let n = Math.ceil(from / step - 1e-9); n * step <= to + 1e-9 * step; n++) found.push(Number((n * step).toPrecision(12)));
    return found;
  }

  // Draws into a group; returns the maps from values to pixels.
  function paint(target, width, height, ink) {
    const x = extent("x", options.logX, options.xMin, options.xMax);
    const y = extent("y", options.logY, options.yMin, options.yMax);
    const yTicks = ticks(y, options.logY, height / 48);
    const left = 14 + 7.2 * Math.max(...yTicks.map((value) => number(value).length), 1);
    const [top, right, bottom] = [options.yLabel ? 24 : 8, 14, options.xLabel ? 42 : 26];
    const [w, h] = [Math.max(width - left - right, 20), height - top - bottom];
    const scale = ([from, to], log) => (log ? (v) => Math.log(v / from) / Math.log(to / from) : (v) => (v - from) / (to - from));
    const [sx, sy] = [scale(x, options.logX), scale(y, options.logY)];
    const px = (v) => left + w * sx(v);
    const py = (v) => top + h * (1 - sy(v));
    const line = (x1, y1, x2, y2) => element("line", { x1, y1, x2, y2, stroke: ink.grid });
    const words = (at, down, anchor, text) =>
      element("text", { x: at.toFixed(1), y: down.toFixed(1), "text-anchor": anchor, fill: ink.soft, "font-size": 12 }, text);
    const parts = [];
    for (const value of yTicks) parts.push(line(left, py(value), left + w, py(value)), words(left - 6, py(value) + 4, "end", number(value)));
    let last = -Infinity;
    for (const value of ticks(x, options.logX, w / 70).filter((value) => !options.xNames || Number.isInteger(value))) {
      parts.push(line(px(value), top, px(value), top + h));
      if (px(value) - last > 8 * nameOf(value).length) { // no label over another
        parts.push(words(px(value), top + h + 16, "middle", nameOf(value)));
        last = px(value);
      }
    }
    parts.push(words(left + w / 2, height - 6, "middle", options.xLabel), words(4, 14, "start", options.yLabel));
    const clip = "clip" + Math.round(performance.now() * 1000);
    const box = document.createElementNS("http://www.w3.org/2000/svg", "clipPath");
    box.id = clip;
    box.append(element("rect", { x: left, y: top - 2, width: w, height: h + 4 }));
    const group = element("g", { "clip-path": `url(#${clip})` });
    for (const { series, index } of [...shown().filter(({ series }) => series.faint), ...pointed()]) {
      let path = "", pen = false;
      for (let n = 0; n < series.x.length; n++) {
        if (!usable(series.x[n], series.y[n])) { pen = false; continue; }
        path += `${pen ? "L" : "M"}${px(series.x[n]).toFixed(1)} ${py(series.y[n]).toFixed(1)}`;
        pen = true;
      }
      const stroke = colourOf(series, index);
      group.append(element("path", {
        d: path, fill: "none", stroke, "stroke-width": series.width || 1.8, "stroke-opacity": series.opacity ?? 1,
        "stroke-dasharray": dashOf(series, index) || null, "stroke-linejoin": "round", "data-series": index,
      }));
      const bar = (n, by) => py(series.y[n] + by * series.spread[n]).toFixed(1);
      if (series.spread) {
        const bars = Array.from(series.x, (x, n) => (usable(x, series.y[n]) ? `M${px(x).toFixed(1)} ${bar(n, -1)}V${bar(n, 1)}` : ""));
        group.append(element("path", { d: bars.join(""), fill: "none", stroke, class: "spread" }));
      }
      if (series.points) {
        for (let n = 0; n < series.x.length; n++) {
          if (usable(series.x[n], series.y[n])) group.append(element("circle", { cx: px(series.x[n]), cy: py(series.y[n]), r: 3.2, fill: stroke }));
        }
      }
    }
    parts.push(box, group, element("path", { d: `M${left} ${top}V${top + h}H${left + w}`, fill: "none", stroke: ink.line }));
    target.replaceChildren(...parts);
    return { px, py, top, left, w, h };
  }

  function swatch(series, index) {
    const line = element("line", {
      x1: 0, x2: 28, y1: 5, y2: 5, stroke: colourOf(series, index), "stroke-width": 2.4, "stroke-dasharray": dashOf(series, index) || null,
    });
    return element("svg", { viewBox: "0 0 28 10", "aria-hidden": "true" }, line);
  }
  const hasLegend = () => options.legend !== false && !options.ramp && options.series.some((series) => series.label);
  function drawLegend() {
    legend.hidden = !hasLegend();
    const focused = [...legend.children].indexOf(document.activeElement);
    const named = options.series.map((series, index) => ({ series, index })).filter(({ series }) => !series.faint);
    legend.replaceChildren(...(hasLegend() ? named : []).map(({ series, index }) => element("button", {
      type: "button", "aria-pressed": String(!hidden.has(series.label)), title: "Show or hide this line", dir: "auto",
      onclick: () => { if (!hidden.delete(series.label)) hidden.add(series.label); redraw(); },
    }, swatch(series, index), series.label)));
    if (focused >= 0 && legend.children[focused]) legend.children[focused].focus();
    bar.hidden = !options.ramp;
    if (!options.ramp) return;
    const strip = element("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    const context = strip.getContext("2d");
    for (let n = 0; n < 256; n++) { context.fillStyle = tformer.colourAt(options.ramp.colours, n / 255); context.fillRect(n, 0, 1, 1); }
    bar.replaceChildren(`${options.ramp.label || ""} ${number(options.ramp.low)}`, strip, number(options.ramp.high));
  }

  function describe(series, index) {
    if (options.describe) return options.describe(series, index);
    const { label, x, y } = options.series[series];
    const around = options.series[series].spread ? ` ± ${number(options.series[series].spread[index])}` : "";
    return `${label ? label + ": " : ""}${options.xLabel || "x"} ${nameOf(x[index])}, ${options.yLabel || "y"} ${number(y[index])}${around}`;
  }
  function cursor(series, index, quiet = false) {
    const line = options.series[series];
    if (!line || !line.x.length || !frame) return;
    at = [series, Math.min(Math.max(index, 0), line.x.length - 1)];
    const [x, y] = [line.x[at[1]], line.y[at[1]]];
    let mark = svgElement.querySelector(".cursor");
    if (!mark) { mark = element("g", { class: "cursor" }); svgElement.append(mark); }
    mark.replaceChildren(...(usable(x, y) ? [
      element("line", { x1: frame.px(x), x2: frame.px(x), y1: frame.top, y2: frame.top + frame.h, "stroke-dasharray": "3 3" }),
      element("circle", { cx: frame.px(x), cy: frame.py(y), r: 5, "stroke-width": 2 }),
    ] : []));
    readout.textContent = describe(...at);
    if (!quiet && options.onCursor) options.onCursor(...at);
  }
  function follow(event) {
    const box = svgElement.getBoundingClientRect();
    const [mx, my] = [event.clientX - box.left, event.clientY - box.top];
    let best = null, least = Infinity;
    for (const { series, index } of pointed()) {
      for (let n = 0; n < series.x.length; n++) {
        if (!usable(series.x[n], series.y[n])) continue;
        const far = 4 * Math.abs(frame.px(series.x[n]) - mx) + Math.abs(frame.py(series.y[n]) - my);
        if (far < least) [best, least] = [[index, n], far];
      }
    }
    if (best) cursor(...best);
  }
  svgElement.addEventListener("pointermove", follow);
  svgElement.addEventListener("pointerdown", follow);
  svgElement.addEventListener("focus", () => { if (at === null && pointed().length) cursor(pointed()[0].index, 0); });
  svgElement.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !pointed().length) return;
    const indices = pointed().map(({ index }) => index);
    const [series, point] = at || [indices[0], 0];
    const place = Math.max(indices.indexOf(series), 0);
    const next = (by) => indices[(place + by + indices.length) % indices.length];
    const last = options.series[series].x.length - 1;
    const far = Math.max(1, Math.round(last / 10));
    const moves = {
      ArrowLeft: [series, point - 1], ArrowRight: [series, point + 1], ArrowUp: [next(-1), point], ArrowDown: [next(1), point],
      Home: [series, 0], End: [series, last], PageUp: [series, point - far], PageDown: [series, point + far],
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    cursor(...moves[event.key]);
  });

  const ink = () => ({ grid: tformer.cssColour("grid"), soft: tformer.cssColour("soft"), line: tformer.cssColour("line") });
  function redraw(changes = {}) {
    options = { ...options, ...changes };
    wrap.style.maxWidth = options.square ? "34rem" : "";
    const width = Math.max(Math.round(wrap.getBoundingClientRect().width) || 720, 200);
    const height = options.square ? width : Math.round(Math.min(options.height, Math.max(220, width * 0.8)));
    svgElement.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svgElement.setAttribute("aria-label", `${options.label}. ${options.series.length} lines; left and right move along a line, up and down between lines.`);
    frame = paint(svgElement, width, height, ink());
    drawLegend();
    if (at !== null && options.series[at[0]] && at[1] < options.series[at[0]].x.length && !hidden.has(options.series[at[0]].label)) cursor(...at, true);
    else { at = null; readout.textContent = "Point at a line, or use the arrow keys."; }
  }
  redraw();
  new ResizeObserver(([entry]) => { if (Math.abs(entry.contentRect.width - svgElement.viewBox.baseVal.width) > 1) redraw(); }).observe(wrap);
  tformer.state.onChange((keys) => { if (keys.has("theme") && svgElement.isConnected) redraw(); });

  // A document of its own on white ground, with its legend.
  function svg() {
    const [width, height] = options.square ? [560, 560] : [720, 400];
    const lines = hasLegend() ? pointed() : [];
    const root = element("svg", { xmlns: "http://www.w3.org/2000/svg", "font-family": "system-ui, sans-serif", "font-size": 12 });
    const body = element("g");
    paint(body, width, height, { grid: "#e3e6e9", soft: "#333333", line: "#777777" });
    root.append(element("rect", { width: "100%", height: "100%", fill: "#ffffff" }), body);
    lines.forEach(({ series, index }, n) => {
      const [x, y] = [20 + 230 * (n % 3), height + 14 + 18 * Math.floor(n / 3)];
      root.append(
        element("line", { x1: x, x2: x + 26, y1: y, y2: y, stroke: colourOf(series, index), "stroke-width": 2.4, "stroke-dasharray": dashOf(series, index) || null }),
        element("text", { x: x + 32, y: y + 4, fill: "#333333" }, series.label));
    });
    const full = height + 18 * Math.ceil(lines.length / 3) + 10;
    for (const [key, value] of Object.entries({ width, height: full, viewBox: `0 0 ${width} ${full}` })) root.setAttribute(key, value);
    return new XMLSerializer().serializeToString(root);
  }
  const hasSpread = () => options.series.some((series) => series.spread);
  const rows = () => [["line", options.xLabel || "x", options.yLabel || "y", ...(hasSpread() ? ["spread"] : [])],
    ...options.series.flatMap(({ label, x, y, spread }) => Array.from(x, (at, n) => [label || "", at, y[n], ...(spread ? [spread[n]] : [])]))
      .filter((row) => Number.isFinite(row[1]) && Number.isFinite(row[2]))
      .map(([label, x, ...rest]) => [label, options.xNames ? nameOf(x) : x, ...rest])];
  return { redraw, cursor, svg, rows, element: wrap };
};
