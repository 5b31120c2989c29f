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
  };
  const rope = {
    circles: (s) => {
      const [cos, sin] = [pe.ropeCos(s.positions, s.head_dim, s.base), pe.ropeSin(s.positions, s.head_dim, s.base)];
      const pairs = s.dims;
      return [lines("", pairs.map((i, ring) => {
        const radius = 1 - ring / (pairs.length + 1);
        return { label: `pair ${i}`, x: range(s.positions).map((m) => radius * cos.at(m, i)), y: range(s.positions).map((m) => radius * sin.at(m, i)), points: true };
      }), { xLabel: "first coordinate", yLabel: "second coordinate", xMin: -1.05, xMax: 1.05, yMin: -1.05, yMax: 1.05, square: true,
        describe: (ring, m) => `pair ${pairs[ring]} at position ${m}: turned by ${number(m * pe.ropeFrequencies(s.head_dim, s.base)[pairs[ring]])} radians` })];
    },
  };
  const alibi = {
    bias: (s) => {
      const slope = pe.slopes(s.heads)[s.head - 1];
      return [heat(`Head ${s.head}: slope ${number(slope)}`, pe.table(s.positions, s.positions, (i, j) => -slope * Math.abs(i - j)),
        { colours: "viridis", min: undefined, max: 0, rowTitle: "query", colTitle: "key", barLabel: "bias",
          mask: s.causal ? (i, j) => j > i : undefined, maskLabel: "masked: later keys" })];
    },
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
  const shaw = {
    index: (s) => [heat("", pe.shawIndex(s.positions, s.clip), { colours: "viridis", min: 0, max: 2 * s.clip, rowTitle: "query i", colTitle: "key j", barLabel: "row" })],
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
  };
  const first = (table, rows) => pe.table(Math.min(rows, table.rows), table.cols, (i, j) => table.at(i, j));
  const unit = (table) => {
    const length = [...range(table.rows)].map((i) => Math.hypot(...table.row(i)) || 1);
    return pe.table(table.rows, table.cols, (i, j) => table.at(i, j) / length[i]);
  };
  const learned = {
    similarity: (s, l) => [heat("", pe.gram(unit(first(l.tables.weight, s.positions)), 1), { colTitle: "position", barLabel: "cosine" })],
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
