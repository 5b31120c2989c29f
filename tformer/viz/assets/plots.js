// A page of plots: each with its heading, its caption and buttons to save it.
"use strict";
(() => {
  const { data, element } = tformer;
  data.plots.forEach(({ title, caption, heat, ...options }) => {
    const canvas = element(heat ? "canvas" : "svg");
    const box = element("section", {}, element("h2", { dir: "auto" }, title), canvas, element("p", { class: "caption" }, caption));
    document.getElementById("plots").append(box);
    const names = heat && { rowLabel: (i) => String(options.rowNames[i]), colLabel: (j) => String(options.colNames[j]) };
    const plot = (heat ? tformer.heatmap : tformer.lines)(canvas, { label: title, ...options, ...names });
    box.append(tformer.saveButtons(title.replace(/[^\p{L}\p{N}]+/gu, "-") || "plot", () => plot, () => plot.rows()));
  });
  document.body.dataset.ready = "true";
})();
