// The lens: a map of layers and positions, the answers at the cursor, and the parts of its logit.
"use strict";
(async () => {
  const { data, element, state } = tformer;
  const { rows, tokens, positions, words, targets, parts, pools } = data;
  const [R, N, K] = [rows.length, tokens.length, data.top];
  const place = (id) => document.getElementById(id);
  const floats = async (name) => new Float32Array((await tformer.blob(name)).slice().buffer);
  const FEW = 16; // columns whose most probable words are written into the cells
  const MEASURES = {
    probability: ["probability of the target", { min: 0, max: 1 }],
    rank: ["rank of the target", { min: 0, share: (rank) => Math.log10(1 + rank) / Math.log10(2 + mostOf("rank")), }],
    entropy: ["entropy of the answer, nats", { min: 0 }],
    kl: ["KL(model's answer ‖ answer after the layer), nats", { min: 0 }],
  };
  const lenses = {};
  for (const name of data.lenses) {
    const found = { shares: await floats(`${name}-shares`), top: new Int32Array((await tformer.blob(`${name}-top`)).slice().buffer) };
    for (const measure of Object.keys(MEASURES)) found[measure] = await floats(`${name}-${measure}`);
    lenses[name] = found;
  }
  const added = parts && (await floats("parts"));

  const word = (number) => tformer.token(words[number]);
  const shorten = (text) => ([...text].length > 10 ? [...text].slice(0, 9).join("") + "…" : text);
  const layerName = (i) => (rows[i] === "input" ? "the input" : `layer ${rows[i]}`);
  const lens = () => lenses[state.get("lens", data.lenses[0])] || lenses[data.lenses[0]];
  const measure = () => (MEASURES[state.get("measure", "probability")] ? state.get("measure", "probability") : "probability");
  const mostOf = (name) => lens()[name].reduce((a, b) => Math.max(a, b), 0);
  const cursor = () => [Math.min(state.get("layer", R - 1), R - 1), pools ? 0 : Math.min(state.get("position", N - 1), N - 1)];
  const colours = () => state.get("colours", "viridis");
  const best = (i, n) => Array.from({ length: K }, (_, k) => [lens().top[(i * N + n) * K + k], lens().shares[(i * N + n) * K + k]]);
  const percent = (value) => value.toFixed(4);

  // --- controls ---------------------------------------------------------------------------------------------------

  if (data.lenses.length > 1) {
    tformer.control("buttons", { id: "lens", label: "Lens", value: data.lenses[0], options: data.lenses.map((name) => [name, `${name} lens`]) });
  }
  if (!pools) {
    tformer.control("buttons", { id: "measure", label: "Colour", value: "probability", options: Object.entries(MEASURES).map(([name, [label]]) => [name, label]) });
  }
  tformer.control("select", { id: "colours", label: "Colours", value: "viridis", options: [["viridis", "viridis"], ["cividis", "cividis"]] });

  // --- the map ----------------------------------------------------------------------------------------------------

  // Of a classifier: its labels, the most probable in the end first.
  const labels = pools ? best(R - 1, 0).map(([label]) => label) : [];
  const labelShare = (i, label) => best(i, 0).find(([one]) => one === label)?.[1] ?? NaN;
  function mapOptions() {
    const common = { rows: R, rowLabel: (i) => rows[i], rowTitle: "after layer", colours: colours(), onCursor: (i, j) => state.set(pools ? { layer: i } : { layer: i, position: j }) };
    if (pools) {
      return { ...common, cols: labels.length, value: (i, j) => labelShare(i, labels[j]), min: 0, max: 1, colLabel: (j) => word(labels[j]), colTitle: "label",
        barLabel: "probability", numbers: labels.length <= FEW, label: "probability of each label after each layer",
        describe: (i, j) => `after ${layerName(i)}: ${word(labels[j])} ${percent(labelShare(i, labels[j]))}` };
    }
    const name = measure();
    const [label, scale] = MEASURES[name];
    return { ...common, cols: N, values: lens()[name], min: undefined, max: undefined, share: undefined, ...scale, colLabel: (j) => word2(tokens[j]), colTitle: "token read",
      barLabel: label, numbers: N <= FEW, words: (i, j) => shorten(word(best(i, j)[0][0])), label: `${label} after each layer, at each position`, describe };
  }
  const word2 = (text) => tformer.token(text);
  function describe(i, j) {
    const [n, found] = [i * N + j, lens()];
    return `after ${layerName(i)}, ${word2(tokens[j])} (${positions[j]}): ${word(best(i, j)[0][0])} ${percent(best(i, j)[0][1])}; ` +
      `target ${word(targets[j])}: probability ${percent(found.probability[n])}, rank ${tformer.number(found.rank[n])}, entropy ${tformer.number(found.entropy[n])}, KL ${tformer.number(found.kl[n])}`;
  }
  const canvas = element("canvas", {});
  place("lens").append(element("h2", {}, "The answer after each layer"),
    element("p", { class: "caption" }, "Each row is the answer if the model ended there; the last is the model's. Arrow keys move the cursor."), canvas);
  const map = tformer.heatmap(canvas, mapOptions());
  const lensRows = () => [["row", "position", "token", "target", ...Object.keys(MEASURES), ...Array.from({ length: K }, (_, k) => [`top_${k + 1}`, `probability_${k + 1}`]).flat()],
    ...Array.from({ length: R * N }, (_, n) => {
      const [i, j] = [Math.floor(n / N), n % N];
      return [rows[i], positions[j], tokens[j], words[targets[j]], ...Object.keys(MEASURES).map((name) => lens()[name][n]), ...best(i, j).flatMap(([one, share]) => [words[one], share])];
    })];
  place("lens").append(tformer.saveButtons("lens", () => map, lensRows));

  // --- the cell at the cursor ---------------------------------------------------------------------------------------

  const line = element("svg", {}), list = element("div", {}), heading = element("h2", { dir: "auto" });
  place("cell").append(heading, element("div", { class: "panels" }, element("div", {}, element("h3", {}, "Most probable"), list),
    element("div", {}, element("h3", {}, "Probability of the target after each layer"), line)));
  const target = () => cursor()[1];
  const course = () => Object.entries(lenses).map(([name, found]) => ({ label: data.lenses.length > 1 ? `${name} lens` : "", points: true,
    x: rows.map((_, i) => i), y: rows.map((_, i) => found.probability[i * N + target()]) }));
  const curve = tformer.lines(line, { series: course(), xLabel: "after layer", xNames: rows, yLabel: "probability", yMin: 0, yMax: 1, height: 260, label: "probability of the target after each layer" });
  function showCell() {
    const [i, j] = cursor();
    heading.textContent = `After ${layerName(i)}` + (pools ? "" : `, at ${word2(tokens[j])} (${positions[j]})`) + `; target ${word(targets[j])}`;
    tformer.table(list, { caption: "The most probable answers at the cursor", columns: ["answer", { label: "probability", number: true, format: percent }],
      rows: best(i, j).map(([one, share]) => [word(one), share]) });
    curve.redraw({ series: course() });
  }

  // --- the parts of the logit -----------------------------------------------------------------------------------------

  let shownAt = -1, partMap = null;
  const partCanvas = element("canvas", {}), partTable = element("div", {}), partText = element("p", { class: "caption", dir: "auto" });
  function partOptions() {
    const C = parts.names.length, from = cursor()[1] * C;
    const layers = [...new Set(parts.layers.filter((layer) => layer !== null))];
    const columns = [...new Set(parts.columns.filter((_, c) => parts.layers[c] !== null))];
    const cells = new Map(parts.names.map((_, c) => [`${parts.layers[c]} ${parts.columns[c]}`, added[from + c]]));
    const most = added.slice(from, from + C).reduce((a, b) => Math.max(a, Math.abs(b)), 0) || 1;
    return { rows: layers.length, cols: columns.length, value: (i, j) => cells.get(`${layers[i]} ${columns[j]}`) ?? NaN, min: -most, max: most, colours: "RdBu_r",
      rowLabel: (i) => String(layers[i]), colLabel: (j) => columns[j], rowTitle: "layer", colTitle: "part", barLabel: "added to the logit", maskLabel: "no such part",
      label: "what each part adds to the logit" };
  }
  function showParts() {
    const j = cursor()[1];
    if (!parts || j === shownAt) return;
    shownAt = j;
    const C = parts.names.length, values = added.slice(j * C, (j + 1) * C);
    const sum = values.reduce((a, b) => a + b, 0);
    const what = `the logit of ${word(targets[j])}` + (data.against === null ? "" : ` minus that of ${tformer.token(data.against)}`);
    const alone = parts.names.flatMap((name, c) => (parts.layers[c] === null ? [`${name} ${tformer.number(values[c])}`] : []));
    partText.textContent = `Of ${what}${pools ? "" : ` at ${word2(tokens[j])} (${positions[j]})`}: ${tformer.number(parts.logits[j])}. All parts add up to ${tformer.number(sum)}. ` +
      `H: head of self-attention, C: of cross-attention, FF: feed-forward. Beside the map: ${alone.join(", ")}.`;
    if (partMap === null) partMap = tformer.heatmap(partCanvas, partOptions());
    else partMap.redraw(partOptions());
    tformer.table(partTable, { caption: "Every part", columns: ["part", { label: "added to the logit", number: true }],
      rows: parts.names.map((name, c) => [name, values[c]]).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])) });
  }
  const partRows = () => [["position", "token", "target", "part", "value"], ...tokens.flatMap((token, j) =>
    parts.names.map((name, c) => [positions[j], token, words[targets[j]], name, added[j * parts.names.length + c]]))];
  place("parts").append(element("h2", {}, "Parts of the logit"), ...(parts ? [partText, partCanvas] : [element("p", { class: "notes" }, data.withoutParts)]));
  if (parts) {
    showParts();
    place("parts").append(tformer.saveButtons("parts", () => partMap, partRows), element("details", {}, element("summary", {}, "Every part as a table"), partTable));
  }

  // --- the training of the tuned lens ---------------------------------------------------------------------------------

  if (data.heldOut) {
    const svg = element("svg", {});
    place("tuning").append(element("h2", {}, "KL(model's answer ‖ answer after the layer) on held-out text"), svg);
    const plot = tformer.lines(svg, { xLabel: "after layer", xNames: rows, yLabel: "nats", yMin: 0, label: "KL of both lenses after each layer",
      series: ["logit lens", "tuned lens"].map((label, n) => ({ label, points: true, x: data.heldOut[n].map((_, i) => i), y: data.heldOut[n] })) });
    place("tuning").append(tformer.saveButtons("held-out-kl", () => plot, () => plot.rows()));
  }

  const show = () => { showCell(); showParts(); };
  const look = () => { if (!pools) map.cursor(...cursor(), true); };
  look();
  show();
  state.onChange((keys) => {
    if (["lens", "measure", "colours"].some((key) => keys.has(key))) map.redraw(mapOptions());
    if (["lens", "layer", "position"].some((key) => keys.has(key))) { look(); show(); }
  });
  document.documentElement.dataset.ready = "true";
})();
