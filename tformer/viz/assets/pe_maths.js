// Fixed positional encodings in double precision, as tformer.nn.positions has them; check() compares.
// Every function gives {rows, cols, at(i, j)} over a Float64Array.
"use strict";
tformer.pe = (() => {
  function table(rows, cols, value) {
    const values = new Float64Array(rows * cols);
    for (let i = 0; i < rows; i++) for (let j = 0; j < cols; j++) values[i * cols + j] = value(i, j);
    return { rows, cols, values, at: (i, j) => values[i * cols + j], row: (i) => values.subarray(i * cols, (i + 1) * cols) };
  }
  const frequencies = (count, denominator, base) => Float64Array.from({ length: count }, (_, i) => base ** (-i / denominator));

  function sinusoidalFrequencies(width, base, layout) {
    const half = width / 2;
    return frequencies(half, layout === "fairseq" ? Math.max(half - 1, 1) : half, base);
  }
  const isSine = (j, width, layout) => (layout === "interleaved" ? j % 2 === 0 : j < width / 2);
  const pairOf = (j, width, layout) => (layout === "interleaved" ? Math.floor(j / 2) : j % (width / 2));
  function sinusoidal(rows, width, base, layout) {
    const omega = sinusoidalFrequencies(width, base, layout);
    return table(rows, width, (pos, j) => {
      const angle = pos * omega[pairOf(j, width, layout)];
      return isSine(j, width, layout) ? Math.sin(angle) : Math.cos(angle);
    });
  }
  function patch2d(side, width, base) {
    const half = sinusoidal(side, width / 2, base, "halves");
    return table(side * side, width, (patch, j) =>
      j < width / 2 ? half.at(patch % side, j) : half.at(Math.floor(patch / side), j - width / 2));
  }
  const ropeFrequencies = (width, base) => frequencies(width / 2, width / 2, base);
  function rope(rows, width, base, turn) {
    const theta = ropeFrequencies(width, base);
    return table(rows, width / 2, (pos, i) => turn(pos * theta[i]));
  }
  const ropeCos = (rows, width, base) => rope(rows, width, base, Math.cos);
  const ropeSin = (rows, width, base) => rope(rows, width, base, Math.sin);
  function slopes(heads) {
    const below = 2 ** Math.floor(Math.log2(heads));
    const first = Array.from({ length: below }, (_, n) => 2 ** ((-8 * (n + 1)) / below));
    return first.concat(Array.from({ length: heads - below }, (_, n) => 2 ** ((-4 * (2 * n + 1)) / below)));
  }
  function alibiSlopes(heads) {
    const all = slopes(heads);
    return table(heads, 1, (i) => all[i]);
  }
  // In fp32, step by step, as released T5 models compute it.
  function bucket(offset, buckets, maxDistance, both) {
    const f = Math.fround;
    let first = 0, distance = both ? Math.abs(offset) : Math.max(-offset, 0);
    if (both) {
      buckets = Math.floor(buckets / 2);
      if (offset > 0) first = buckets;
    }
    const exact = Math.floor(buckets / 2);
    if (distance < exact) return first + distance;
    const ratio = f(f(Math.log(f(Math.max(distance, 1) / exact))) / f(Math.log(maxDistance / exact)));
    return first + Math.min(exact + Math.trunc(f(ratio * (buckets - exact))), buckets - 1);
  }
  const t5Buckets = (reach, buckets, maxDistance, both) => table(2 * reach + 1, 1, (i) => bucket(i - reach, buckets, maxDistance, both));
  const shawIndex = (rows, clip) => table(rows, rows, (i, j) => Math.min(Math.max(j - i, -clip), clip) + clip);

  // Products of all pairs of rows, over `scale`.
  function gram(of, scale) {
    const made = table(of.rows, of.rows, () => 0);
    for (let i = 0; i < of.rows; i++) {
      const a = of.row(i);
      for (let j = i; j < of.rows; j++) {
        const b = of.row(j);
        let sum = 0;
        for (let k = 0; k < of.cols; k++) sum += a[k] * b[k];
        made.values[i * of.rows + j] = made.values[j * of.rows + i] = sum / scale;
      }
    }
    return made;
  }
  const meanCosine = (omega, count) => Float64Array.from({ length: count }, (_, d) => omega.reduce((sum, w) => sum + Math.cos(d * w), 0) / omega.length);

  const functions = { sinusoidal, patch2d, ropeCos, ropeSin, alibiSlopes, t5Buckets, shawIndex };
  // The largest difference from Python's values, and how many were compared.
  function check(cases) {
    const found = { largest: 0, count: 0 };
    for (const { name, arguments: given, values } of cases) {
      const made = functions[name](...given);
      for (const [i, j, expected] of values) found.largest = Math.max(found.largest, Math.abs(made.at(i, j) - expected));
      found.count += values.length;
    }
    return found;
  }
  return { ...functions, table, sinusoidalFrequencies, ropeFrequencies, isSine, bucket, slopes, gram, meanCosine, check };
})();
