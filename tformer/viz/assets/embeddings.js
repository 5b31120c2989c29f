// Vectors as points of two principal components: pan, zoom, search, names; and the nearest vectors of the chosen one.
"use strict";
(async () => {
  const { data, element, state, number } = tformer;
  const { names, count, scales, explained } = data;
  const byId = (id) => document.getElementById(id);
  const unpacked = async (name) => (await tformer.blob(name)).slice().buffer;
  const ids = new Int32Array(await unpacked("ids")), packed = new Int16Array(await unpacked("coordinates"));
  const lengths = new Float32Array(await unpacked("lengths"));
  const neighbours = new Int32Array(await unpacked("neighbours")), cosines = new Int16Array(await unpacked("cosines"));
  const LARGEST = 32767, FEW = 60, MOST_FOUND = 500, REACH = 14, STEP = 60, HEIGHT = 560;
  const LIGHT = { text: "#1b1f23", page: "#ffffff", cursor: "#d60093" };
  const word = (n) => tformer.token(names[n]);
  const lowered = names.map((name) => name.toLowerCase());
  const coordinate = (n, c) => (packed[n * scales.length + c] / LARGEST) * scales[c];
  const share = (c) => (100 * explained[c]).toFixed(1) + " %";
  // The neighbours of a point, nearest first: [number, cosine]; null where the page has none.
  function nearest(n) {
    const row = data.rows === null ? n : data.rows.indexOf(n);
    if (row < 0 || row * data.nearest >= neighbours.length) return null;
    return Array.from({ length: data.nearest }, (_, k) => row * data.nearest + k).map((at) => [neighbours[at], cosines[at] / LARGEST]);
  }

  // --- what is shown ------------------------------------------------------------------------------------------------

  const axes = tformer.control("select", { id: "axes", label: "Components", value: "1,2", options: [["1,2", "1 and 2"], ["1,3", "1 and 3"], ["2,3", "2 and 3"]] });
  const search = tformer.control("text", { id: "search", label: "Search", value: "" });
  search.element.querySelector("input").addEventListener("input", (event) => search.set(event.target.value));
  const bounded = (zoom) => Math.min(Math.max(zoom, 0.5), 5000);
  const zoomBy = (factor, x = 0, y = 0) => { // the place (x, y), in pixels from the middle, stays where it is
    const view = viewed(), zoom = bounded(view.zoom * factor), change = (1 / view.zoom - 1 / zoom) / fit;
    state.set({ zoom: zoom.toPrecision(6), x: (view.x + x * change).toPrecision(9), y: (view.y - y * change).toPrecision(9) });
  };
  const moveBy = (x, y) => { // pixels
    const view = viewed();
    state.set({ x: (view.x - x / (fit * view.zoom)).toPrecision(9), y: (view.y + y / (fit * view.zoom)).toPrecision(9) });
  };
  const reset = () => state.set({ zoom: null, x: null, y: null });
  const canvas = element("canvas", { tabindex: 0, role: "application", "aria-roledescription": "scatter plot",
    style: `display:block;width:100%;height:${HEIGHT}px;touch-action:none;cursor:crosshair;border:1px solid var(--line)` });
  const readout = element("p", { class: "readout", "aria-live": "polite", dir: "auto" }), found = element("p", { class: "caption" });
  const list = element("div", {}), axisText = element("p", { class: "caption" });

  let width = 720, fit = 1, middle = [0, 0], plane = new Float64Array(2 * count), hovered = -1, matches = [], image = null;
  const viewed = () => ({ zoom: bounded(state.get("zoom", 1)), x: state.get("x", middle[0]), y: state.get("y", middle[1]) });
  const chosen = () => { // a row of the state, else the first asked for
    const at = state.get("row", "") === "" ? -1 : ids.indexOf(state.get("row", 0));
    return at >= 0 ? at : data.asked.length ? data.asked[0] : 0;
  };
  function lay() { // the plane of the two components, and the scale at which all of it is seen
    const chosenAxes = axes.get().split(",").map((c) => Number(c) - 1);
    const ends = chosenAxes.map((c, side) => {
      let [low, high] = [Infinity, -Infinity];
      for (let n = 0; n < count; n++) {
        const value = coordinate(n, c);
        plane[2 * n + side] = value;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
      return [low, high];
    });
    middle = ends.map(([low, high]) => (low + high) / 2);
    fit = 0.9 * Math.min(...ends.map(([low, high], side) => (side ? HEIGHT : width) / (high - low || 1)));
    axisText.textContent = `Across: component ${chosenAxes[0] + 1} (${share(chosenAxes[0])} of the variance), up: component ${chosenAxes[1] + 1} (${share(chosenAxes[1])}). ` +
      `Drag or Shift and arrows to move, the wheel or + and − to zoom, 0 for all, arrows to go from point to point.`;
  }
  const onScreen = (n, view, w = width) => [w / 2 + (plane[2 * n] - view.x) * fit * view.zoom, HEIGHT / 2 - (plane[2 * n + 1] - view.y) * fit * view.zoom];
  function find() {
    const text = search.get().toLowerCase();
    matches = [];
    for (let n = 0; n < count && text !== ""; n++) {
      if (lowered[n].includes(text)) matches.push(n);
    }
    found.textContent = text === "" ? "" : `${number(matches.length)} of ${number(count)} have “${text}”` + (matches.length ? ". Enter chooses the first." : ".");
  }

  // --- drawing: points as pixels, rings and names above them ----------------------------------------------------------

  function paint(target, w, ratio, ink) {
    const [across, down] = [Math.round(w * ratio), Math.round(HEIGHT * ratio)];
    if (target.width !== across || target.height !== down) [target.width, target.height] = [across, down];
    const context = target.getContext("2d"), view = viewed(), inView = [];
    if (image === null || image.width !== across || image.height !== down) image = context.createImageData(across, down);
    const pixels = new Uint32Array(image.data.buffer), half = Math.round(ratio * (count > 5000 ? 1 : count > 200 ? 2 : 3));
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(tformer.palette[0].slice(at, at + 2), 16));
    const colour = ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    const disc = [];
    for (let y = -half; y <= half; y++) for (let x = -half; x <= half; x++) if (x * x + y * y <= half * half + half) disc.push(y * across + x);
    pixels.fill(0);
    const scale = fit * view.zoom * ratio, left = across / 2 - view.x * scale, top = down / 2 + view.y * scale;
    for (let n = 0; n < count; n++) {
      const x = Math.round(left + plane[2 * n] * scale), y = Math.round(top - plane[2 * n + 1] * scale);
      if (x < half || y < half || x >= across - half || y >= down - half) continue;
      const at = y * across + x;
      for (let k = 0; k < disc.length; k++) pixels[at + disc[k]] = colour;
      if (inView.length <= FEW) inView.push(n);
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.putImageData(image, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    const ring = (n, radius) => {
      const [x, y] = onScreen(n, view, w);
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.stroke();
    };
    context.lineWidth = 1.5;
    context.strokeStyle = ink.cursor;
    const at = chosen(), near = (nearest(at) || []).map(([n]) => n).filter((n) => n < count);
    for (const n of matches.slice(0, MOST_FOUND)) ring(n, 4);
    if (at < count) ring(at, 7);
    context.strokeStyle = ink.text;
    for (const n of near) ring(n, 5);
    const named = new Set([at, hovered, ...near, ...matches.slice(0, FEW), ...(inView.length <= FEW ? inView : [])]);
    context.lineWidth = 3;
    context.strokeStyle = ink.page;
    context.fillStyle = ink.text;
    for (const n of named) {
      if (n < 0 || n >= count) continue;
      const [x, y] = onScreen(n, view, w), text = word(n).slice(0, 40);
      context.strokeText(text, x + 8, y - 5);
      context.fillText(text, x + 8, y - 5);
    }
  }
  let waiting = false;
  function draw() { // once a frame
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      paint(canvas, width, window.devicePixelRatio || 1, Object.fromEntries(Object.keys(LIGHT).map((name) => [name, tformer.cssColour(name)])));
    });
  }
  const described = (n) => `${word(n)} · id ${ids[n]}` + (n < count ? ` · ${scales.map((_, c) => `component ${c + 1} ${number(coordinate(n, c))}`).join(", ")} · length ${number(lengths[n])}` : "");
  function show() {
    const at = chosen(), near = nearest(at);
    readout.textContent = described(at);
    canvas.setAttribute("aria-label", `${count} vectors by their principal components; the chosen one: ${described(at)}`);
    byId("nearest").replaceChildren(element("h2", { dir: "auto" }, `Nearest to ${word(at)}, by ${data.measure}`), list);
    if (near === null) list.replaceChildren(element("p", {}, "Computing the neighbours of every vector takes long: --token names those to compute them for."));
    else tformer.table(list, { caption: "Nearest vectors", columns: ["vector", { label: "id", number: true, format: String }, { label: "cosine", number: true }],
      rows: near.map(([n, cosine]) => [word(n), ids[n], Number(cosine.toFixed(4))]) });
  }

  // --- pointer and keys -----------------------------------------------------------------------------------------------

  const choose = (n) => {
    state.set({ row: ids[n] });
    const [x, y] = onScreen(n, viewed());
    if (n < count && (x < 0 || y < 0 || x > width || y > HEIGHT)) state.set({ x: plane[2 * n].toPrecision(9), y: plane[2 * n + 1].toPrecision(9) });
  };
  // The point with the least value of far(x, y), its place on the screen, below `least`; else `best`.
  function closest(far, least, best) {
    const view = viewed();
    for (let n = 0; n < count; n++) {
      const value = far(...onScreen(n, view));
      if (value < least) [best, least] = [n, value];
    }
    return best;
  }
  const pointAt = (x, y) => closest((u, v) => (u - x) ** 2 + (v - y) ** 2, REACH * REACH, -1);
  function towards(dx, dy) { // from the chosen point
    const [x, y] = onScreen(Math.min(chosen(), count - 1), viewed());
    return closest((u, v) => {
      const along = (u - x) * dx + (v - y) * dy, beside = Math.abs((u - x) * dy - (v - y) * dx);
      return along > 0.5 && 2 * along >= beside ? along + 2 * beside : Infinity;
    }, Infinity, chosen());
  }
  const placeOf = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { from: placeOf(event), at: placeOf(event) }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = placeOf(event);
    if (drag !== null) { moveBy(x - drag.at[0], y - drag.at[1]); drag.at = [x, y]; return; }
    const n = pointAt(x, y);
    if (n === hovered) return;
    hovered = n;
    readout.textContent = described(n < 0 ? chosen() : n);
    draw();
  });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = placeOf(event), n = pointAt(x, y);
    if (drag !== null && Math.hypot(x - drag.from[0], y - drag.from[1]) < 4 && n >= 0) choose(n);
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [x, y] = placeOf(event);
    zoomBy(2 ** (-event.deltaY / 240), x - width / 2, y - HEIGHT / 2);
  }, { passive: false });
  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = ARROWS[event.key], by = (step) => choose((Math.min(chosen(), count) + step + count) % count);
    const moves = { "+": () => zoomBy(1.5), "=": () => zoomBy(1.5), "-": () => zoomBy(1 / 1.5), 0: reset, PageDown: () => by(1), PageUp: () => by(-1) };
    if (arrow) { if (event.shiftKey) moveBy(-STEP * arrow[0], -STEP * arrow[1]); else choose(towards(...arrow)); } else if (moves[event.key]) moves[event.key]();
    else return;
    event.preventDefault();
  });
  search.element.addEventListener("keydown", (event) => { if (event.key === "Enter" && matches.length) choose(matches[0]); });

  // --- the page -------------------------------------------------------------------------------------------------------

  function svg() { // the points as a picture: thousands of circles would be megabytes
    const copy = element("canvas", {});
    paint(copy, width, 2, LIGHT);
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${HEIGHT + 24}" viewBox="0 0 ${width} ${HEIGHT + 24}" font-family="system-ui, sans-serif" font-size="12" fill="#333">` +
      `<rect width="100%" height="100%" fill="#fff"/><image width="${width}" height="${HEIGHT}" href="${copy.toDataURL()}"/>` +
      `<text x="${width / 2}" y="${HEIGHT + 16}" text-anchor="middle">${tformer.escape(`components ${axes.get().replace(",", " and ")}`)}</text></svg>`;
  }
  const columns = ["vector", "id", ...scales.map((_, c) => `component ${c + 1}`), "length"], all = Array.from({ length: count }, (_, n) => n);
  const pointRows = (which, name) => which.map((n) => [name(n), ids[n], ...scales.map((_, c) => coordinate(n, c)), lengths[n]]);
  const table = element("div", {}), details = element("details", {}, element("summary", {}, "The points as a table; with a search those found"), table);
  const fill = () => details.open && tformer.table(table, { caption: "Points", columns: columns.map((label, at) => (at ? { label, number: true } : label)),
    rows: pointRows(search.get() === "" ? all : matches, word) });
  details.addEventListener("toggle", fill);
  const zoomRow = element("div", { class: "row", role: "group", "aria-label": "Zoom" }, tformer.button("+", () => zoomBy(1.5)), tformer.button("−", () => zoomBy(1 / 1.5)), tformer.button("All", reset));
  byId("points").append(found, canvas, readout, axisText, zoomRow, tformer.saveButtons("embeddings", () => ({ svg }), () => [columns, ...pointRows(all, (n) => names[n])]), details);
  const resize = () => { width = Math.max(Math.round(canvas.getBoundingClientRect().width), 200); lay(); draw(); };
  new ResizeObserver(resize).observe(canvas);
  state.onChange((keys) => {
    if (keys.has("axes")) { lay(); reset(); }
    if (keys.has("search")) { find(); fill(); }
    if (keys.has("row")) show();
    draw();
  });
  find();
  resize();
  show();
  document.documentElement.dataset.ready = "true";
})();
