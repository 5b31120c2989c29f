// The explorer of positional encodings: controls, the chosen view, its numbers as a table, and the check against Python.
"use strict";
(async () => {
  const { data, state, element, control, pe, peViews, number } = tformer;
  const byId = (id) => document.getElementById(id);
  const NAMES = { sinusoidal: "Sinusoidal", learned: "Learned", rope: "Rotary (RoPE)", alibi: "ALiBi", t5_bias: "T5 bias",
    learned_t5_bias: "Learned, T5 bias", shaw: "Shaw", patch2d: "2-D patches", compare: "Compare" };
  // Which controls a view has, beside the kind and the view.
  const USES = {
    sinusoidal: { all: ["positions", "d_model", "base", "layout"], waves: ["dims"] },
    learned: { all: ["positions"] },
    rope: { all: ["positions", "d_model", "heads", "base", "dims"] },
    alibi: { all: ["heads", "positions", "head", "causal"] },
    t5_bias: { all: ["positions", "buckets", "max_distance"], bias: ["-buckets", "-max_distance"] },
    learned_t5_bias: { all: ["positions"], buckets: ["buckets", "max_distance"] },
    shaw: { all: ["positions", "clip"] },
    patch2d: { all: ["grid", "d_model", "base"] },
    compare: { all: ["positions", "d_model", "heads", "base"] },
  };
  const learned = data.learned;
  if (learned) {
    learned.tables = {};
    for (const name of ["weight", "bias"]) {
      if (!learned[name]) continue;
      const [rows, cols] = learned[name];
      const values = new Float32Array((await tformer.blob(name)).slice().buffer);
      learned.tables[name] = { rows, cols, values, at: (i, j) => values[i * cols + j], row: (i) => values.subarray(i * cols, (i + 1) * cols) };
    }
  }
  // Kinds without formulas in pe_views.js: heat maps of numbers that the page contains.
  for (const [kind, views] of Object.entries(data.embedded)) {
    peViews[kind] = {};
    for (const [name, plots] of Object.entries(views)) {
      const heats = await Promise.all(plots.map(async (plot) => (
        { ...plot, type: "heat", cols: plot.columns, values: new Float32Array((await tformer.blob(plot.blob)).slice().buffer), cellSize: 60 })));
      peViews[kind][name] = () => heats;
    }
  }
  const shows = (kind, name) => !data.views[kind][name].needs_run || Boolean(learned && learned.kind === kind);
  const kinds = Object.keys(data.views).filter((kind) => Object.keys(data.views[kind]).some((name) => shows(kind, name)));
  const given = data.settings;
  const option = (values) => values.map((value) => [value, value]);
  const fields = {};
  const add = (kind, options) => { fields[options.id] = control(kind, options); };

  add("select", { id: "encoding", label: "Encoding", value: data.kind, options: kinds.map((kind) => [kind, NAMES[kind] || kind]) });
  add("buttons", { id: "view", label: "View", value: data.view, options: [] });
  add("range", { id: "positions", label: "Positions (tokens)", value: 128, min: 2, max: 1024, log: true, integer: true });
  add("range", { id: "d_model", label: "Width d_model", value: given.d_model, min: 4, max: Math.max(1024, given.d_model), step: 4, integer: true });
  add("range", { id: "heads", label: "Heads", value: given.heads, min: 1, max: Math.max(32, given.heads), step: 1, integer: true });
  add("range", { id: "base", label: "Base of the wavelengths", value: given.base, min: 2, max: Math.max(1e6, given.base), log: true });
  add("select", { id: "layout", label: "Layout of the columns", value: data.layouts.sinusoidal.includes(given.layout) && data.kind === "sinusoidal" ? given.layout : "interleaved", options: option(data.layouts.sinusoidal) });
  add("text", { id: "dims", label: "Dimensions", value: "", help: "numbers with commas; empty: some" });
  add("range", { id: "head", label: "Head shown", value: 1, min: 1, max: 8, step: 1, integer: true });
  add("checkbox", { id: "causal", label: "Causal: hide later keys", value: false });
  add("range", { id: "buckets", label: "Buckets", value: given.buckets, min: 4, max: Math.max(128, given.buckets), step: 2, integer: true });
  add("range", { id: "max_distance", label: "Maximum distance", value: given.max_distance, min: 4, max: Math.max(1024, given.max_distance), log: true, integer: true });
  add("range", { id: "clip", label: "Clip k", value: given.clip, min: 1, max: Math.max(64, given.clip), step: 1, integer: true });
  add("range", { id: "grid", label: "Patches a side", value: given.grid, min: 2, max: Math.max(16, given.grid), step: 1, integer: true });

  const current = () => {
    const kind = fields.encoding.get();
    const views = Object.keys(data.views[kind]).filter((name) => shows(kind, name));
    const asked = state.get("view", kind === data.kind ? data.view : views[0]);
    return { kind, views, view: views.includes(asked) ? asked : views[0] };
  };

  function settings(kind, view) {
    const s = {};
    for (const id of ["positions", "d_model", "heads", "base", "head", "causal", "buckets", "max_distance", "clip", "grid"]) s[id] = fields[id].get();
    const notes = [];
    s.layout = fields.layout.get();
    if (kind === "rope" || kind === "compare") {
      s.head_dim = Math.max(2, 2 * Math.floor(s.d_model / s.heads / 2));
      if (s.head_dim * s.heads !== s.d_model) notes.push(`${s.d_model} over ${s.heads} heads is rounded down to an even width of ${s.head_dim} a head.`);
    }
    if (s.max_distance <= s.buckets / 2) {
      s.max_distance = s.buckets / 2 + 1;
      notes.push(`The maximum distance must exceed half the buckets: ${s.max_distance} is shown.`);
    }
    s.head = Math.min(s.head, s.heads);
    const count = kind === "rope" ? s.head_dim / 2 : s.d_model;
    const asked = fields.dims.get().split(",").map((part) => part.trim()).filter((part) => part !== "").map(Number);
    s.dims = asked.filter((j) => Number.isInteger(j) && j >= 0 && j < count);
    if (s.dims.length < asked.length) notes.push(`Only whole numbers from 0 to ${count - 1} name a ${kind === "rope" ? "pair" : "dimension"}.`);
    if (!s.dims.length) s.dims = kind === "rope" ? unique([0, count / 8, count / 4, count / 2]) :
      unique([1, 2, 3, 4].map((n) => (s.d_model / 2) * n / 12)).map((pair) => (s.layout === "interleaved" ? 2 * pair : pair));
    return { s, notes };
  }
  const unique = (numbers) => [...new Set(numbers.map(Math.floor))];

  function visibleFields(kind, view) {
    const uses = USES[kind] || { all: [] };
    const names = new Set(uses.all);
    for (const name of uses[view] || []) name.startsWith("-") ? names.delete(name.slice(1)) : names.add(name);
    for (const [id, field] of Object.entries(fields)) field.element.hidden = !(id === "encoding" || id === "view" || names.has(id));
    fields.dims.element.querySelector("label").textContent = kind === "rope" ? "Pairs" : "Dimensions";
  }

  let shown = [], drawn = "";
  function draw() {
    const { kind, views, view } = current();
    const plan = kind + "/" + view;
    const about = data.views[kind][view];
    if (plan !== drawn) {
      fields.view.configure({ value: kind === data.kind ? data.view : views[0], options: views.map((name) => [name, name]) });
      const most = kind === "learned" ? learned.weight[0] : 1024;
      const wanted = kind === data.kind && given.positions ? given.positions : about.positions;
      fields.positions.configure({ value: Math.min(wanted, most), max: Math.max(most, wanted) });
      if (kind === data.kind) fields.dims.configure({ value: data.dims ? data.dims.join(",") : "" });
      visibleFields(kind, view);
    }
    fields.head.configure({ max: fields.heads.get() });
    const { s, notes } = settings(kind, view);
    byId("view-title").textContent = about.title;
    byId("caption").textContent = about.caption;
    if (learned && learned.kind === kind && about.needs_run) notes.unshift(learned.name + (learned.note ? `: ${learned.note}.` : "."));
    byId("status").textContent = [data.about[kind], ...notes].join(" ");
    const plots = peViews[kind][view](s, learned).map((plot) => ({ label: plot.title || about.title, ...plot }));
    // Plots of the same shape are redrawn in place: focus and cursor stay where they are.
    const shape = plan + plots.map((plot) => plot.type).join();
    if (shape !== drawn + shown.map((one) => one.type).join()) {
      shown = plots.map((plot, n) => {
        const heading = element("h3", {}, plot.title);
        const canvas = element(plot.type === "heat" ? "canvas" : "svg");
        const one = { heading, canvas, box: element("div", {}, heading, canvas), type: plot.type };
        one.box.append(tformer.saveButtons(`${kind}-${view}${plots.length > 1 ? "-" + (n + 1) : ""}`, () => one.plot, () => one.plot.rows()));
        return one;
      });
      byId("panels").replaceChildren(...shown.map((one) => one.box));
      shown.forEach((one, n) => { one.plot = (one.type === "heat" ? tformer.heatmap : tformer.lines)(one.canvas, plots[n]); });
    } else shown.forEach((one, n) => one.plot.redraw({ mask: undefined, describe: undefined, ...plots[n] }));
    shown.forEach((one, n) => { one.heading.textContent = plots[n].title; one.heading.hidden = !plots[n].title; });
    drawn = plan;
    fillTable();
  }
  let table = null;
  function fillTable() {
    if (!byId("numbers").open) return;
    const [head, ...rows] = shown[0].plot.rows();
    const most = 24;
    const options = {
      caption: byId("view-title").textContent, limit: 200,
      columns: head.slice(0, most).map((label, n) => (n ? { label: String(label), number: true } : String(label))), rows: rows.map((row) => row.slice(0, most)),
    };
    table = tformer.table(byId("table"), options);
    if (head.length > most) byId("table").append(element("p", { class: "help" }, `The first ${most - 1} of ${head.length - 1} columns; the CSV has all.`));
  }
  byId("numbers").addEventListener("toggle", fillTable);

  state.onChange((keys) => {
    if (keys.has("encoding") && !keys.has("view")) state.set({ view: null, positions: null, dims: null });
    if ([...keys].some((key) => key in fields)) draw();
  });
  draw();

  const { largest, count } = pe.check(data.reference);
  byId("agreement").textContent = `Checked on opening: this page's formulas agree with tformer's own modules at ${number(count)} values, ` +
    `largest difference ${largest.toExponential(1)} in double precision. ` +
    `The fp32 table of ${number(data.fp32.rows)} positions is at most ${data.fp32.error.toExponential(1)} away: too little to see in a plot.`;
  Object.assign(byId("agreement").dataset, { largest, count });
  document.body.dataset.ready = "true";
})();
