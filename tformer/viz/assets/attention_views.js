// The views of attention: one head, all heads, rollout, summary; and the controls that choose among them.
"use strict";
(() => {
  const { data, element, state } = tformer;
  const host = document.getElementById("stage");
  const { MEAN, settings } = attention;
  const start = data.start;
  let turn = 0; // of drawing: a later one makes an earlier one stop
  let follow = () => {}; // what the cursor's change asks of the present view
  let ready = "";

  // --- controls ---------------------------------------------------------------------------------------------------

  const controls = {};
  const make = (kind, options) => { controls[options.id] = tformer.control(kind, options); };
  if (data.kinds.length > 1) {
    make("buttons", { id: "attention", label: "Attention", value: start.attention, options: data.kinds.map((one) => [one.kind, one.name]) });
  }
  make("buttons", {
    id: "view", label: "View", value: start.view,
    options: [["head", "One head"], ["model", "All heads"], ["rollout", "Rollout"], ["summary", "Summary"]].filter(([view]) => view !== "rollout" || data.kinds[0].rollout),
  });
  make("select", { id: "layer", label: "Layer", value: 0, options: [] });
  make("select", { id: "head", label: "Head", value: 0, options: [] });
  make("select", {
    id: "scale", label: "Colour scale", value: start.scale,
    options: [["global", "linear"], ["sqrt", "square root"], ["log", "logarithmic"], ["row", "each row by itself"]],
  });
  make("select", { id: "colours", label: "Colours", value: start.colours, options: [["viridis", "viridis"], ["cividis", "cividis"]] });
  make("number", { id: "top", label: "Links", value: start.top, min: 1, max: 20, step: 1, integer: true });
  if (data.image) {
    make("range", { id: "overlay", label: "Overlay", value: 0.6, min: 0, max: 1, step: 0.05 });
    make("select", { id: "from", label: "Looks from", value: data.image.offset ? "cls" : "mean",
      options: [...(data.image.offset ? [["cls", "class token"]] : []), ["mean", "mean of all patches"], ["cursor", "token at the cursor"]] });
  }
  const sides = Object.values(data.sides);
  if (sides.some((side) => side.special.some(Boolean))) make("checkbox", { id: "hide", label: "Hide special tokens", value: start.hide });
  if (sides.some((side) => side.words.length < side.tokens.length)) make("checkbox", { id: "merge", label: "Merge tokens into words", value: start.merge });

  function choices() {
    const { kind, layer, view, head } = settings();
    controls.layer.configure({ value: kind.layers[0].number, options: kind.layers.map((one) => [one.number, one.number]) });
    controls.head.configure({
      value: start.head || String(layer.heads[0]),
      options: [...layer.heads.map((one) => [String(one), one]), ...(layer.heads.length > 1 ? [[MEAN, "mean of heads"]] : [])],
    });
    controls.layer.element.hidden = controls.head.element.hidden = view !== "head";
    for (const id of ["top", "overlay", "from"]) if (controls[id]) controls[id].element.hidden = view === "model" || view === "summary";
    const signed = view === "rollout" ? kind.rollout.signed : view === "model" ? kind.layers.every((one) => one.signed) : layer.signed;
    for (const id of ["scale", "hide", "merge"]) if (controls[id]) controls[id].element.hidden = view === "summary";
    controls.colours.element.hidden = signed && view !== "summary";
    if (signed || (data.image && view === "model")) controls.scale.element.hidden = true; // these have one of their own
    return { kind, layer, head };
  }

  // [ and ] go through the heads, { and } through the layers.
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "radio") return;
    const { kind, layer, head, view } = settings();
    if (view !== "head" || !"[]{}".includes(event.key)) return;
    const step = "]}".includes(event.key) ? 1 : -1;
    const next = (list, value) => list[(list.indexOf(value) + step + list.length) % list.length];
    if ("[]".includes(event.key)) state.set({ head: next(layer.heads, head === MEAN ? layer.heads[0] : head) });
    else state.set({ layer: next(kind.layers.map((one) => one.number), layer.number) });
    event.preventDefault();
  });

  // --- a matrix and the links of its cursor ---------------------------------------------------------------------------

  const REASONS = { sliding_window: "outside its window", bigbird: "outside its pattern" };
  function hatched(kind, pattern) {
    if (REASONS[pattern]) return `${REASONS[pattern]}${kind.kind === "decoder" ? ", or a later token" : ""}`;
    return "a later token, which cannot be seen";
  }

  // describes: text of a cell. Returns {plot, update(found)}.
  function matrixPanel(place, found, now, name, maskLabel) {
    const canvas = element("canvas", {});
    const svg = element("svg", { class: "links" });
    const list = element("p", { class: "caption", dir: "auto" });
    const panel = element("div", {}, canvas);
    const side = element("div", {}, element("h3", {}, "Links of the token at the cursor"), svg, list);
    place.append(element("div", { class: found.cols > 60 ? "attention wide" : "attention" }, panel, side));
    const labels = (axis) => (n) => axis.labels[n];
    const describe = (i, j) => {
      const cell = `${found.queries.labels[i]} (${i}) → ${found.keys.labels[j]} (${j}): `;
      return cell + (found.mask && !found.mask[i * found.cols + j] ? maskLabel : attention.fixed(found.values[i * found.cols + j], 4));
    };
    const cursor = () => [Math.min(state.get("query", 0), found.rows - 1), Math.min(state.get("key", 0), found.cols - 1)];
    const plot = tformer.heatmap(canvas, {
      rows: found.rows, cols: found.cols, ...attention.scaled(found, now),
      mask: found.mask ? (i, j) => !found.mask[i * found.cols + j] : undefined, maskLabel,
      rowLabel: labels(found.queries), colLabel: labels(found.keys), rowTitle: `${found.queries.name} token (looks)`,
      colTitle: `${found.keys.name} token (is looked at)`, describe, label: name, cellSize: 40,
      onCursor: (i, j) => state.set({ query: i, key: j }),
    });
    const show = () => {
      const [row, key] = cursor();
      attention.links(svg, found, row, settings().top);
      const written = found.queries.written[row] ? " It was written by the model." : "";
      const after = found.queries.written[row + 1] ? " Here the model writes" : " The next token is";
      const next = found.queries.name === "decoder" && row + 1 < found.rows ? `${after} ${found.queries.labels[row + 1]}.` : "";
      list.textContent = found.queries.labels[row] + ` is token ${row + 1} of ${found.rows}.` + written + next;
      return [row, key];
    };
    if (found.rows && found.cols) {
      plot.cursor(...cursor());
      show();
    } else place.replaceChildren(element("p", {}, "Nothing is left to show: every token is special."));
    follow = (keys) => {
      const [row, key] = show();
      if (!keys.has("key") && keys.has("query")) plot.cursor(row, key); // from elsewhere than the matrix
    };
    return plot;
  }

  function weightsTable(place, found, count) {
    const details = element("details", {}, element("summary", {}, "The same as a table"));
    const inner = element("div", {});
    details.append(inner);
    details.addEventListener("toggle", () => {
      if (!details.open || inner.childElementCount) return;
      tformer.table(inner, {
        caption: "The keys with the largest weights of each token",
        columns: [{ label: "place", number: true }, "token", ...Array.from({ length: count }, (_, n) => [`key ${n + 1}`, { label: `weight ${n + 1}`, number: true }]).flat()],
        rows: found.queries.labels.map((text, row) => {
          const top = attention.strongest(found, row, count);
          return [row, text, ...Array.from({ length: count }, (_, n) => (top[n] ? [found.keys.labels[top[n][0]], top[n][1]] : [null, null])).flat()];
        }),
      });
    });
    place.append(details);
  }

  function csvOf(found) {
    return () => [["query", "query_token", "key", "key_token", "weight"], ...Array.from(found.values, (value, n) => {
      const [i, j] = [Math.floor(n / found.cols), n % found.cols];
      return [i, found.queries.texts[i], j, found.keys.texts[j], found.mask && !found.mask[n] ? "" : value.toPrecision(4)];
    })];
  }

  function imagePanel(place, found, now) {
    const canvas = element("canvas", { role: "img", "aria-label": "attention over the patches of the image" });
    const caption = element("p", { class: "caption" }), bar = element("div", {});
    place.append(element("div", { class: "overlay" }, canvas), bar, caption);
    const { rows, columns, offset } = data.image;
    const query = () => {
      const from = controls.from.get();
      return from === "cls" && !now.changes.hide ? 0 : from === "cursor" ? Math.min(state.get("query", 0), found.rows - 1) : -1;
    };
    const draw = async () => {
      const most = await attention.overlay(canvas, attention.patchMatrix(found, query()), controls.overlay.get(), now.colours);
      bar.replaceChildren(attention.bar({ min: 0, max: most, colours: now.colours, barLabel: "weight of a patch" }));
      const from = query();
      caption.textContent = `From ${from < 0 ? "all patches, on average" : found.queries.labels[from]}. The brightest patch has ${most.toFixed(4)}.`;
    };
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      const [i, j] = [Math.floor(((event.clientY - box.top) / box.height) * rows), Math.floor(((event.clientX - box.left) / box.width) * columns)];
      state.set({ from: "cursor", query: i * columns + j + (now.changes.hide ? 0 : offset) });
    });
    state.onChange((keys) => {
      if (canvas.isConnected && ["overlay", "from", "query"].some((key) => keys.has(key))) draw();
    });
    return draw();
  }

  // --- the views ---------------------------------------------------------------------------------------------------------

  const heading = (text, caption) => [element("h2", {}, text), ...(caption ? [element("p", { class: "caption" }, caption)] : [])];

  async function headView(now, place) {
    const { kind, layer, head } = now;
    const found = await attention.matrix(now);
    const name = `${kind.name}, layer ${layer.number}, ${head === MEAN ? "mean of heads" : `head ${head}`}`;
    const hint = "Keys: arrows move the cursor, [ and ] change the head, { and } the layer.";
    place.append(...heading(name[0].toUpperCase() + name.slice(1), `${layer.pattern === "full" ? "" : `Kind: ${layer.pattern}. `}${hint}`));
    if (data.image) await imagePanel(place, found, now);
    const plot = matrixPanel(place, found, now, name, hatched(kind, layer.pattern));
    place.append(tformer.saveButtons(`attention-${kind.kind}-${layer.number}-${head}`, () => plot, csvOf(found)));
    weightsTable(place, found, now.top);
  }

  async function rolloutView(now, place) {
    const found = await attention.rollout(now);
    place.append(...heading(`Rollout of the ${now.kind.name}`, now.kind.rollout.notes.join(". ") + "."));
    if (data.image) await imagePanel(place, found, now);
    const plot = matrixPanel(place, found, now, `rollout of the ${now.kind.name}`, hatched(now.kind, "full"));
    place.append(tformer.saveButtons(`rollout-${now.kind.kind}`, () => plot, csvOf(found)));
    weightsTable(place, found, now.top);
  }

  async function modelView(now, place, isLate) {
    const { kind } = now;
    const most = Math.max(...kind.layers.map((layer) => layer.heads.length));
    const names = [...new Set(kind.layers.flatMap((layer) => layer.heads))].sort((a, b) => a - b);
    place.append(...heading(`All heads of the ${kind.name}`, data.image ? "Each picture: weights of the class token (else the mean over all patches) on the patches. Enter or a click opens the head."
      : "Each picture is one head: rows are queries, columns are keys. Enter or a click opens it; arrows move between them."));
    const grid = element("div", { class: "grid", style: `grid-template-columns: max-content repeat(${most}, minmax(1.9rem, ${most > 6 ? "6rem" : "10rem"}))` });
    place.append(element("div", { class: "heads", role: "group", "aria-label": "heads" }, grid));
    const veiled = kind.layers.find((one) => one.mask !== null);
    const scale = data.image ? { min: 0, max: 1, colours: now.colours, barLabel: "share of the picture's largest" }
      : attention.scaled({ rows: 0, cols: 0, values: new Float32Array(0), signed: kind.layers.some((one) => one.signed) }, now);
    place.append(attention.bar(scale, veiled && !data.image && hatched(kind, veiled.pattern)));
    grid.append(element("span", {}, "layer"), ...names.map((head) => element("span", {}, `head ${head}`)));
    const canvases = kind.layers.map((layer) => {
      grid.append(element("span", {}, String(layer.number)));
      return names.map((head) => {
        if (!layer.heads.includes(head)) return grid.append(element("span", {}, "–")), null;
        const canvas = element("canvas", { width: 1, height: 1 });
        grid.append(element("button", {
          type: "button", "data-head": `${layer.number}.${head}`, "aria-label": `Layer ${layer.number}, head ${head}`,
          onclick: () => state.set({ view: "head", layer: layer.number, head }),
        }, canvas));
        return canvas;
      });
    });
    grid.addEventListener("keydown", (event) => {
      const all = [...grid.querySelectorAll("button")];
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -most, ArrowDown: most }[event.key];
      const next = all[all.indexOf(document.activeElement) + step];
      if (!step || !next) return;
      event.preventDefault();
      next.focus();
    });
    for (const [row, layer] of kind.layers.entries()) {
      for (const [column, head] of names.entries()) {
        const canvas = canvases[row][column];
        if (canvas === null || canvas === undefined) continue;
        let found = await attention.matrix({ ...now, layer, head });
        if (data.image) found = attention.patchMatrix(found, data.image.offset && !now.changes.hide ? 0 : -1);
        canvas.style.setProperty("--aspect", Math.min(Math.max(found.cols / found.rows, 0.5), 2));
        attention.thumbnail(canvas, found, data.image ? { ...now, scale: "global" } : now);
      }
      await new Promise((resolve) => setTimeout(resolve)); // the page stays alive between layers
      if (isLate()) return;
    }
  }

  async function summaryView(now, place) {
    const { kind } = now;
    const { columns, rows, divergenceQueries } = kind.summary;
    place.append(...heading(`Summary of the ${kind.name}`, "Means over the query tokens. Special tokens and pieces of words count as they are."));
    const measures = columns.slice(2).filter(([name], n) => typeof rows[0][n + 2] === "number" && name !== "nearest_divergence");
    const measure = measures.find(([name]) => name === state.get("measure", "entropy")) || measures[0];
    const choose = element("select", { id: "measure", onchange: (event) => state.set({ measure: event.target.value }) },
      ...measures.map(([name, label]) => element("option", { value: name, selected: name === measure[0] }, label)));
    const maps = element("div", { class: "panels" });
    place.append(element("div", { class: "row" }, element("label", { for: "measure" }, "Measure"), choose), maps);
    const index = columns.findIndex(([name]) => name === measure[0]);
    const heads = [...new Set(rows.map((row) => row[1]))];
    const cell = new Map(rows.map((row) => [`${row[0]}.${row[1]}`, row[index]]));
    const first = element("canvas", {}), second = element("canvas", {});
    const [left, right] = [element("div", {}, element("h3", {}, measure[1]), first), element("div", {})];
    maps.append(left, right);
    const perHead = tformer.heatmap(first, {
      rows: kind.layers.length, cols: heads.length, value: (i, j) => cell.get(`${kind.layers[i].number}.${heads[j]}`) ?? NaN,
      maskLabel: "no such head", rowLabel: (i) => String(kind.layers[i].number), colLabel: (j) => String(heads[j]),
      rowTitle: "layer", colTitle: "head", barLabel: measure[1], colours: now.colours, min: 0, label: `${measure[1]} of each head`,
    });
    left.append(tformer.saveButtons(`attention-${kind.kind}-${measure[0]}`, () => perHead, () => [columns.map(([name]) => name), ...rows]));
    if (rows.length > 1) {
      const values = new Float32Array((await tformer.blob(`${kind.kind}-divergence`)).slice().buffer);
      right.append(element("h3", {}, "Divergence between heads (Jensen–Shannon, bits)"), second);
      const name = (n) => `L${rows[n][0]}${kind.kind === "cross" ? "C" : "H"}${rows[n][1]}`;
      tformer.heatmap(second, {
        rows: rows.length, cols: rows.length, values, min: 0, colours: now.colours, rowLabel: name, colLabel: name,
        rowTitle: "head", colTitle: "head", barLabel: "bits", label: "divergence between heads", cellSize: 24,
      });
      if (divergenceQueries[0] < divergenceQueries[1]) {
        right.append(element("p", { class: "caption" }, `From ${divergenceQueries[0]} of ${divergenceQueries[1]} tokens, evenly spaced.`));
      }
    }
    const table = element("div", {});
    place.append(element("h3", {}, "Every head"), table, element("div", { class: "row" },
      tformer.button("CSV", () => tformer.download(`attention-${kind.kind}-summary.csv`, "text/csv", tformer.csv([columns.map(([name]) => name), ...rows]))),
      tformer.button("JSON", () => tformer.download(`attention-${kind.kind}-summary.json`, "application/json",
        JSON.stringify(rows.map((row) => Object.fromEntries(columns.map(([name], n) => [name, row[n]]))))))));
    const told = columns.map((_, n) => n).filter((n) => rows.some((row) => row[n] !== null));
    tformer.table(table, {
      caption: `Heads of the ${kind.name}`, rows: rows.map((row) => told.map((n) => row[n])),
      columns: told.map((n) => (columns[n][0] === "nearest" ? columns[n][1] : { label: columns[n][1], number: true })),
    });
  }

  // --- drawing -----------------------------------------------------------------------------------------------------------

  const VIEWS = { head: headView, model: modelView, rollout: rolloutView, summary: summaryView };
  async function draw() {
    const mine = ++turn;
    const now = { ...settings(), ...choices() };
    const place = element("div", {});
    const focus = document.activeElement && host.contains(document.activeElement) && document.activeElement.tagName === "CANVAS";
    follow = () => {};
    const height = host.offsetHeight;
    host.style.minHeight = `${height}px`; // the page does not jump while it is redrawn
    const said = [now.changes.hide ? "Special tokens are hidden: each row is divided by the sum of the rest." : "",
      now.changes.merge ? "Tokens of one word are merged: sums over keys, means over queries." : ""].filter(Boolean);
    document.getElementById("notes").replaceChildren(...[...data.notes, ...said].map((note) => element("p", { class: "notes", dir: "auto" }, note)));
    host.replaceChildren(place);
    try {
      await VIEWS[now.view](now, place, () => mine !== turn);
    } catch (error) {
      if (mine === turn) place.append(element("p", { class: "error", role: "alert" }, `This cannot be shown: ${error.message}`));
      throw error;
    }
    if (mine !== turn) return;
    host.style.minHeight = "";
    if (focus) host.querySelector("canvas[tabindex]")?.focus();
    ready = `${now.kind.kind} ${now.view} ${now.layer.number} ${now.head}`;
    document.documentElement.dataset.ready = ready;
  }

  const CURSOR = new Set(["query", "key", "theme", "overlay", "from"]);
  state.onChange((keys) => {
    if ([...keys].some((key) => !CURSOR.has(key))) draw();
    else if (keys.has("query") || keys.has("key")) follow(keys);
  });
  draw();
})();
