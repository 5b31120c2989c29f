// Heat maps: tformer.heatmap(canvas, options) → {redraw(changes), cursor(i, j), svg(), rows(), element}.
// One pixel of the canvas is one cell, enlarged without smoothing, so a colour means exactly one value. Masked cells and
// cells without a number are left transparent over a hatched ground: never a colour of the scale.
// options: rows, cols, value(i, j) or values (row by row), min, max, colours (name or 768 bytes), share(value) → 0 … 1 (else
//   linear), mask(i, j), maskLabel, rowLabel(i), colLabel(j), rowTitle, colTitle, describe(i, j), onCursor(i, j), barLabel,
//   numbers: true = values in the cells, or words(i, j), label (for screen readers), aspect (width / height), cellSize (CSS pixels a cell at most), bar: false.
"use strict";
tformer.colourStrip = (map) => {
  const strip = tformer.element("canvas", { width: 256, height: 1, "aria-hidden": "true" });
  const image = new ImageData(256, 1);
  for (let n = 0; n < 256; n++) image.data.set([...map.slice(3 * n, 3 * n + 3), 255], 4 * n);
  strip.getContext("2d").putImageData(image, 0, 0);
  return strip;
};

tformer.heatmap = (canvas, settings) => {
  const { element, escape } = tformer;
  let options = {
    colours: "viridis", rowLabel: (i) => String(i), colLabel: (j) => String(j), rowTitle: "", colTitle: "", label: "heat map",
    cellSize: 44, maskLabel: "masked", ...settings,
  };
  let at = null, range = [0, 1], masked = false;

  const cells = element("div", { class: "cells" });
  const marker = element("div", { class: "cursor", hidden: true });
  const rowTicks = element("div", { class: "ticks rows", "aria-hidden": "true" });
  const colTicks = element("div", { class: "ticks cols", "aria-hidden": "true" });
  const rowTitle = element("div", { class: "axis rows-title" });
  const colTitle = element("div", { class: "axis cols-title" });
  const bar = element("div", { class: "bar" });
  const readout = element("p", { class: "readout", "aria-live": "polite" });
  const wrap = element("div", { class: "heatmap" });
  canvas.replaceWith(wrap);
  cells.append(canvas, marker);
  wrap.append(element("div", { class: "heat" }, rowTitle, rowTicks, cells, colTicks, colTitle), bar, readout);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-roledescription", "heat map");

  const valueOf = (i, j) => (options.values ? options.values[i * options.cols + j] : options.value(i, j));
  const isMasked = (i, j) => Boolean(options.mask && options.mask(i, j)) || !Number.isFinite(valueOf(i, j));
  const table = () => (typeof options.colours === "string" ? tformer.colours(options.colours) : options.colours);
  const share = (value) => (options.share ? options.share(value) : (value - range[0]) / (range[1] - range[0] || 1));

  function paint() {
    const { rows, cols } = options;
    let low = Infinity, high = -Infinity;
    const numbers = new Float64Array(rows * cols);
    for (let i = 0, n = 0; i < rows; i++) {
      for (let j = 0; j < cols; j++, n++) {
        const value = options.mask && options.mask(i, j) ? NaN : valueOf(i, j);
        numbers[n] = Number.isFinite(value) ? value : NaN;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    range = [options.min ?? (low === Infinity ? 0 : low), options.max ?? (high === -Infinity ? 1 : high)];
    canvas.width = Math.max(cols, 1);
    canvas.height = Math.max(rows, 1);
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    const map = table();
    masked = false;
    for (let n = 0; n < numbers.length; n++) {
      if (Number.isNaN(numbers[n])) { masked = true; continue; }
      const place = 3 * Math.round(255 * Math.min(Math.max(share(numbers[n]), 0), 1));
      image.data[4 * n] = map[place];
      image.data[4 * n + 1] = map[place + 1];
      image.data[4 * n + 2] = map[place + 2];
      image.data[4 * n + 3] = 255;
    }
    context.putImageData(image, 0, 0);
  }

  // Width and height at most, in CSS pixels: a cell that holds text has room for it.
  function size() {
    const shape = options.aspect || Math.min(Math.max(options.cols / options.rows, 0.75), 3);
    const width = Math.min(options.cols * options.cellSize, 620 * shape);
    if (!options.numbers || options.aspect) return [width, width / shape];
    const most = Math.max(0, ...numbersShown().map(([, , text]) => [...text].length));
    return [Math.max(width, options.cols * (8 + 7 * most)), Math.max(width / shape, 18 * options.rows)];
  }
  const aspect = () => size()[0] / size()[1];
  const longest = (count, label) => {
    let found = "";
    for (let i = 0; i < count; i++) if (label(i).length > found.length) found = label(i);
    return found;
  };
  // Every n-th of the labels that are not empty, n being the first round number that leaves room.
  function chosen(count, label, room, needed) {
    const named = Array.from({ length: count }, (_, n) => n).filter((n) => label(n) !== "");
    const step = [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000].find((n) => (n * room) / named.length >= needed) || count;
    const counts = named.every((n) => Number.isInteger(Number(label(n)))); // then the round ones, wherever they begin
    return named.filter((n, place) => (counts ? Number(label(n)) : place) % step === 0);
  }
  function layout(width, height) {
    const longestCol = longest(options.cols, options.colLabel);
    const upright = longestCol.length > 4;
    return {
      upright, longestRow: longest(options.rows, options.rowLabel), longestCol,
      rows: chosen(options.rows, options.rowLabel, height, 15),
      cols: chosen(options.cols, options.colLabel, width, upright ? 15 : 8 + 7 * longestCol.length),
    };
  }
  // The values to write into the cells: [row, column, text, colour].
  function numbersShown() {
    if (!options.numbers) return [];
    return Array.from({ length: options.rows * options.cols }, (_, n) => [Math.floor(n / options.cols), n % options.cols])
      .filter(([i, j]) => !isMasked(i, j)).map(([i, j]) => {
        const place = 3 * Math.round(255 * Math.min(Math.max(share(valueOf(i, j)), 0), 1));
        const [red, green, blue] = table().slice(place, place + 3);
        return [i, j, options.words ? options.words(i, j) : tformer.number(valueOf(i, j)), 0.3 * red + 0.6 * green + 0.1 * blue > 127 ? "#000" : "#fff"];
      });
  }
  const percent = (i, count) => `${(100 * (i + 0.5)) / count}%`;
  function label() {
    const { width, height } = canvas.getBoundingClientRect();
    // Shown smaller than it is, a map is averaged: leaving out cells would draw patterns that are not there.
    canvas.style.imageRendering = width < options.cols || height < options.rows ? "auto" : "pixelated";
    const plan = layout(width || 600, height || 400);
    const sizer = element("div", { style: "visibility:hidden;height:0;white-space:pre" }, plan.longestRow.slice(0, 24));
    rowTicks.replaceChildren(sizer, ...plan.rows.map((i) =>
      element("span", { style: `top:${percent(i, options.rows)}`, dir: "auto" }, options.rowLabel(i).slice(0, 24))));
    cells.querySelectorAll("span").forEach((span) => span.remove());
    cells.append(...numbersShown().map(([i, j, text, color]) =>
      element("span", { "aria-hidden": "true", style: `top:${percent(i, options.rows)};left:${percent(j, options.cols)};color:${color}` }, text)));
    colTicks.classList.toggle("upright", plan.upright);
    const spans = plan.cols.map((j) =>
      element("span", { style: `left:${percent(j, options.cols)}`, dir: "auto" }, options.colLabel(j).slice(0, 24)));
    colTicks.replaceChildren(...spans);
    colTicks.style.height = `${Math.max(16, ...spans.map((span) => span.getBoundingClientRect().height)) + 8}px`;
  }

  function barParts() {
    if (options.bar === false) return [];
    const parts = [options.barLabel || "", tformer.number(range[0]), tformer.colourStrip(table()), tformer.number(range[1])];
    if (masked) parts.push(element("span", { class: "swatch" }), options.maskLabel);
    return parts.filter((part) => part !== "").map((part) => (typeof part === "string" ? element("span", {}, part) : part));
  }

  function describe(i, j) {
    if (options.describe) return options.describe(i, j);
    const value = isMasked(i, j) ? options.maskLabel : tformer.number(valueOf(i, j));
    return `${options.rowTitle || "row"} ${options.rowLabel(i)}, ${options.colTitle || "column"} ${options.colLabel(j)}: ${value}`;
  }
  function cursor(i, j, quiet = false) {
    if (!options.rows || !options.cols) return;
    at = [Math.min(Math.max(i, 0), options.rows - 1), Math.min(Math.max(j, 0), options.cols - 1)];
    marker.hidden = false;
    marker.style.cssText = `top:${(100 * at[0]) / options.rows}%;left:${(100 * at[1]) / options.cols}%;` +
      `height:${100 / options.rows}%;width:${100 / options.cols}%`;
    readout.textContent = describe(...at);
    if (!quiet && options.onCursor) options.onCursor(...at);
  }
  function follow(event) {
    const box = canvas.getBoundingClientRect();
    cursor(Math.floor(((event.clientY - box.top) / box.height) * options.rows),
      Math.floor(((event.clientX - box.left) / box.width) * options.cols));
  }
  canvas.addEventListener("pointermove", follow);
  canvas.addEventListener("pointerdown", follow);
  canvas.addEventListener("focus", () => { if (at === null) cursor(0, 0); });
  canvas.addEventListener("keydown", (event) => {
    const [i, j] = at || [0, 0];
    const far = Math.max(1, Math.round(options.rows / 10));
    const moves = {
      ArrowUp: [i - 1, j], ArrowDown: [i + 1, j], ArrowLeft: [i, j - 1], ArrowRight: [i, j + 1],
      Home: [i, 0], End: [i, options.cols - 1], PageUp: [i - far, j], PageDown: [i + far, j],
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    cursor(...moves[event.key]);
  });

  function redraw(changes = {}) {
    options = { ...options, ...changes };
    paint();
    canvas.style.aspectRatio = String(aspect());
    wrap.style.maxWidth = `${Math.max(size()[0] + 90, 260)}px`;
    canvas.setAttribute("aria-label", `${options.label}. ${options.rows} rows, ${options.cols} columns; arrow keys move the cursor.`);
    rowTitle.textContent = options.rowTitle ? `${options.rowTitle} ↓` : "";
    colTitle.textContent = options.colTitle ? `${options.colTitle} →` : "";
    bar.replaceChildren(...barParts());
    label();
    if (at !== null && at[0] < options.rows && at[1] < options.cols) cursor(...at, true);
    else { at = null; marker.hidden = true; readout.textContent = "Point at a cell, or use the arrow keys."; }
  }
  redraw();
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) > 1) { width = entry.contentRect.width; label(); }
  }).observe(cells);

  // A document of its own on white ground: the cells as an enlarged image, labels and the colour bar as text.
  function svg() {
    const [w, h] = [560, 560 / aspect()];
    const plan = layout(w, h);
    const left = 14 + 7 * Math.min(plan.longestRow.length, 24);
    const below = plan.upright ? 14 + 7 * Math.min(plan.longestCol.length, 24) : 18;
    const top = options.rowTitle ? 24 : 8;
    const [width, height] = [left + w + 12, top + h + below + 50];
    const words = (x, y, text, extra = "") => `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" ${extra}>${escape(text.slice(0, 80))}</text>`;
    const place = (i, count, size) => ((i + 0.5) / count) * size;
    const parts = [
      `<rect width="${width}" height="${height}" fill="#fff"/>`,
      `<defs><pattern id="h" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M0 6L6 0" stroke="#b9bfc6"/></pattern></defs>`,
      `<rect x="${left}" y="${top}" width="${w}" height="${h}" fill="url(#h)" stroke="#999"/>`,
      `<image x="${left}" y="${top}" width="${w}" height="${h}" preserveAspectRatio="none" style="image-rendering:pixelated" href="${canvas.toDataURL()}"/>`,
      words(4, 15, options.rowTitle && `${options.rowTitle} ↓`),
      ...numbersShown().map(([i, j, text, color]) => words(
        left + place(j, options.cols, w), top + place(i, options.rows, h) + 4, text, `text-anchor="middle" fill="${color}"`)),
      ...plan.rows.map((i) => words(left - 6, top + place(i, options.rows, h) + 4, options.rowLabel(i).slice(0, 24), 'text-anchor="end"')),
      ...plan.cols.map((j) => {
        const x = left + place(j, options.cols, w);
        const text = options.colLabel(j).slice(0, 24);
        return plan.upright ? words(x + 4, top + h + 8, text, `text-anchor="end" transform="rotate(-90 ${x + 4} ${top + h + 8})"`)
          : words(x, top + h + 15, text, 'text-anchor="middle"');
      }),
      words(left + w / 2, top + h + below + 14, options.colTitle && `${options.colTitle} →`, 'text-anchor="middle"'),
    ];
    if (options.bar !== false) {
      const strip = barParts().find((part) => part instanceof HTMLCanvasElement);
      const y = top + h + below + 28;
      const lead = `${options.barLabel ? options.barLabel + "  " : ""}${tformer.number(range[0])}`;
      const x = left + 7 * lead.length + 6;
      parts.push(words(left, y + 10, lead), words(x + 126, y + 10, tformer.number(range[1])),
        `<image x="${x}" y="${y}" width="120" height="11" preserveAspectRatio="none" href="${strip.toDataURL()}"/>`);
      if (masked) parts.push(`<rect x="${x + 200}" y="${y}" width="24" height="11" fill="url(#h)" stroke="#999"/>`, words(x + 230, y + 10, options.maskLabel));
    }
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height.toFixed(1)}" viewBox="0 0 ${width} ${height.toFixed(1)}" ` +
      `font-family="system-ui, sans-serif" font-size="12" fill="#333">${parts.join("")}</svg>`;
  }
  function rows() {
    const columns = Array.from({ length: options.cols }, (_, j) => j);
    return [["", ...columns.map(options.colLabel)],
      ...Array.from({ length: options.rows }, (_, i) => [options.rowLabel(i), ...columns.map((j) => (isMasked(i, j) ? "" : valueOf(i, j)))])];
  }
  return { redraw, cursor, svg, rows, element: wrap };
};
