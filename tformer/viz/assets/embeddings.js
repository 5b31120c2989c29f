// Vectors as points of two principal components: pan, zoom, search, names; and the nearest vectors of the chosen one.
"use strict";
(async () => {
  const { data, element, state, number } = tformer;
  const { names, explained, shown, rows } = data; // a vector is named by its row in the table
  const [coordinates, cosines] = await Promise.all(["coordinates", "cosines"].map(async (name) => new Float32Array((await tformer.blob(name)).slice().buffer)));
  const neighbours = new Int32Array((await tformer.blob("neighbours")).slice().buffer);
  const FEW = 60, REACH = 14, HEIGHT = 560, LIGHT = { text: "#1b1f23", page: "#ffffff", cursor: "#d60093" };
  const C = explained.length, place = new Map(shown.map((row, n) => [row, n]));
  const word = (row) => tformer.token(names[row]), lowered = names.map((name) => name.toLowerCase());
  const valuesOf = (row) => explained.map((_, c) => coordinates[place.get(row) * C + c]);
  const described = (row) => `${word(row)} · id ${row}` + (place.has(row) ? " · components " + valuesOf(row).map(number).join(", ") : "");
  function nearest(row) { // [row, cosine], nearest first
    const first = rows.indexOf(row) * data.nearest;
    return first < 0 ? [] : Array.from(neighbours.subarray(first, first + data.nearest), (near, k) => [near, cosines[first + k]]);
  }

  // --- what is shown ------------------------------------------------------------------------------------------------

  const axes = tformer.control("select", { id: "axes", label: "Components", value: "1,2", options: [["1,2", "1 and 2"], ["1,3", "1 and 3"], ["2,3", "2 and 3"]] });
  const search = tformer.control("text", { id: "search", label: "Search", value: "" });
  const canvas = element("canvas", { tabindex: 0, role: "application", "aria-roledescription": "scatter plot",
    style: `display:block;width:100%;height:${HEIGHT}px;touch-action:none;cursor:crosshair;border:1px solid var(--line)` });
  const readout = element("p", { class: "readout", "aria-live": "polite", dir: "auto" });
  const found = element("p", { class: "caption" }), axisText = element("p", { class: "caption" }), list = element("div");
  let width = 720, fit = 1, middle = [0, 0], pair = [0, 1], hovered = null, matches = [], image = new ImageData(1, 1);

  const bounded = (zoom) => Math.min(Math.max(zoom, 0.5), 5000);
  const viewed = () => ({ zoom: bounded(state.get("zoom", 1)), x: state.get("x", middle[0]), y: state.get("y", middle[1]) });
  const look = (x, y, zoom) => state.set({ x: x.toPrecision(9), y: y.toPrecision(9), zoom: zoom.toPrecision(6) });
  const all = () => state.set({ zoom: null, x: null, y: null });
  function onScreen(n, { x, y, zoom }) { // of the n-th of the vectors that are shown
    const scale = fit * zoom;
    return [width / 2 + (coordinates[n * C + pair[0]] - x) * scale, HEIGHT / 2 - (coordinates[n * C + pair[1]] - y) * scale];
  }
  function zoomBy(factor, x = 0, y = 0) { // the place (x, y), in pixels from the middle, stays where it is
    const view = viewed(), zoom = bounded(view.zoom * factor), change = (1 / view.zoom - 1 / zoom) / fit;
    look(view.x + x * change, view.y - y * change, zoom);
  }
  function chosen() { // a row of the state, else the first asked for
    const row = state.get("row", -1);
    return row in names ? row : data.asked.length ? data.asked[0] : shown[0];
  }
  function choose(n) {
    const view = viewed(), [x, y] = onScreen(n, view);
    if (x < 0 || y < 0 || x > width || y > HEIGHT) look(...pair.map((c) => coordinates[n * C + c]), view.zoom);
    state.set({ row: shown[n] });
  }
  function lay() { // the middle of the points, and the scale at which all are seen
    pair = axes.get().split(",").map((c) => Number(c) - 1);
    const ends = pair.map((c) => shown.reduce(([low, high], _, n) => [Math.min(low, coordinates[n * C + c]), Math.max(high, coordinates[n * C + c])], [Infinity, -Infinity]));
    middle = ends.map(([low, high]) => (low + high) / 2);
    fit = 0.9 * Math.min(...ends.map(([low, high], side) => [width, HEIGHT][side] / (high - low || 1)));
    axisText.textContent = pair.map((c, side) => `${["Across", "Up"][side]}: component ${c + 1}, ${(100 * explained[c]).toFixed(1)} % of the variance. `).join("") +
      "Drag to move, the wheel or + and − to zoom, 0 for all, arrows to go from point to point.";
  }
  function find() {
    const text = search.get().toLowerCase();
    matches = text === "" ? [] : [...shown.keys()].filter((n) => lowered[shown[n]].includes(text));
    found.textContent = text && `${number(matches.length)} of ${number(shown.length)} have “${text}”` + (matches.length ? ". Enter chooses the first." : ".");
  }
  function show() {
    const row = chosen(), near = nearest(row);
    readout.textContent = described(row);
    canvas.setAttribute("aria-label", `${shown.length} vectors by their principal components; the chosen one: ${described(row)}`);
    document.getElementById("nearest").replaceChildren(element("h2", { dir: "auto" }, `Nearest to ${word(row)}`), list);
    if (!near.length) list.replaceChildren("The page has the neighbours of what --token named: those of all take long to compute.");
    else tformer.table(list, { caption: "Nearest vectors", columns: ["vector", { label: "id", number: true, format: String }, { label: "cosine", number: true }],
      rows: near.map(([other, cosine]) => [word(other), other, Number(cosine.toFixed(4))]) });
  }

  // --- drawing: pixels, of which 50,000 are faster than shapes; rings and names above them ------------------------------

  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(tformer.palette[0].slice(at, at + 2), 16));
  const size = shown.length > 5000 ? 1.5 : shown.length > 200 ? 4 : 6, opacity = shown.length > 5000 ? 110 : 255;
  function paint(target, ratio, ink) {
    const [w, h] = [width, HEIGHT].map((length) => Math.round(length * ratio)), view = viewed(), inView = [];
    if (target.width !== w || target.height !== h) [target.width, target.height] = [w, h];
    if (image.width !== w || image.height !== h) image = new ImageData(w, h);
    const bytes = image.data;
    new Uint32Array(bytes.buffer).fill((blue << 16) | (green << 8) | red); // with opacity 0
    const scale = fit * view.zoom * ratio, side = Math.round(size * ratio), left = (w - side) / 2 - view.x * scale, top = (h - side) / 2 + view.y * scale;
    for (let n = 0; n < shown.length; n++) {
      const x = Math.round(left + coordinates[n * C + pair[0]] * scale), y = Math.round(top - coordinates[n * C + pair[1]] * scale);
      if (x < 0 || y < 0 || x > w - side || y > h - side) continue;
      for (let v = y; v < y + side; v++) for (let u = x; u < x + side; u++) bytes[4 * (v * w + u) + 3] += opacity; // 255 at most
      if (inView.length <= FEW) inView.push(n);
    }
    const context = target.getContext("2d");
    context.putImageData(image, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const at = place.get(chosen()), near = nearest(chosen()).map(([row]) => place.get(row));
    context.lineWidth = 1.5;
    for (const [numbers, radius, colour] of [[matches.slice(0, 10 * FEW), 4, ink.cursor], [near, 5, ink.text], [[at], 7, ink.cursor]]) {
      for (const n of numbers) {
        context.strokeStyle = colour;
        context.beginPath();
        context.arc(...onScreen(n, view), radius, 0, 2 * Math.PI);
        context.stroke();
      }
    }
    Object.assign(context, { font: "12px system-ui, sans-serif", lineWidth: 3, strokeStyle: ink.page, fillStyle: ink.text });
    for (const n of new Set([...(inView.length <= FEW ? inView : []), ...matches.slice(0, FEW), ...near.reverse(), at, hovered])) {
      if (!(n in shown)) continue;
      const [x, y] = onScreen(n, view), text = word(shown[n]).slice(0, 40);
      context.strokeText(text, x + 8, y - 5);
      context.fillText(text, x + 8, y - 5);
    }
  }
  let waiting = 0;
  function draw() { // once a frame
    waiting = waiting || requestAnimationFrame(() => {
      waiting = 0;
      paint(canvas, window.devicePixelRatio || 1, Object.fromEntries(Object.keys(LIGHT).map((name) => [name, tformer.cssColour(name)])));
    });
  }
  function svg() { // the points as a picture: thousands of circles would be megabytes
    const copy = element("canvas");
    paint(copy, 2, LIGHT);
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${HEIGHT}"><rect width="100%" height="100%" fill="#fff"/>` +
      `<title>Components ${axes.get().replace(",", " and ")}</title><image width="${width}" height="${HEIGHT}" href="${copy.toDataURL()}"/></svg>`;
  }

  // --- pointer and keys -----------------------------------------------------------------------------------------------

  function closest(far, least = Infinity, best = null) { // the point with the least far(x, y), its place on the screen, below `least`
    const view = viewed();
    for (let n = 0; n < shown.length; n++) {
      const value = far(...onScreen(n, view));
      if (value < least) [best, least] = [n, value];
    }
    return best;
  }
  const go = (dx, dy) => () => { // to the next point from the chosen one
    const [x, y] = onScreen(place.get(chosen()) || 0, viewed());
    const next = closest((u, v) => {
      const along = (u - x) * dx + (v - y) * dy, beside = Math.abs((u - x) * dy - (v - y) * dx);
      return along > 0.5 && 2 * along >= beside ? along + 2 * beside : Infinity;
    });
    if (next !== null) choose(next);
  };
  let last = [0, 0], moved = 0; // the pointer's place, and how far it went since it was pressed
  const onPointer = (name, action) => canvas.addEventListener(name, (event) => {
    const box = canvas.getBoundingClientRect();
    action(event.clientX - box.left, event.clientY - box.top, event);
  }, { passive: false });
  function hover(x, y) {
    const before = hovered;
    hovered = closest((u, v) => (u - x) ** 2 + (v - y) ** 2, REACH * REACH);
    if (hovered === before) return;
    readout.textContent = described(hovered === null ? chosen() : shown[hovered]);
    draw();
  }
  onPointer("pointerdown", (x, y, event) => {
    hover(x, y);
    [last, moved] = [[x, y], 0];
    canvas.setPointerCapture(event.pointerId);
  });
  onPointer("pointermove", (x, y, event) => {
    if (!event.buttons) return hover(x, y);
    const view = viewed(), scale = fit * view.zoom, [dx, dy] = [x - last[0], y - last[1]];
    look(view.x - dx / scale, view.y + dy / scale, view.zoom);
    [last, moved] = [[x, y], moved + Math.hypot(dx, dy)];
  });
  onPointer("click", () => { if (moved < 4 && hovered !== null) choose(hovered); });
  onPointer("wheel", (x, y, event) => { event.preventDefault(); zoomBy(2 ** (-event.deltaY / 240), x - width / 2, y - HEIGHT / 2); });
  const closer = () => zoomBy(1.5), farther = () => zoomBy(1 / 1.5);
  const KEYS = { ArrowLeft: go(-1, 0), ArrowRight: go(1, 0), ArrowUp: go(0, -1), ArrowDown: go(0, 1), "+": closer, "=": closer, "-": farther, 0: all };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  search.element.addEventListener("input", (event) => search.set(event.target.value));
  search.element.addEventListener("keydown", (event) => { if (event.key === "Enter" && matches.length) choose(matches[0]); });

  // --- the page -------------------------------------------------------------------------------------------------------

  const points = () => [["vector", "id", ...explained.map((_, c) => `component ${c + 1}`)], ...shown.map((row) => [names[row], row, ...valuesOf(row)])];
  const buttons = element("div", { class: "row", role: "group", "aria-label": "Zoom" }, tformer.button("+", closer), tformer.button("−", farther), tformer.button("All", all));
  document.getElementById("points").append(found, canvas, readout, axisText, buttons, tformer.saveButtons("embeddings", () => ({ svg }), points));
  const resize = () => { width = Math.max(Math.round(canvas.getBoundingClientRect().width), 200); lay(); draw(); };
  new ResizeObserver(resize).observe(canvas);
  state.onChange((keys) => {
    if (keys.has("axes")) { lay(); all(); }
    if (keys.has("search")) find();
    if (keys.has("row")) show();
    draw();
  });
  find();
  resize();
  show();
  document.documentElement.dataset.ready = "true";
})();
