// The parts of attention's views: the links of one token, thumbnails of heads, a map drawn on the image.
"use strict";
Object.assign(attention, (() => {
  const { element, state } = tformer;
  const WHOLE = 32; // tokens that a column of links shows without leaving any out
  const AROUND = 7; // of a longer one, so many before and after the cursor's
  const LINE = 21, WIDTH = 420;
  const THUMB = 48; // cells of a thumbnail's side

  const shorten = (text, length = 17) => ([...text].length > length ? [...text].slice(0, length - 1).join("") + "…" : text);

  const fixed = (weight, digits) => weight.toFixed(digits).replace("-", "−");

  // What colours mean, beneath pictures that have no bar of their own.
  function bar({ min, max, colours, barLabel }, maskLabel) {
    const words = (text) => element("span", {}, text);
    const parts = [words(barLabel), words(tformer.number(min)), tformer.colourStrip(tformer.colours(colours)), words(tformer.number(max))];
    return element("div", { class: "bar" }, ...parts, ...(maskLabel ? [element("span", { class: "swatch" }), words(maskLabel)] : []));
  }

  // The places of a column: all, or those around some, with null for a gap.
  function places(count, kept) {
    if (count <= WHOLE) return Array.from({ length: count }, (_, n) => n);
    const chosen = new Set();
    for (const [centre, around] of kept) {
      for (let n = Math.max(0, centre - around); n <= Math.min(count - 1, centre + around); n++) chosen.add(n);
    }
    const result = [];
    let last = -1;
    for (const n of [...chosen].sort((a, b) => a - b)) {
      if (n !== last + 1) result.push(null);
      result.push(n);
      last = n;
    }
    if (last !== count - 1) result.push(null);
    return result;
  }

  // Lines from one query to the keys with its largest weights.
  function links(svg, found, row, count) {
    const top = attention.strongest(found, row, count);
    const left = places(found.rows, [[row, AROUND]]);
    const right = places(found.cols, [...top.map(([key]) => [key, 1]), ...(found.cols === found.rows ? [[row, 1]] : [])]);
    const height = LINE * (Math.max(left.length, right.length) + 1);
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height + 6}`);
    const [from, to] = [150, 270];
    const y = (place) => LINE * (place + 1) + 14;
    const weightOf = new Map(top);
    const parts = [
      element("text", { class: "soft", x: from, y: 13, "text-anchor": "end" }, found.queries.name + " (looks)"),
      element("text", { class: "soft", x: to, y: 13 }, found.keys.name + " (is looked at)"),
    ];
    for (const [key, weight] of top) {
      const [y1, y2] = [y(left.indexOf(row)) - 4, y(right.indexOf(key)) - 4];
      parts.push(element("path", {
        d: `M${from + 6} ${y1}C${from + 60} ${y1} ${to - 60} ${y2} ${to - 6} ${y2}`, fill: "none", stroke: "var(--accent)",
        "stroke-dasharray": weight < 0 ? "5 4" : null, "stroke-width": (1 + 7 * Math.abs(weight)).toFixed(1), "stroke-opacity": (0.35 + 0.65 * Math.sqrt(Math.abs(weight))).toFixed(2),
      }));
    }
    const gap = (x, place, anchor) => element("text", { class: "soft", x, y: y(place), "text-anchor": anchor }, "⋯");
    left.forEach((n, place) => {
      if (n === null) return parts.push(gap(from, place, "end"));
      const kind = [n === row ? "here" : "", found.queries.special[n] ? "special" : ""].join(" ").trim();
      parts.push(element("text", {
        class: kind, x: from, y: y(place), "text-anchor": "end", "data-query": n, onclick: () => state.set({ query: n }),
      }, shorten(found.queries.labels[n])));
    });
    right.forEach((n, place) => {
      if (n === null) return parts.push(gap(to, place, "start"));
      const kind = [weightOf.has(n) ? "here" : "", found.keys.special[n] ? "special" : ""].join(" ").trim();
      const label = shorten(found.keys.labels[n], weightOf.has(n) ? 11 : 17);
      parts.push(element("text", { class: kind, x: to, y: y(place), "data-key": n }, label));
      if (weightOf.has(n)) {
        parts.push(element("text", { class: "soft", x: WIDTH, y: y(place), "text-anchor": "end" }, fixed(weightOf.get(n), 3)));
      }
    });
    const said = top.map(([key, weight]) => `${found.keys.labels[key]} ${fixed(weight, 3)}`).join(", ");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${found.queries.labels[row]} looks most at ${said || "nothing"}`);
    svg.replaceChildren(...parts);
  }

  // A small picture of a matrix: the largest weight, or size, of each block; what cannot be seen stays transparent.
  function thumbnail(canvas, found, settings) {
    const [height, width] = [Math.min(found.rows, THUMB), Math.min(found.cols, THUMB)];
    const { value, share, min, max, colours } = attention.scaled(found, settings);
    const map = tformer.colours(colours);
    canvas.width = width;
    canvas.height = height;
    const most = new Float32Array(width * height).fill(NaN);
    for (let i = 0; i < found.rows; i++) {
      const line = Math.floor((i * height) / found.rows) * width;
      for (let j = 0; j < found.cols; j++) {
        if (found.mask && !found.mask[i * found.cols + j]) continue;
        const place = line + Math.floor((j * width) / found.cols);
        const weight = value(i, j);
        if (!(Math.abs(weight) <= Math.abs(most[place]))) most[place] = weight;
      }
    }
    const image = new ImageData(width, height);
    most.forEach((weight, n) => {
      if (Number.isNaN(weight)) return;
      const part = share ? share(weight) : (weight - min) / (max - min || 1);
      const place = 3 * Math.round(255 * Math.min(Math.max(part, 0), 1));
      image.data.set([map[place], map[place + 1], map[place + 2], 255], 4 * n);
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  // --- images -----------------------------------------------------------------------------------------------------

  const picture = tformer.data.image;

  // The row of weights over the patches: of the class token, of one patch, or the mean over all patches.
  function patchRow(found, query) {
    const { rows, columns, offset } = picture;
    const count = rows * columns;
    const shift = found.keys.length === found.keys.groups.length ? offset : 0; // the class token may be hidden
    const result = new Float32Array(count);
    const own = query >= 0 ? [query] : Array.from({ length: found.rows - shift }, (_, n) => n + shift);
    for (const row of own) for (let n = 0; n < count; n++) result[n] += found.values[row * found.cols + n + shift] / own.length;
    return result;
  }

  // As a matrix of patches, for thumbnails and heat maps.
  function patchMatrix(found, query) {
    const { rows, columns } = picture;
    const side = { labels: [], groups: [], special: [] };
    const values = patchRow(found, query);
    const largest = values.reduce((most, value) => Math.max(most, value), 0) || 1;
    return { rows, cols: columns, values, largest, mask: null, signed: found.signed, queries: side, keys: side };
  }

  async function overlay(canvas, patches, opacity, colours) {
    const { width, height, rows, columns } = picture;
    const bytes = await tformer.blob("image");
    const image = new ImageData(width, height);
    for (let n = 0; n < width * height; n++) {
      image.data.set([bytes[3 * n], bytes[3 * n + 1], bytes[3 * n + 2], 255], 4 * n);
    }
    const small = element("canvas", { width, height });
    small.getContext("2d").putImageData(image, 0, 0);
    const most = patches.values.reduce((a, b) => Math.max(a, Math.abs(b)), 0) || 1;
    const map = tformer.colours(colours);
    const cells = new ImageData(columns, rows);
    patches.values.forEach((value, n) => {
      const place = 3 * Math.round(255 * Math.min(Math.max(value / most, 0), 1));
      cells.data.set([map[place], map[place + 1], map[place + 2], Math.round(255 * opacity)], 4 * n);
    });
    const grid = element("canvas", { width: columns, height: rows });
    grid.getContext("2d").putImageData(cells, 0, 0);
    const scale = Math.max(1, Math.round(448 / width));
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = width >= 96;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(grid, 0, 0, canvas.width, canvas.height);
    return most;
  }

  return { bar, fixed, links, thumbnail, patchMatrix, overlay, shorten };
})());
