// From a kind, a view and sizes to plots: [{type: "lines" | "heat", title, …options of tformer.lines or heatmap}].
"use strict";
tformer.peViews = (() => {
  const { pe, data, number } = tformer;
  const range = (count, from = 0) => Float64Array.from({ length: count }, (_, n) => from + n);
  const heat = (title, table, options) => ({
    type: "heat", title, rows: table.rows, cols: table.cols, values: table.values, colours: "RdBu_r", min: -1, max: 1,
    rowTitle: "position", colTitle: "dimension", cellSize: 60, barLabel: "value", ...options,
  });
  const lines = (title, series, options) => ({ type: "lines", title, series, ...options });
  const ramp = (count, label) => ({ colours: "viridis", low: 0, high: count - 1, label });
  const ramped = (count, make) => Array.from({ length: count }, (_, n) => ({
    ...make(n), colour: tformer.colourAt("viridis", n / Math.max(count - 1, 1)), width: count > 100 ? 0.6 : 1, dash: "",
  }));
  const bounded = (table) => {
    const bound = table.values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
    return { min: -bound, max: bound };
  };
  const sine = (s) => pe.sinusoidal(s.positions, s.d_model, s.base, s.layout);
  const columnsOf = (s, wanted) => [...range(s.d_model)].filter((j) => pe.isSine(j, s.d_model, s.layout) === wanted);
  const trace = (table, columns, title) => lines(`${title}, ${table.rows} tokens`, ramped(table.rows, (n) => ({
    label: `token ${n}`, x: columns, y: columns.map((j) => (Number.isNaN(j) ? NaN : table.at(n, j))),
  })), { xLabel: "dimension", yLabel: "value", ramp: ramp(table.rows, "token") });
  const curve = (label, y) => ({ label, x: range(y.length), y });
  const similarity = (table, title, options = {}) =>
    heat(title, table, { colTitle: "position", barLabel: "product / greatest", ...options });

  const sinusoidal = {
    traces: (s) => {
      const table = sine(s), sines = columnsOf(s, true);
      return [trace(table, sines, "Sine dimensions alone"), trace(table, [...sines, NaN, ...columnsOf(s, false)], "With the cosines")];
    },
    heatmap: (s) => [heat("", sine(s))],
    waves: (s) => {
      const table = sine(s);
      return [lines("", s.dims.map((j) => curve(`dimension ${j} (${pe.isSine(j, s.d_model, s.layout) ? "sine" : "cosine"})`, range(table.rows).map((i) => table.at(i, j)))),
        { xLabel: "position", yLabel: "value", yMin: -1.05, yMax: 1.05 })];
    },
    gram: (s) => [similarity(pe.gram(sine(s), s.d_model / 2), "")],
    distance: (s) => [lines("", [curve(`d_model ${s.d_model}`, pe.meanCosine(pe.sinusoidalFrequencies(s.d_model, s.base, s.layout), s.positions))],
      { xLabel: "distance Δ", yLabel: "mean cos(Δ·ω)" })],
    wavelengths: (s) => [lines("", [{ ...curve(s.layout, pe.sinusoidalFrequencies(s.d_model, s.base, s.layout).map((w) => (2 * Math.PI) / w)), points: s.d_model <= 64 }],
      { xLabel: "pair", yLabel: "tokens in a period", logY: true })],
  };
  const rope = {
    angles: (s) => [heat("", pe.ropeAngles(s.positions, s.head_dim, s.base),
      { colours: "twilight", min: 0, max: 2 * Math.PI, colTitle: "pair", barLabel: "angle" })],
    circles: (s) => {
      const [cos, sin] = [pe.ropeCos(s.positions, s.head_dim, s.base), pe.ropeSin(s.positions, s.head_dim, s.base)];
      const pairs = s.dims;
      return [lines("", pairs.map((i, ring) => {
        const radius = 1 - ring / (pairs.length + 1);
        return { label: `pair ${i}`, x: range(s.positions).map((m) => radius * cos.at(m, i)), y: range(s.positions).map((m) => radius * sin.at(m, i)), points: true };
      }), { xLabel: "first coordinate", yLabel: "second coordinate", xMin: -1.05, xMax: 1.05, yMin: -1.05, yMax: 1.05, square: true,
        describe: (ring, m) => `pair ${pairs[ring]} at position ${m}: turned by ${number(m * pe.ropeFrequencies(s.head_dim, s.base)[pairs[ring]])} radians` })];
    },
    decay: (s) => [lines("", [curve(`head of width ${s.head_dim}`, pe.meanCosine(pe.ropeFrequencies(s.head_dim, s.base), s.positions))],
      { xLabel: "distance Δ", yLabel: "mean cos(Δ·θ)" })],
    rotation: (s) => [heat("", pe.ropeTurned(s.positions, s.head_dim, s.base, s.layout),
      { min: -Math.SQRT2, max: Math.SQRT2, colTitle: "coordinate" })],
  };
  const alibi = {
    slopes: (s) => [lines("", [{ label: `${s.heads} heads`, x: range(s.heads, 1), y: pe.slopes(s.heads), points: true }],
      { xLabel: "head", yLabel: "slope", logY: true })],
    bias: (s) => {
      const slope = pe.slopes(s.heads)[s.head - 1];
      return [heat(`Head ${s.head}: slope ${number(slope)}`, pe.table(s.positions, s.positions, (i, j) => -slope * Math.abs(i - j)),
        { colours: "viridis", min: undefined, max: 0, rowTitle: "query", colTitle: "key", barLabel: "bias",
          mask: s.causal ? (i, j) => j > i : undefined, maskLabel: "masked: later keys" })];
    },
    decay: (s) => [lines("", pe.slopes(s.heads).map((slope, n) => ({ ...curve(`head ${n + 1}`, range(s.positions).map((d) => Math.exp(-slope * d))) })),
      { xLabel: "distance Δ", yLabel: "factor" })],
  };
  // A learned bias has the buckets of its model, wherever the sliders stand.
  const learnedBucket = (offset, both) => pe.bucket(offset, data.settings.buckets, data.settings.max_distance, both);
  const t5 = {
    buckets: (s) => {
      const x = range(2 * s.positions - 1, 1 - s.positions);
      const of = (both) => x.map((offset) => pe.bucket(offset, s.buckets, s.max_distance, both));
      return [lines("", [{ label: "both directions", x, y: of(true) }, { label: "causal", x, y: of(false) }],
        { xLabel: "offset: key − query", yLabel: "bucket" })];
    },
    bias: (s, learned) => {
      const weight = learned.tables.bias, both = learned.bidirectional, reach = s.positions - 1;
      const table = pe.table(weight.cols, (both ? 2 : 1) * reach + 1, (head, n) =>
        weight.at(learnedBucket(n - reach, both), head));
      return [heat("", table, { ...bounded(table), rowTitle: "head", colTitle: "offset: key − query", rowLabel: (i) => String(i + 1),
        colLabel: (j) => String(j - reach), barLabel: "bias", aspect: 2.2 })];
    },
  };
  const shawTable = (name) => (s, learned) => {
    const table = learned.tables[name], k = (table.rows - 1) / 2;
    return [heat("", table, { ...bounded(table), rowTitle: "clipped distance", rowLabel: (i) => String(i - k) })];
  };
  const shaw = {
    index: (s) => [heat("", pe.shawIndex(s.positions, s.clip), { colours: "viridis", min: 0, max: 2 * s.clip, rowTitle: "query i", colTitle: "key j", barLabel: "row" })],
    keys: shawTable("keys"), values: shawTable("values"),
  };
  const patch2d = {
    similarity: (s) => {
      const all = pe.gram(pe.patch2d(s.grid, s.d_model, s.base), s.d_model / 2), step = s.grid + 1;
      const place = (at) => (at % step === s.grid ? -1 : Math.floor(at / step) * s.grid);
      const inner = (at) => at % step;
      const table = pe.table(s.grid * step - 1, s.grid * step - 1, (i, j) => {
        if (inner(i) === s.grid || inner(j) === s.grid) return NaN;
        return all.at(place(i) + Math.floor(j / step), inner(i) * s.grid + inner(j));
      });
      const name = (at) => (inner(at) === Math.floor(s.grid / 2) ? String(Math.floor(at / step)) : "");
      return [heat("", table, { colours: "viridis", min: undefined, max: 1, rowTitle: "row of patches", colTitle: "column of patches", rowLabel: name, colLabel: name,
        barLabel: "cosine similarity", maskLabel: "between maps",
        describe: (i, j) => (Number.isNaN(table.at(i, j)) ? "between maps" :
          `patch (${Math.floor(i / step)}, ${Math.floor(j / step)}) with patch (${inner(i)}, ${inner(j)}): ${number(table.at(i, j))}`) })];
    },
    heatmap: (s) => [heat("", pe.patch2d(s.grid, s.d_model, s.base), { rowTitle: "patch" })],
  };
  const first = (table, rows) => pe.table(Math.min(rows, table.rows), table.cols, (i, j) => table.at(i, j));
  const unit = (table) => {
    const length = [...range(table.rows)].map((i) => Math.hypot(...table.row(i)) || 1);
    return pe.table(table.rows, table.cols, (i, j) => table.at(i, j) / length[i]);
  };
  const learned = {
    traces: (s, l) => [trace(first(l.tables.weight, s.positions), [...range(l.tables.weight.cols)], "All dimensions")],
    heatmap: (s, l) => { const t = first(l.tables.weight, s.positions); return [heat("", t, { ...bounded(t) })]; },
    similarity: (s, l) => [similarity(pe.gram(unit(first(l.tables.weight, s.positions)), 1), "", { barLabel: "cosine" })],
    norms: (s, l) => { const t = first(l.tables.weight, s.positions); return [lines("", [curve(l.name, range(t.rows).map((i) => Math.hypot(...t.row(i))))], { xLabel: "position", yLabel: "length", legend: false })]; },
    pca: (s, l) => {
      const path = l.path.slice(0, s.positions), parts = Math.min(24, path.length), cut = (n) => Math.floor((n * path.length) / parts);
      return [lines("", ramped(parts, (n) => {
        const piece = path.slice(cut(n), cut(n + 1) + 1);
        return { label: `position ${cut(n)} on`, x: piece.map((p) => p[0]), y: piece.map((p) => p[1]), points: path.length <= 256 };
      }), { xLabel: "first component", yLabel: "second component", ramp: ramp(path.length, "position"), square: true,
        describe: (part, n) => `position ${cut(part) + n}: ${path[cut(part) + n].map(number).join(", ")}` })];
    },
    beside: (s, l) => {
      const t = first(l.tables.weight, s.positions), even = t.cols + (t.cols % 2);
      return [heat("Learned", t, { ...bounded(t) }), heat("Sinusoidal", first(pe.sinusoidal(t.rows, even, s.base, "interleaved"), t.rows), {})];
    },
  };
  const COSINES = {
    sinusoidal: (s) => [curve(`sinusoidal, d_model ${s.d_model}`, pe.meanCosine(pe.sinusoidalFrequencies(s.d_model, s.base, "interleaved"), s.positions))],
    rope: (s) => [curve(`rope, head width ${s.head_dim}`, pe.meanCosine(pe.ropeFrequencies(s.head_dim, s.base), s.positions))],
    learned: (s, l) => [curve("learned", Float64Array.from(l.curves.learned.slice(0, s.positions)))],
  };
  const BIASES = {
    alibi: (s) => [...new Set([1, Math.floor((s.heads + 1) / 2), s.heads])].map((h) =>
      curve(`alibi, head ${h}`, range(s.positions).map((d) => -pe.slopes(s.heads)[h - 1] * d))),
    t5_bias: (s, l) => [...range(l.tables.bias.cols)].map((h) =>
      curve(`t5_bias, head ${h + 1}`, range(s.positions).map((d) => l.tables.bias.at(learnedBucket(-d, l.bidirectional), h)))),
  };
  const compare = {
    curves: (s, l) => [[COSINES, "Mean cosine"], [BIASES, "Added to the score"]].map(([kinds, title]) =>
      lines(title, data.compare.flatMap((kind) => (kinds[kind] ? kinds[kind](s, l) : [])), { xLabel: "distance Δ", yLabel: title.toLowerCase() }))
      .filter((plot) => plot.series.length),
  };
  return { sinusoidal, learned, rope, alibi, t5_bias: t5, learned_t5_bias: { ...learned, ...t5 }, shaw, patch2d, compare };
})();
