// A text, each token on the colour of its loss, of one run or of two side by side; the alternatives at the cursor; the
// hardest tokens; the calibration.
"use strict";
(() => {
  const { data, element, state } = tformer;
  const { runs, segments } = data;
  const place = (id) => document.getElementById(id);
  const texts = runs.filter((run) => run.tokens);
  const apart = ({ segment }) => { // bits of the second run minus those of the first
    const [one, other] = segments?.[segment]?.bits ?? [null, null];
    return one === null || other === null ? null : other - one;
  };
  const mostOf = (value) => texts.reduce((most, run) => run.tokens.reduce((a, token) => Math.max(a, Math.abs(value(token) ?? 0)), most), 0) || 1;
  const MEASURES = {
    loss: ["loss, bits", (token) => token.bits, 0, data.most],
    rank: ["log10(1 + rank)", (token) => (token.rank === null ? null : Math.log10(1 + token.rank)), 0],
  };
  if (segments) MEASURES.difference = [`bits of ${runs[1].name} minus those of ${runs[0].name}`, apart, -mostOf(apart)];
  const measure = () => MEASURES[state.get("measure", "loss")] || MEASURES.loss;
  const colours = () => (measure() === MEASURES.difference ? "RdBu_r" : "viridis");
  const cursor = () => {
    const run = Math.min(Math.max(state.get("run", 0), 0), texts.length - 1);
    return [run, Math.min(Math.max(state.get("token", 0), 0), texts[run].tokens.length - 1)];
  };
  const shown = (token) => tformer.token(token.piece).replace(/␣/g, " ").replace(/↵/g, "↵\n");
  function colourOf(token) {
    const [, valueOf, low, high = mostOf(valueOf)] = measure(), value = valueOf(token);
    if (value === null) return ["", ""];
    const ground = tformer.colourAt(colours(), (value - low) / (high - low));
    const [r, g, b] = [1, 3, 5].map((at) => (parseInt(ground.slice(at, at + 2), 16) / 255) ** 2.2);
    return [ground, 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff"]; // a contrast of 4.5 at least
  }

  // --- the texts ------------------------------------------------------------------------------------------------------

  const bar = element("div", { class: "bar" });
  const boxes = texts.map((run, number) => {
    const box = element("div", { class: "tokens", tabindex: 0, role: "application", "aria-roledescription": "coloured text", dir: "auto",
      "aria-label": `tokens of ${run.name}; arrow keys move, the alternatives follow below` });
    box.append(...run.tokens.map((token, n) => element("span", { "data-token": n }, shown(token))));
    const look = ({ target }) => { if (target.dataset.token) state.set({ run: number, token: target.dataset.token }); };
    box.addEventListener("mouseover", look);
    box.addEventListener("click", look);
    box.addEventListener("keydown", (event) => {
      const [at, n] = cursor(), from = at === number ? n : 0, last = run.tokens.length - 1;
      const to = { ArrowRight: () => from + 1, ArrowLeft: () => from - 1, ArrowDown: () => beside(box, from, 1), ArrowUp: () => beside(box, from, -1), Home: () => 0, End: () => last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      state.set({ run: number, token: Math.min(Math.max(to(), 0), last) });
      box.children[cursor()[1]].scrollIntoView({ block: "nearest" });
    });
    const rows = () => [["position", "token", "bits", "rank", "alternative", "probability"],
      ...run.tokens.map((token) => [token.position, token.token, token.bits, token.rank, ...(token.top[0] || [])])];
    place("texts").append(element("section", {}, element("h2", { dir: "auto" }, run.name), element("p", { class: "caption" }, data.summaries[number]), box,
      tformer.saveButtons(`tokens-${number + 1}`, () => ({ svg: () => svgOf(number) }), rows)));
    return box;
  });
  // The token of the next line (step 1) or the previous one (-1) that is nearest to token n.
  function beside({ children: spans }, n, step) {
    let m = n;
    while (spans[m]?.offsetTop === spans[n].offsetTop) m += step;
    const line = spans[m]?.offsetTop, away = (k) => Math.abs(spans[k].offsetLeft - spans[n].offsetLeft);
    let best = line === undefined ? n : m;
    for (; line !== undefined && spans[m]?.offsetTop === line; m += step) if (away(m) < away(best)) best = m;
    return best;
  }
  function paint() {
    boxes.forEach((box, number) => [...box.children].forEach((span, n) => { [span.style.background, span.style.color] = colourOf(texts[number].tokens[n]); }));
    const [label, valueOf, low, high = mostOf(valueOf)] = measure();
    const ends = [low, high].map((end) => element("span", {}, tformer.number(end)));
    bar.replaceChildren(element("span", {}, label), ends[0], tformer.colourStrip(tformer.colours(colours())), ends[1], mostOf(valueOf) > high ? " and more" : "");
  }
  function svgOf(number) {
    const box = boxes[number], { left, top } = box.getBoundingClientRect(), size = `width="${box.clientWidth}" height="${box.scrollHeight}"`;
    const parts = [...box.children].flatMap((span, n) => {
      const [ground, ink] = colourOf(texts[number].tokens[n]), lines = span.textContent.split("\n");
      const rects = [...span.getClientRects()].filter((rect) => rect.width), most = Math.max(...rects.map((rect) => rect.width));
      return rects.map((rect, part) => { // of a token that the edge divides, the wider part has the word
        const [x, y] = [rect.left - left, rect.top - top + box.scrollTop];
        const word = lines.length > 1 ? lines[part] : rect.width < most ? "" : part ? lines[0].trimStart() : lines[0];
        return `<rect x="${x}" y="${y}" width="${rect.width}" height="${rect.height}" fill="${ground || "#ffffff"}"/>` +
          `<text x="${x}" y="${y + 0.75 * rect.height}" fill="${ink || "#1b1f23"}" xml:space="preserve">${tformer.escape(word ?? "")}</text>`;
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
    tformer.control("buttons", { id: "measure", label: "Colour", value: "loss", options: Object.keys(MEASURES).map((key) => [key, key]) });
    place("texts").before(bar);
    place("cell").append(heading, facts, list);
    paint();
    show();
    state.onChange((keys) => {
      if (keys.has("measure")) paint();
      if (keys.has("run") || keys.has("token")) show();
    });
  }

  // --- the hardest tokens, calibration ----------------------------------------------------------------------------------

  const columns = ["before", "token", "after", { label: "bits", number: true }, { label: "rank", number: true }, "most probable", { label: "its probability", number: true }];
  runs.forEach((run, number) => {
    const table = element("div", {}), rows = run.hardest.map(({ before, token, after, bits, rank, top }) => [before, token, after, bits, rank, ...top[0]]);
    const save = () => tformer.download("hardest.csv", "text/csv", tformer.csv([columns.map((column) => column.label || column), ...rows]));
    place("hardest").append(element("h2", { dir: "auto" }, `The hardest tokens, ${run.name}`), element("p", { class: "caption" }, data.summaries[number]), table,
      element("div", { class: "row" }, "Save:", tformer.button("CSV", save)));
    tformer.table(table, { caption: "The tokens with the highest loss", columns, rows: rows.map((row) => row.map((cell) => (typeof cell === "string" ? tformer.token(cell) : cell))) });
  });
  const { title, caption, ...options } = data.curve, svg = element("svg", {});
  place("calibration").append(element("h2", {}, title), svg, element("p", { class: "caption" }, caption));
  const plot = tformer.lines(svg, { label: title, ...options });
  place("calibration").append(tformer.saveButtons("calibration", () => plot, () => plot.rows()));
  document.documentElement.dataset.ready = "true";
})();
