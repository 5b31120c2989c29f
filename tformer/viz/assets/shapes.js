// The path of a tensor: the steps of a forward pass, one of them chosen, with its shape, inputs, outputs and parameters.
"use strict";
(() => {
  const { data, element, state, number } = tformer;
  const byId = (id) => document.getElementById(id);
  const MOST_CARDS = 6, MOST_COLUMNS = 64;

  // Every step of every model in order, with its place and the ids of the steps that read it.
  const steps = [], byKey = new Map();
  data.models.forEach((model, m) => model.sections.forEach((section) => section.steps.forEach((step) => {
    const found = { ...step, key: (m ? m + ":" : "") + step.id, m, section, order: steps.length, outputs: [] };
    steps.push(found);
    byKey.set(found.key, found);
  })));
  const keyOf = (step, id) => (step.m ? step.m + ":" : "") + id;
  for (const step of steps) {
    step.from = step.inputs.map((id) => byKey.get(keyOf(step, id)));
    for (const input of step.from) input.outputs.push(step);
  }

  const letters = (symbol) => symbol.split("+").map((term) => [...term].join("·")).join(" + ");
  const wordOf = (letter) => data.names[letter] || letter;
  const meaning = (symbol) => symbol.split("+").map((term) => [...term].map(wordOf).join(" · ")).join(" + ");
  const sizeOf = (step) => step.shape.length ? step.shape.join(" × ") : "1 number";
  const lettersOf = (step) => step.symbols.map(letters).join(" ");
  function titleOf(section) {
    const all = section.layers;
    if (!all.length) return section.title;
    if (all.length === 1) return `${section.title}, layer ${all[0]}`;
    const run = all[all.length - 1] - all[0] === all.length - 1;
    return `${section.title}, layers ${run ? all[0] + "–" + all[all.length - 1] : all.join(", ")} (equal shapes)`;
  }
  const placeOf = (step) => [data.models[step.m].title, titleOf(step.section), step.part].filter(Boolean).join(" · ");

  // The list of all steps.
  const buttons = new Map();
  const path = byId("path");
  data.models.forEach((model, m) => {
    if (model.title) path.append(element("h2", { class: "model" }, model.title));
    for (const section of model.sections) {
      path.append(element("h2", {}, titleOf(section)));
      let part = "";
      for (const { id } of section.steps) {
        const step = byKey.get(keyOf({ m }, id));
        if (step.part !== part) path.append(element("h3", {}, part = step.part));
        const button = element("button", { type: "button", class: "step", tabindex: -1, onclick: () => choose(step) },
          element("span", {}, step.name), element("span", { class: "size" }, element("span", { class: "letters" }, lettersOf(step)), " ", sizeOf(step)));
        buttons.set(step, button);
        path.append(button);
      }
    }
  });

  const chosen = () => byKey.get(state.get("step", steps[0].key)) || steps[0];
  function choose(step, focus) {
    state.set({ step: step === steps[0] ? null : step.key });
    if (focus) buttons.get(step).focus({ preventScroll: true });
  }

  // A picture: the last two dimensions are a sheet, the one before is a pile of sheets; lengths are logarithmic.
  function picture(step) {
    const at = step.shape.length;
    const length = (n) => 18 + 22 * Math.log2(1 + n);
    const [rows, columns] = [at > 1 ? step.shape[at - 2] : 1, at > 0 ? step.shape[at - 1] : 1];
    const pile = at > 2 ? Math.min(step.shape[at - 3], MOST_CARDS) : 1;
    const [w, h, shift] = [Math.min(length(columns), 300), Math.min(length(rows), 200), 7];
    const [left, top] = [at > 1 ? 34 : 8, 22 + shift * (pile - 1)];
    const svg = element("svg", { class: "tensor", width: left + w + shift * pile + 70, height: top + h + 8, role: "img",
      "aria-label": `a tensor of ${lettersOf(step) || "one number"}`, viewBox: `0 0 ${left + w + shift * pile + 70} ${top + h + 8}` });
    for (let card = pile - 1; card >= 0; card--) {
      svg.append(element("rect", { x: left + card * shift, y: top - card * shift, width: w, height: h, rx: 3 }));
    }
    if (at > 0) svg.append(element("text", { x: left + w / 2 + shift * (pile - 1), y: 13, "text-anchor": "middle" }, letters(step.symbols[at - 1])));
    if (at > 1) svg.append(element("text", { x: left - 8, y: top + h / 2 + 4, "text-anchor": "end" }, letters(step.symbols[at - 2])));
    if (pile > 1) svg.append(element("text", { x: left + w + shift * pile + 3, y: top + 4 }, `${letters(step.symbols[at - 3])} sheets`));
    return svg;
  }

  function link(step, relation) {
    return element("button", { type: "button", class: "step", onclick: () => choose(step, true) },
      element("span", {}, step.name, element("span", { class: "where" }, " " + [step.part || titleOf(step.section), relation].filter(Boolean).join(", "))),
      element("span", { class: "size" }, element("span", { class: "letters" }, lettersOf(step)), " ", sizeOf(step)));
  }
  function links(kind, heading, found, empty) {
    const body = found.length ? element("div", { class: "links" }, ...found) : element("p", {}, empty);
    return [element("h3", { class: kind }, heading), body];
  }

  function parameters(step) {
    if (!step.parameters.length) return [];
    const more = step.section.layers.length > 1 ? ` Layer ${step.section.layers[0]} is shown; the others have the same shapes.` : "";
    const host = element("div", {});
    const anyTied = step.parameters.some(({ tied }) => tied.length);
    tformer.table(host, { caption: "Parameters", sortable: false,
      columns: ["parameter", "shape", { label: "numbers", number: true }, ...(anyTied ? ["tied to"] : [])],
      rows: step.parameters.map(({ name, shape, tied }) =>
        [name, shape.join(" × "), shape.reduce((a, b) => a * b, 1), ...(anyTied ? [tied.join(", ") || "–"] : [])]) });
    return [element("h3", {}, "Parameters"), host, ...(more ? [element("p", { class: "help" }, more.trim())] : [])];
  }

  function show() {
    const step = chosen();
    const later = (other) => other.order <= step.order && other.section === step.section ? "in the next layer" : "";
    const earlier = (other) => other.order >= step.order && other.section === step.section ? "of the layer before" : "";
    const dims = step.symbols.flatMap((symbol, n) => [...(n ? [element("span", { "aria-hidden": "true" }, "×")] : []),
      element("div", { class: "dim" }, element("b", {}, number(step.shape[n])), letters(symbol), element("small", {}, meaning(symbol)))]);
    byId("detail").replaceChildren(
      element("h2", {}, step.name), element("p", { class: "place" }, placeOf(step)), element("p", {}, step.meaning),
      element("div", { class: "dims" }, ...(dims.length ? dims : [element("div", { class: "dim" }, element("b", {}, "1"), "number")])),
      picture(step),
      ...links("in", "Comes in", step.from.map((other) => link(other, earlier(other))), "From the batch, not from another tensor."),
      ...links("out", "Goes out", step.outputs.map((other) => link(other, later(other))), "It is the end of the path."),
      ...parameters(step));
    for (const [other, button] of buttons) {
      button.classList.toggle("from", step.from.includes(other) && other !== step);
      button.classList.toggle("to", step.outputs.includes(other) && other !== step);
      if (other === step) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current");
      button.tabIndex = other === step ? 0 : -1;
    }
    const box = buttons.get(step).getBoundingClientRect(), panel = byId("detail").getBoundingClientRect();
    const lowest = panel.left < box.right ? Math.min(panel.top, innerHeight) : innerHeight; // a narrow page has the panel below
    if (box.top < 0 || box.bottom > lowest) buttons.get(step).scrollIntoView({ block: "center" });
  }

  const towards = (found, isForward) => found.find(isForward) || found[0];
  const moves = {
    ArrowDown: (step) => steps[step.order + 1],
    ArrowUp: (step) => steps[step.order - 1],
    ArrowRight: (step) => towards(step.outputs, (other) => other.order > step.order),
    ArrowLeft: (step) => towards(step.from, (other) => other.order < step.order),
    Home: () => steps[0],
    End: () => steps[steps.length - 1],
  };
  document.addEventListener("keydown", (event) => {
    const move = moves[event.key];
    const inside = event.target === document.body || byId("path").contains(event.target);
    if (!move || !inside || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const next = move(chosen());
    if (next) choose(next, true);
  });

  // The example: rows of the batch, a column for each position.
  function exampleTable(rows) {
    const count = Math.min(Math.max(...rows.map(([, cells]) => cells.length)), MOST_COLUMNS);
    const numbers = Array.from({ length: count }, (_, n) => n);
    return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Example" }, element("table", {},
      element("tbody", {}, ...rows.map(([label, cells]) => element("tr", {}, element("th", { scope: "row" }, label),
        ...numbers.map((n) => element("td", {}, cells[n]))))),
    ));
  }
  const cellsOf = (value) => Array.isArray(value)
    ? value.map((one) => String(Number(one)))
    : value.tokens.map((token) => (token === null ? "·" : tformer.token(token)));
  function showExample(example) {
    const has = (name) => example[name] !== undefined;
    const ofDecoder = has("decoder_input_ids") ? ["decoder_input_ids", "labels", "decoder_attention_mask"] : [];
    const ofFirst = ["input_ids", ...(ofDecoder.length ? [] : ["labels"]), "token_type_ids", "attention_mask"];
    const tables = [ofFirst, ofDecoder].map((names) => names.filter(has)).filter((names) => names.length && has(names[0]))
      .map((names) => exampleTable(names.map((name) => [name.replaceAll("_", " "), cellsOf(example[name])])));
    const originals = Object.entries(example.original).map(([name, { text }]) => element("p", { dir: "auto" }, `${name}: ${text}`));
    const label = has("label") ? [element("p", {}, `label: ${[].concat(example.label).join(", ")}`)] : [];
    const predicts = Object.entries(example.objective).map(([kind, what]) => element("p", { class: "caption" }, `${kind}: predicts ${what}.`));
    byId("example").append(element("details", { open: true }, element("summary", {}, "The example that the model reads"),
      ...predicts, ...originals, ...tables, ...label));
  }
  if (data.example) showExample(data.example);

  // The letters, each with its number where that is the same everywhere.
  const found = new Map();
  for (const step of steps) {
    step.symbols.forEach((symbol, n) => {
      for (const letter of symbol) {
        if (!data.names[letter]) continue;
        const sizes = found.get(letter) || found.set(letter, new Set()).get(letter);
        if (symbol === letter) sizes.add(step.shape[n]);
      }
    });
  }
  const rows = Object.keys(data.names).filter((letter) => found.has(letter))
    .map((letter) => [letter, data.names[letter], [...found.get(letter)].join(", ") || "–"]);
  tformer.table(byId("letters"), { caption: "Letters of the shapes", sortable: false, columns: ["letter", "meaning", "size"], rows });

  state.onChange((keys) => { if (keys.has("step")) show(); });
  show();
})();
