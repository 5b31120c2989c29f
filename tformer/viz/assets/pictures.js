// Pictures to save: svgOf(plot) gives a standing SVG document as text, pngOf(plot or canvas) a PNG as a Blob.
"use strict";
tformer.escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

tformer.svgOf = (plot) => plot.svg();

tformer.pngOf = async (plot, scale = 2) => {
  let canvas = plot;
  if (!(plot instanceof HTMLCanvasElement)) {
    const image = new Image();
    const url = URL.createObjectURL(new Blob([plot.svg()], { type: "image/svg+xml" }));
    try {
      await new Promise((resolve, reject) => {
        image.onload = resolve;
        image.onerror = () => reject(new Error("the picture cannot be drawn"));
        image.src = url;
      });
    } finally {
      URL.revokeObjectURL(url);
    }
    canvas = tformer.element("canvas", { width: Math.round(scale * image.width), height: Math.round(scale * image.height) });
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
  }
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
};

// A row of buttons that save a plot: PNG, SVG and, with rows() → [[…]], CSV.
tformer.saveButtons = (name, plot, rows) => {
  const save = (suffix, mime, content) =>
    tformer.button(suffix.toUpperCase(), () => tformer.download(`${typeof name === "function" ? name() : name}.${suffix}`, mime, content));
  const row = tformer.element("div", { class: "row", role: "group", "aria-label": "Save this plot" }, "Save:",
    save("png", "image/png", () => tformer.pngOf(plot())), save("svg", "image/svg+xml", () => tformer.svgOf(plot())));
  if (rows) row.append(save("csv", "text/csv", () => tformer.csv(rows())));
  return row;
};
