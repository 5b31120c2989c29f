// Curves of runs: which metric, along which axis, how smooth, of which runs.
"use strict";
(() => {
  const { data, element, state, control, number } = tformer;
  const byId = (id) => document.getElementById(id);
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  const SPLITS = ["train", "valid"];
  const MARKED_POINTS = 60, IN_READOUT = 6;
  const metricOf = new Map(data.metrics.map((metric) => [metric.name, metric]));
  const splits = [...new Set(data.metrics.flatMap((metric) => metric.splits))];

  // What may be chosen: the metrics asked for, where they are not simply one of the list; each metric; all of them.
  const [first] = data.chosen;
  if (!first) return; // no run has metrics yet
  const isWhole = ({ metric, splits: of }) => of.length === metricOf.get(metric).splits.length;
  const plain = data.chosen.length === 1 && isWhole(first);
  const everything = data.chosen.length === data.metrics.length && data.chosen.every(isWhole);
  const named = data.chosen.map((one) => (isWhole(one) ? "" : one.splits.join("+") + " ") + metricOf.get(one.metric).label).join(", ");
  const chosenLabel = named.length > 40 ? `the ${data.chosen.length} asked for` : named;
  const views = new Map();
  if (!plain && !everything) views.set("chosen", { label: chosenLabel, panels: data.chosen });
  for (const { name, label, splits: of } of data.metrics) views.set("m:" + name, { label, panels: [{ metric: name, splits: of }] });
  if (data.metrics.length > 1) {
    views.set("all", { label: "all metrics", panels: data.metrics.map(({ name, splits: of }) => ({ metric: name, splits: of })) });
  }

  const controls = {
    view: control("select", { id: "metric", label: "Metric", value: plain ? "m:" + first.metric : everything ? "all" : "chosen",
      options: [...views].map(([key, { label }]) => [key, label]) }),
    x: control("select", { id: "x", label: "Along", value: data.start.x,
      options: data.axes.filter(({ there }) => there).map(({ name, label }) => [name, label]) }),
    smooth: control("range", { id: "smooth", label: "Smoothing", value: data.start.smooth, min: 0, max: 0.99, step: 0.01 }),
    logX: control("checkbox", { id: "log-x", label: "log x", value: data.start.logX }),
    logY: control("checkbox", { id: "log-y", label: "log y", value: data.start.logY }),
  };
  const toggle = (id, label, host) => control("checkbox", { id, label, value: true, host });
  const rowOf = (label) => {
    const row = element("div", { class: "row", role: "group", "aria-label": label, style: "max-height: 11rem; overflow: auto; gap: 0 1rem" }, label + ":");
    byId("shown").append(row);
    return row;
  };
  const splitShown = new Map();
  if (splits.length > 1) {
    const row = rowOf("Splits");
    for (const split of splits) splitShown.set(split, toggle("split-" + split, split, row));
  }
  const runShown = [];
  if (data.runs.length > 1) {
    const row = rowOf("Runs");
    data.runs.forEach((run, index) => {
      const box = toggle("run-" + index, run.name, row);
      const colour = tformer.palette[index % tformer.palette.length];
      box.element.querySelector("label").prepend(element("span", { "aria-hidden": "true", style: "color: " + colour }, "━ "));
      box.element.title = run.path;
      runShown.push(box);
    });
    const every = (on) => state.set(Object.fromEntries(runShown.map((_, index) => ["run-" + index, on ? null : "false"])));
    if (data.runs.length > 3) row.append(tformer.button("All", () => every(true)), tformer.button("None", () => every(false)));
  }
  const isShown = (box) => !box || box.get();
  const shownRuns = () => data.runs.map((run, index) => ({ run, index })).filter(({ index }) => isShown(runShown[index]));

  // The debiased exponential average; missing values stay missing.
  function smoothed(values, weight) {
    let [mean, left] = [0, 1];
    return values.map((value) => {
      if (value === null) return NaN;
      [mean, left] = [weight * mean + (1 - weight) * value, left * weight];
      return mean / (1 - left);
    });
  }
  const numbers = (values, unit = 1) => values.map((value) => (value === null ? NaN : value / unit));

  function seriesOf(panel) {
    const [axis, weight] = [controls.x.get(), controls.smooth.get()];
    const shown = panel.splits.filter((split) => isShown(splitShown.get(split)));
    const faint = [], lines = [];
    for (const { run, index } of shownRuns()) {
      for (const split of shown) {
        const track = run.tracks[split];
        if (!track || !track.values[panel.metric]) continue;
        const alone = data.runs.length === 1;
        const place = SPLITS.includes(split) ? SPLITS.indexOf(split) : SPLITS.length + panel.splits.indexOf(split);
        const colour = tformer.palette[(alone ? place : index) % tformer.palette.length];
        const dash = alone ? "" : DASHES[(panel.splits.indexOf(split) + 2 * Math.floor(index / tformer.palette.length)) % DASHES.length];
        const label = alone ? split : panel.splits.length > 1 ? `${run.name} · ${split}` : run.name;
        const raw = track.values[panel.metric];
        const x = numbers(track[axis], axis === "time" ? data.second : 1);
        const smooth = weight > 0 && split === "train" && metricOf.get(panel.metric).noisy;
        const points = raw.filter((value) => value !== null).length <= MARKED_POINTS;
        if (smooth) faint.push({ label, x, y: numbers(raw), colour, dash: "", width: 1, opacity: 0.35, faint: true });
        lines.push({ label, x, y: smooth ? smoothed(raw, weight) : numbers(raw), colour, dash, points, run, split, track, raw, smooth });
      }
    }
    return [...lines, ...faint]; // the cursor's line keeps its number when smoothing begins
  }

  function nearest(x, target) {
    let [low, high] = [0, x.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= target) low = middle; else high = middle;
    }
    return Math.abs(x[high] - target) < Math.abs(x[low] - target) ? high : low;
  }
  const valueOf = (line, n) => number(line.y[n]) + (line.smooth ? ` (logged ${number(line.raw[n])})` : "");
  // The line under the cursor, and beside it the nearest values of the others.
  function describe(series, at, n) {
    const line = series[at];
    const place = line.x[n];
    const words = [`${axisWords()} ${number(place)}: ${line.label} ${valueOf(line, n)}`];
    const others = series.filter((other) => !other.faint && other !== line);
    for (const other of others.slice(0, IN_READOUT)) {
      const there = nearest(other.x, place);
      const apart = other.x[there] === place ? "" : ` at ${number(other.x[there])}`;
      words.push(`${other.label} ${valueOf(other, there)}${apart}`);
    }
    if (others.length > IN_READOUT) words.push(`and ${others.length - IN_READOUT} more`);
    return words.join(" · ");
  }
  const axisWords = () => data.axes.find(({ name }) => name === controls.x.get()).label;

  // A row for each value shown: what was logged, and the smoothed value where there is one.
  function rowsOf(panel) {
    const rows = [["run", "split", "metric", "step", "tokens", "seconds", "value", "smoothed"]];
    for (const line of seriesOf(panel)) {
      if (line.faint) continue;
      const { step, tokens, time } = line.track;
      line.raw.forEach((value, n) => {
        if (value !== null) rows.push([line.run.name, line.split, panel.metric, step[n], tokens[n], time[n], value, line.smooth ? line.y[n] : null]);
      });
    }
    return rows;
  }

  const made = new Map();
  function panelOf(panel, single) {
    const key = panel.metric + " " + panel.splits.join(" ") + single;
    if (!made.has(key)) {
      const { label } = metricOf.get(panel.metric);
      const svg = element("svg");
      const box = element("section", { "aria-label": label }, element("h2", {}, label), svg);
      const options = { series: [], height: single ? 460 : 300, label: `${label} of ${data.runs.length} runs` };
      const entry = { box, series: [] };
      entry.plot = tformer.lines(svg, { ...options, describe: (at, n) => describe(entry.series, at, n) });
      // A saved plot has no heading: its axis has the name instead.
      const svgNamed = () => {
        entry.plot.redraw({ yLabel: label });
        const text = entry.plot.svg();
        entry.plot.redraw({ yLabel: "" });
        return text;
      };
      box.append(tformer.saveButtons(panel.metric, () => ({ svg: svgNamed }), () => rowsOf(panel)));
      made.set(key, entry);
    }
    return made.get(key);
  }

  function draw() {
    const { panels } = views.get(controls.view.get());
    const single = panels.length === 1;
    const entries = panels.map((panel) => panelOf(panel, single));
    const host = byId("panels");
    host.className = single ? "" : "panels";
    if (entries.length !== host.children.length || entries.some(({ box }, n) => host.children[n] !== box)) {
      host.replaceChildren(...entries.map(({ box }) => box));
    }
    entries.forEach((entry, n) => {
      entry.series = seriesOf(panels[n]);
      entry.plot.redraw({ series: entry.series, xLabel: axisWords(), logX: controls.logX.get(), logY: controls.logY.get() });
    });
  }

  const columns = ["Run", "Metric", { label: "Last", number: true }, { label: "at step", number: true },
    { label: "Best", number: true }, { label: "at step", number: true }];
  const tableRows = () => {
    const names = new Set(shownRuns().map(({ run }) => run.name));
    return data.summary.filter(({ run, split }) => names.has(run) && isShown(splitShown.get(split)))
      .map((row) => [row.run, `${row.split} ${metricOf.get(row.metric).label}`, row.last, row.last_step, row.best, row.best_step]);
  };
  const table = tformer.table(byId("table"), { caption: "Last and best values", columns, rows: tableRows() });
  byId("table-save").append(element("div", { class: "row" }, "Save:", tformer.button("CSV of this table", () =>
    tformer.download("summary.csv", "text/csv", tformer.csv([["run", "metric", "last", "last_step", "best", "best_step"], ...tableRows()])))));

  state.onChange((keys) => {
    if ([...keys].every((key) => key === "theme")) return;
    draw();
    if ([...keys].some((key) => key.startsWith("run-") || key.startsWith("split-"))) table.redraw({ rows: tableRows() });
  });
  draw();
  tformer.redraw = () => { draw(); table.redraw({ rows: tableRows() }); };
})();
