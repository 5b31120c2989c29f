// Attention weights: bytes to weights, special tokens hidden, words merged, weights to shares of the colour scale.
// attention.matrix({kind, layer, head}) and attention.rollout(kind) give {rows, cols, values, mask, labels…}.
"use strict";
const attention = (() => {
  const { data, state } = tformer;
  const start = data.start;
  const MEAN = "mean";

  const settings = () => {
    const kind = data.kinds.find((one) => one.kind === state.get("attention", start.attention)) || data.kinds[0];
    const number = state.get("layer", kind.layers[0].number);
    const layer = kind.layers.find((one) => one.number === number) || kind.layers[0];
    const wanted = state.get("head", start.head || String(layer.heads[0]));
    const head = wanted === MEAN ? MEAN : layer.heads.includes(Number(wanted)) ? Number(wanted) : layer.heads[0];
    const views = ["head", "model", "rollout", "summary"];
    const view = state.get("view", start.view);
    return {
      kind, layer, head, view: views.includes(view) ? view : "head",
      scale: state.get("scale", start.scale), top: state.get("top", start.top), colours: state.get("colours", start.colours),
      changes: { hide: state.get("hide", start.hide), merge: state.get("merge", start.merge) },
    };
  };

  // Rows or columns of a side: {groups: [[start, stop]], labels, special, written}.
  function axis(name, { hide, merge }) {
    const side = data.sides[name];
    const words = merge ? side.words : side.tokens.map((token, place) => [place, place + 1, token]);
    const groups = words.filter(([first]) => !(hide && side.special[first]));
    return {
      name, length: side.tokens.length, groups, special: groups.map(([first]) => Boolean(side.special[first])),
      texts: groups.map((group) => group[2]), labels: groups.map((group) => tformer.token(group[2])),
      written: groups.map(([first]) => side.writtenFrom !== null && first >= side.writtenFrom), hidden: side.special,
    };
  }

  const tables = new Map();
  function table({ signed = false, largest = 1, steps }) {
    const key = `${signed} ${largest} ${steps}`;
    if (!tables.has(key)) {
      tables.set(key, Float32Array.from({ length: 256 }, (_, byte) => {
        const root = (signed ? byte - 128 : byte) / steps;
        return Math.sign(root) * root * root * largest;
      }));
    }
    return tables.get(key);
  }

  async function maskOf(name, rows, cols) {
    if (name === null) return null;
    if (name !== "causal") return tformer.blob(name);
    const mask = new Uint8Array(rows * cols);
    for (let i = 0; i < rows; i++) mask.fill(1, i * cols, i * cols + i + 1);
    return mask;
  }

  // The unchanged matrix: {values, mask (1 = can be seen) or null}.
  async function whole(kind, layer, head) {
    const [rows, cols] = [data.sides[kind.queries].tokens.length, data.sides[kind.keys].tokens.length];
    const bytes = await tformer.blob(layer.blob);
    const weights = table(layer);
    const size = rows * cols;
    const values = new Float32Array(size);
    const places = head === MEAN ? layer.heads.map((_, place) => place) : [layer.heads.indexOf(head)];
    for (const place of places) for (let n = 0, from = place * size; n < size; n++) values[n] += weights[bytes[from + n]];
    if (places.length > 1) for (let n = 0; n < size; n++) values[n] /= places.length;
    return { values, mask: await maskOf(layer.mask, rows, cols), signed: layer.signed };
  }

  // Hidden first, then merged: sums over keys, means over queries (as in viz/attention/weights.py).
  function reshaped({ values, mask, signed }, queries, keys, { hide, merge }) {
    const [rows, cols] = [queries.groups.length, keys.groups.length];
    const result = { rows, cols, values, mask, signed, queries, keys };
    if (!hide && !merge) return result;
    result.values = new Float32Array(rows * cols);
    result.mask = mask && new Uint8Array(rows * cols);
    queries.groups.forEach(([top, bottom], i) => {
      for (let row = top; row < bottom; row++) {
        const from = row * keys.length;
        let factor = 1 / (bottom - top);
        if (hide && !signed) {
          let total = 0, left = 0;
          for (let key = 0; key < keys.length; key++) {
            total += values[from + key];
            if (!keys.hidden[key]) left += values[from + key];
          }
          factor *= left > 0 ? total / left : 1;
        }
        keys.groups.forEach(([first, last], j) => {
          for (let key = first; key < last; key++) {
            result.values[i * cols + j] += factor * values[from + key];
            if (mask && mask[from + key]) result.mask[i * cols + j] = 1;
          }
        });
      }
    });
    return result;
  }

  async function matrix({ kind, layer, head, changes }) {
    return reshaped(await whole(kind, layer, head), axis(kind.queries, changes), axis(kind.keys, changes), changes);
  }

  async function rollout({ kind, changes }) {
    const [queries, keys] = [axis(kind.queries, changes), axis(kind.keys, changes)];
    const { blob, signed, steps, unit, largest } = kind.rollout;
    const weights = table({ signed, steps, largest: unit });
    const values = Float32Array.from(await tformer.blob(blob), (byte) => weights[byte]);
    const mask = await maskOf(kind.rollout.mask, queries.length, keys.length);
    return { ...reshaped({ values, mask, signed }, queries, keys, changes), largest };
  }

  // How a matrix is coloured: {value(i, j), share, min, max, colours, barLabel} of a heat map.
  function scaled(found, { scale, colours, kind }) {
    const { values, cols, rows } = found;
    const value = (i, j) => values[i * cols + j];
    const most = found.largest || kind.largest;
    if (found.signed) return { value, share: undefined, min: -most, max: most, colours: "RdBu_r", barLabel: "effective weight" };
    if (scale === "row") {
      const tops = Float32Array.from({ length: rows }, (_, i) => values.subarray(i * cols, (i + 1) * cols).reduce((a, b) => Math.max(a, b), 0) || 1);
      return { value: (i, j) => values[i * cols + j] / tops[i], share: undefined, min: 0, max: 1, colours, barLabel: "share of the row's largest" };
    }
    if (scale === "sqrt") return { value, share: (a) => Math.sqrt(a / most), min: 0, max: most, colours, barLabel: "weight, √ scale" };
    if (scale === "log") return { value, share: (a) => (a > 0 ? 1 + Math.log10(a) / 4 : 0), min: 1e-4, max: 1, colours, barLabel: "weight, log scale" };
    return { value, share: undefined, min: 0, max: most, colours, barLabel: "weight" };
  }

  // The keys with the largest weights of a row: [[key, weight]], forbidden ones omitted; negative weights by their absolute value.
  function strongest({ values, mask, cols }, row, count) {
    const keys = Array.from({ length: cols }, (_, j) => j).filter((j) => !mask || mask[row * cols + j]);
    return keys.map((j) => [j, values[row * cols + j]]).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, count);
  }

  return { MEAN, settings, axis, whole, matrix, rollout, reshaped, scaled, strongest, table, maskOf };
})();
