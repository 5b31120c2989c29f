// A text, each token on the colour of its loss, of one run or of two side by side; the alternatives at the cursor; the
// hardest tokens; the calibration.
"use strict";
(() => {
  const { data, element, state } = tformer;
  const { runs, segments } = data;
  const place = (id) => document.getElementById(id);
  const texts = runs.filter((run) => run.tokens);
  const within = (n, length) => Math.min(Math.max(n, 0), length - 1);
  const cursor = () => {
    const run = within(state.get("run", 0), texts.length);
    return [run, within(state.get("token", 0), texts[run].tokens.length)];
  };
  const measure = () => (data.measures[state.get("measure", "bits")] ? state.get("measure", "bits") : "bits");
  // [colour behind a token, colour of its letters], with a contrast of 4.5 at least.
  function coloursOf(token) {
    const [, map, low, high] = data.measures[measure()], value = token[measure()];
    if (value === null) return ["", ""];
    const ground = tformer.colourAt(map, (value - low) / (high - low));
    const [r, g, b] = [1, 3, 5].map((at) => (parseInt(ground.slice(at, at + 2), 16) / 255) ** 2.2);
    return [ground, 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff"];
  }

  // --- the texts ------------------------------------------------------------------------------------------------------

  const bar = element("div", { class: "bar" });
  const shown = ({ piece }) => tformer.token(piece).replace(/␣/g, " ").replace(/↵/g, "↵\n");
  const boxes = texts.map((run, number) => {
    const box = element("div", { class: "tokens", tabindex: 0, role: "application", "aria-roledescription": "coloured text", dir: "auto",
      "aria-label": `tokens of ${run.name}; arrow keys move, the alternatives follow below` },
      ...run.tokens.map((token, n) => element("span", { "data-token": n }, shown(token))));
    const look = ({ target }) => {
      const token = run.tokens[target.dataset.token];
      if (!token) return;
      target.title = [`${tformer.number(token.bits)} bits, rank ${tformer.number(token.rank)}`, ...token.top.map(([word, share]) => `${share.toFixed(4)} ${tformer.token(word)}`)].join("\n");
      state.set({ run: number, token: target.dataset.token });
    };
    box.addEventListener("mouseover", look);
    box.addEventListener("click", look);
    box.addEventListener("keydown", (event) => {
      const [at, n] = cursor(), from = at === number ? n : 0;
      const to = { ArrowRight: from + 1, ArrowLeft: from - 1, ArrowDown: beside(box, from, 1), ArrowUp: beside(box, from, -1), Home: 0, End: run.tokens.length }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      state.set({ run: number, token: within(to, run.tokens.length) });
      box.children[cursor()[1]].scrollIntoView({ block: "nearest" });
    });
    const rows = () => [["position", "token", "bits", "rank", "alternative", "probability"],
      ...run.tokens.map((token) => [token.position, token.token, token.bits, token.rank, ...(token.top[0] || [])])];
    place("texts").append(element("section", {}, element("h2", { dir: "auto" }, run.name), element("p", { class: "caption" }, data.captions[number]), box,
      tformer.saveButtons(`tokens-${number + 1}`, () => ({ svg: () => svgOf(number) }), rows)));
    return box;
  });
  // The token of the next line (step 1) or of the one before (-1) that is nearest to token n.
  function beside({ children }, n, step) {
    const { offsetTop: top, offsetLeft: left } = children[n];
    const away = (span) => (step * (span.offsetTop - top) > 0 ? 1e4 * step * (span.offsetTop - top) + Math.abs(span.offsetLeft - left) : Infinity);
    return [...children].map(away).reduce((best, far, m, all) => (far < all[best] ? m : best), n);
  }
  function paint() {
    const [label, map, ...ends] = data.measures[measure()], [low, high] = ends.map((end) => element("span", {}, tformer.number(end)));
    boxes.forEach((box, number) => [...box.children].forEach((span, n) => { [span.style.background, span.style.color] = coloursOf(texts[number].tokens[n]); }));
    bar.replaceChildren(element("span", {}, label), low, tformer.colourStrip(tformer.colours(map)), high);
  }
  function svgOf(number) {
    const box = boxes[number], { left, top } = box.getBoundingClientRect(), size = `width="${box.clientWidth}" height="${box.scrollHeight}"`;
    const parts = [...box.children].flatMap((span, n) => {
      const [ground, ink] = coloursOf(texts[number].tokens[n]), lines = span.textContent.split("\n");
      const rects = [...span.getClientRects()].filter((rect) => rect.width), most = Math.max(...rects.map((rect) => rect.width));
      return rects.map(({ x, y, width, height }, part) => { // of a token that the edge divides, the wider part has the word
        const word = lines.length > 1 ? lines[part] : width < most ? "" : part ? lines[0].trimStart() : lines[0], down = y - top + box.scrollTop;
        return `<rect x="${x - left}" y="${down}" width="${width}" height="${height}" fill="${ground || "#ffffff"}"/>` +
          `<text x="${x - left}" y="${down + 0.75 * height}" fill="${ink || "#1b1f23"}" xml:space="preserve">${tformer.escape(word ?? "")}</text>`;
      });
    });
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="system-ui, sans-serif" font-size="16"><rect ${size} fill="#ffffff"/>${parts.join("")}</svg>`;
  }

  // --- the token at the cursor ----------------------------------------------------------------------------------------

  const heading = element("h2", { dir: "auto" }), facts = element("p", { dir: "auto" }), list = element("div", {});
  function show() {
    const [run, n] = cursor(), token = texts[run].tokens[n], segment = segments?.[token.segment];
    boxes.forEach((box, other) => [...box.children].forEach((span, m) => {
      span.classList.toggle("here", other === run && m === n);
      span.classList.toggle("same", Boolean(segment) && texts[other].tokens[m].segment === token.segment);
    }));
    heading.textContent = `${tformer.token(token.token)} (${n})` + (texts.length > 1 ? `, ${texts[run].name}` : "");
    facts.textContent = token.bits === null ? "No prediction: nothing stands before it, or it belongs to the template."
      : `${token.bits.toFixed(3)} bits, probability ${tformer.number(token.probability)}, rank ${tformer.number(token.rank)}.`;
    if (segment) {
      const each = segment.bits.map((bits, other) => `${runs[other].name} ${bits === null ? "no prediction" : `${bits.toFixed(3)} bits`}`);
      facts.textContent += ` ${tformer.token(segment.text)}: ${each.join(", ")}.`;
    }
    tformer.table(list, { caption: "The most probable tokens at the cursor", columns: ["most probable", { label: "probability", number: true, format: (value) => value.toFixed(4) }],
      rows: token.top.map(([word, share]) => [tformer.token(word), share]) });
  }
  if (texts.length) {
    if (segments) tformer.control("buttons", { id: "measure", label: "Colour", value: "bits", options: Object.entries(data.measures).map(([key, [label]]) => [key, label]) });
    place("texts").before(bar);
    place("cell").append(heading, facts, list);
    paint();
    show();
    state.onChange((keys) => {
      if (keys.has("measure")) paint();
      if (keys.has("run") || keys.has("token")) show();
    });
  }

  // --- the hardest tokens ---------------------------------------------------------------------------------------------

  const columns = ["before", "token", "after", { label: "bits", number: true }, { label: "rank", number: true }, "most probable", { label: "its probability", number: true }];
  runs.forEach((run, number) => {
    const table = element("div", {}), rows = run.hardest.map(({ before, token, after, bits, rank, top }) => [before, token, after, bits, rank, ...top[0]]);
    const save = () => tformer.download("hardest.csv", "text/csv", tformer.csv([columns.map((column) => column.label || column), ...rows]));
    place("hardest").append(element("h2", { dir: "auto" }, `The hardest tokens, ${run.name}`), ...(run.tokens ? [] : [element("p", { class: "caption" }, data.captions[number])]), table,
      element("div", { class: "row" }, "Save:", tformer.button("CSV", save)));
    tformer.table(table, { caption: "The tokens with the highest loss", columns, rows: rows.map((row) => row.map((cell) => (typeof cell === "string" ? tformer.token(cell) : cell))) });
  });
  document.documentElement.dataset.ready = "true";
})();
