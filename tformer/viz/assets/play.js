// Models to play with: write, choose another token, look where it comes from; translate; classify; fill masks; the request.
"use strict";
(() => {
  const { element, state, control, number, button } = tformer;
  const byId = (id) => document.getElementById(id);
  const base = location.pathname.replace(/\/$/, "");
  const MODES = { generate: "Write", translate: "Translate", classify: "Classify", fill: "Fill masks" };
  const PROMPTS = {
    generate: ["Prompt", "Once upon a time"], translate: ["Source", "Two dogs run."],
    classify: ["Text", "a film that is worth its time"], fill: ["Text with masks", "The [MASK] sat on the mat."],
  };
  const LOOKS = { attention: "Attention", lens: "Answer of each layer", attribution: "What mattered" };
  const ALTERNATIVES = 8;
  const shown = (text) => tformer.token(text).replace(/␣/g, " ").replace(/↵/g, "↵\n");
  const share = (p) => `${(100 * p).toFixed(p < 0.1 ? 2 : 1)} %`;
  // [ground, ink] of a share between 0 and 1, with a contrast of 4.5 at least.
  function coloured(map, value) {
    const ground = tformer.colourAt(map, value);
    const [r, g, b] = [1, 3, 5].map((at) => (parseInt(ground.slice(at, at + 2), 16) / 255) ** 2.2);
    return [ground, 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff"];
  }
  const paint = (span, [ground, ink]) => { [span.style.background, span.style.color] = [ground, ink]; return span; };

  // --- requests -------------------------------------------------------------------------------------------------------

  const KEY = "tformer-key";
  const key = () => sessionStorage.getItem(KEY) || "";
  const headers = () => ({ "Content-Type": "application/json", ...(key() ? { Authorization: `Bearer ${key()}` } : {}) });
  async function answered(path, body, signal) {
    const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
    const answer = await fetch(base + path, { ...options, headers: headers(), signal });
    if (answer.ok) return answer;
    if (answer.status === 401) byId("key-row").hidden = false;
    const { error } = await answer.json().catch(() => ({}));
    throw new Error(error ? error.message : `status ${answer.status}`);
  }
  const ask = async (path, body, signal) => (await answered(path, body, signal)).json();
  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const { done, value } = await reader.read();
      if (done) return;
      const frames = (text + value).split("\n\n");
      text = frames.pop();
      for (const frame of frames) {
        if (!frame.startsWith("data: {")) continue;
        const found = JSON.parse(frame.slice(6));
        if (found.error) throw new Error(found.error.message);
        yield found;
      }
    }
  }

  // --- controls -------------------------------------------------------------------------------------------------------

  let models = [];
  const suited = () => models.filter(({ uses }) => uses.includes(mode.get()));
  const mode = control("select", { id: "mode", label: "Do", value: "", options: [["", "…"]] });
  const model = control("select", { id: "model", label: "Model", value: "", options: [["", "…"]] });
  const beside = control("select", { id: "beside", label: "Beside it", value: "", options: [["", "nothing"]] });
  const most = control("number", { id: "tokens", label: "New tokens", value: 40, min: 1, max: 4096, integer: true });
  const heat = control("range", { id: "temperature", label: "Temperature", value: 0, min: 0, max: 2, step: 0.05 });
  const seed = control("number", { id: "seed", label: "Seed", value: 1, min: 0, max: 2 ** 31, integer: true });
  const prompt = element("textarea", { id: "prompt", rows: 4, dir: "auto", spellcheck: false });
  const second = element("input", { id: "second", type: "text", dir: "auto" });
  const label = element("label", { for: "prompt" }), run = button("Answer", answer), stop = button("Stop", () => stopping?.abort());
  const status = element("p", { class: "readout", role: "status" });
  const secondRow = element("div", { class: "control" }, element("label", { for: "second" }, "Second text, of a model that reads pairs"), second);
  byId("ask").append(label, prompt, secondRow, element("div", { class: "row" }, run, stop, element("span", { class: "help" }, "Ctrl+Enter")), status);
  const input = element("input", { id: "key", type: "password", autocomplete: "off", "aria-label": "API key" });
  byId("key-row").append("The server asks for a key:", input, button("Use", () => { sessionStorage.setItem(KEY, input.value); byId("key-row").hidden = true; begin(); }));
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); answer(); }
  });
  prompt.addEventListener("input", () => { prompt.dataset.typed = "yes"; });

  function arrange() {
    const own = mode.get(), names = suited().map(({ id }) => id);
    model.configure({ options: names.map((id) => [id, id]), value: names[0] ?? "" });
    beside.configure({ options: [["", "nothing"], ...names.filter((id) => id !== model.get()).map((id) => [id, id])] });
    beside.element.hidden = names.length < 2;
    for (const { element: box } of [most, heat, seed]) box.hidden = own !== "generate";
    secondRow.hidden = own !== "classify";
    if (!PROMPTS[own]) return;
    label.textContent = PROMPTS[own][0];
    if (!prompt.dataset.typed) prompt.value = PROMPTS[own][1];
  }
  async function begin() {
    try {
      models = (await ask("/v1/models")).data;
      const offered = Object.keys(MODES).filter((name) => models.some(({ uses }) => uses.includes(name)));
      const first = models.flatMap(({ uses }) => uses).find((name) => MODES[name]);
      mode.configure({ options: offered.map((name) => [name, MODES[name]]), value: first ?? "" });
      status.textContent = offered.length ? "" : "No model of this server writes, translates, classifies or fills masks.";
      arrange();
    } catch (error) {
      status.textContent = error.message;
    }
  }

  // --- answers --------------------------------------------------------------------------------------------------------

  let stopping = null, sides = [];
  async function answer() {
    stopping?.abort();
    const { signal } = (stopping = new AbortController());
    const names = [model.get(), beside.get()].filter((name, n, all) => name && all.indexOf(name) === n);
    byId("detail").replaceChildren();
    sides = names.map((name) => ({ name, out: element("div", {}), note: element("p", { class: "caption" }) }));
    byId("sides").replaceChildren(...sides.map(({ name, out, note }) => element("section", {}, element("h2", { dir: "auto" }, name), out, note)));
    status.textContent = "";
    await Promise.all(sides.map((side) => guarded(side, () => ANSWERS[mode.get()](side, signal))));
  }
  async function guarded(side, work) {
    try { await work(); } catch (error) {
      side.note.textContent = error.name === "AbortError" ? `${side.note.textContent} Stopped.` : error.message;
    }
  }
  const ANSWERS = {
    async generate(side, signal) {
      const { tokens } = await ask("/tokenize", { model: side.name, text: prompt.value }, signal);
      side.tokens = tokens.map((token) => ({ ...token, given: true }));
      await write(side, most.get(), signal);
    },
    async translate(side, signal) {
      const body = { model: side.name, text: prompt.value, alignments: true };
      tell("/translate", body);
      const [found] = (await ask("/translate", body, signal)).results;
      const [{ tokens, alignment }] = found.completions;
      const row = (words) => element("div", { class: "tokens" }, ...words.map((word, n) => element("span", { tabindex: 0, "data-n": n }, shown(word) + " ")));
      const [above, below] = [row(found.source_tokens), row(tokens)];
      const mark = (own, other, from, to) => (event) => {
        const n = Number(event.target.dataset.n ?? -1), there = alignment.filter((pair) => pair[from] === n).map((pair) => pair[to]);
        [...own.children].forEach((span, m) => span.classList.toggle("here", m === n));
        [...other.children].forEach((span, m) => span.classList.toggle("here", there.includes(m)));
      };
      for (const kind of ["mouseover", "focusin"]) {
        above.addEventListener(kind, mark(above, below, 0, 1));
        below.addEventListener(kind, mark(below, above, 1, 0));
      }
      side.out.replaceChildren(element("p", { dir: "auto" }, element("strong", {}, found.text)),
        element("p", { class: "caption" }, "Source and target; point at a token, or press Tab, to see what it is aligned with."), above, below);
      side.note.textContent = `score ${number(found.score)}`;
    },
    async classify(side, signal) {
      const body = { model: side.name, text: prompt.value, ...(second.value ? { text2: second.value } : {}) };
      tell("/classify", body);
      const [found] = (await ask("/classify", body, signal)).results;
      const spans = found.spans?.map(({ label, text, probability }) => [`${label} ${text}`, probability]);
      const rows = spans ?? (found.score === undefined ? Object.entries(found.probabilities ?? {}).sort((a, b) => b[1] - a[1]) : [["score", found.score]]);
      const table = element("div", {}), why = element("div", {});
      tformer.table(table, { caption: "Labels", columns: ["Label", { label: "Probability", number: true }], rows });
      side.out.replaceChildren(table, why);
      if (spans) return;
      const looked = await ask("/look", { ...body, what: "attribution" }, signal);
      why.replaceChildren(...scored(looked, `What the logit of ${looked.target} loses without each token (occlusion):`));
    },
    async fill(side, signal) {
      const body = { model: side.name, text: prompt.value, top_k: ALTERNATIVES };
      tell("/fill", body);
      const [{ masks }] = (await ask("/fill", body, signal)).results;
      side.out.replaceChildren(...masks.map((candidates, n) => element("div", { class: "row" }, `Mask ${n + 1}:`, ...candidates.map(({ token, probability }) =>
        button(`${tformer.token(token)} ${share(probability)}`, () => fillIn(n, token))))));
    },
  };
  function fillIn(place, token) {
    let n = -1;
    prompt.value = prompt.value.replace(/\[MASK\]|<mask>/g, (mask) => (++n === place ? token.trim() : mask));
    prompt.dataset.typed = "yes";
  }
  // A text, each token on a colour of its score.
  function scored({ tokens, scores }, caption) {
    const end = Math.max(...scores.map((value) => Math.abs(value ?? 0)), 1e-9);
    const spans = tokens.map((token, n) => {
      const span = element("span", { title: scores[n] === null ? "not scored" : number(scores[n]) }, shown(token));
      return scores[n] === null ? span : paint(span, coloured("RdBu_r", 0.5 + scores[n] / end / 2));
    });
    return [element("p", { class: "caption", dir: "auto" }, caption), element("div", { class: "tokens", dir: "auto" }, ...spans),
      element("div", { class: "bar" }, number(-end), tformer.colourStrip(tformer.colours("RdBu_r")), number(end))];
  }

  // --- writing --------------------------------------------------------------------------------------------------------

  async function write(side, count, signal) {
    const ids = side.tokens.map(({ id }) => id);
    const body = { model: side.name, prompt: ids, max_new_tokens: count, temperature: heat.get(), seed: seed.get() };
    tell("/generate", { ...body, prompt: prompt.value });
    show(side);
    const begun = performance.now();
    let [first, written] = [0, 0];
    const stream = await answered("/generate", { ...body, stream: true, logprobs: true, alternatives: ALTERNATIVES }, signal);
    for await (const event of events(stream)) {
      if (event.id !== undefined) {
        first ||= performance.now();
        written += 1;
        side.tokens.push({ id: event.id, text: event.token, logprob: event.logprob, alternatives: event.alternatives });
        side.box.append(spanOf(side, side.tokens.length - 1));
      }
      const seconds = (performance.now() - first) / 1000;
      const rate = written > 1 && seconds > 0 ? `, then ${number((written - 1) / seconds)} tokens per second` : "";
      if (first) side.note.textContent = `First token after ${Math.round(first - begun)} ms${rate}.`;
    }
  }
  function spanOf(side, n) {
    const token = side.tokens[n];
    const span = element("span", { "data-token": n, title: token.given ? "given" : share(Math.exp(token.logprob)) }, shown(token.text));
    return token.given ? span : paint(span, coloured("viridis", Math.exp(token.logprob)));
  }
  function show(side) {
    side.box = element("div", { class: "tokens", tabindex: 0, role: "application", dir: "auto", "aria-roledescription": "written text",
      "aria-label": "tokens; arrow keys move, Enter shows alternatives" }, ...side.tokens.map((_, n) => spanOf(side, n)));
    side.box.addEventListener("click", ({ target }) => target.dataset.token !== undefined && choose(side, Number(target.dataset.token)));
    side.box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      choose(side, Math.min(Math.max((side.at ?? side.tokens.length - 1 - step) + step, 0), side.tokens.length - 1));
    });
    const bar = element("div", { class: "bar" }, "probability 0", tformer.colourStrip(tformer.colours("viridis")), "1");
    side.out.replaceChildren(side.box, bar);
  }
  function choose(side, n) {
    side.at = n;
    for (const { box } of sides) for (const span of box?.children ?? []) span.classList.toggle("here", box === side.box && Number(span.dataset.token) === n);
    const token = side.tokens[n], facts = element("p", {}), looked = element("div", {});
    const heading = element("h2", { dir: "auto" }, `${tformer.token(token.text)} (token ${n} of ${side.name})`);
    const parts = [heading, facts];
    if (token.given) facts.textContent = "Given, not written.";
    else {
      facts.textContent = `Probability ${share(Math.exp(token.logprob))}. Choose another token, and the model goes on from there:`;
      parts.push(element("div", { class: "row" }, ...token.alternatives.map((other) =>
        button(`${tformer.token(other.token)} ${share(Math.exp(other.logprob))}`, () => take(side, n, other)))));
    }
    if (n > 0) parts.push(element("div", { class: "row" }, "Where it comes from:", ...Object.entries(LOOKS).map(([what, name]) => button(name, () => look(side, n, what, looked)))), looked);
    byId("detail").replaceChildren(...parts);
  }
  function take(side, n, other) {
    stopping?.abort();
    stopping = new AbortController();
    const left = Math.max(1, most.get() - side.tokens.slice(0, n + 1).filter(({ given }) => !given).length);
    const { alternatives } = side.tokens[n];
    side.tokens = [...side.tokens.slice(0, n), { id: other.id, text: other.token, logprob: other.logprob, alternatives }];
    byId("detail").replaceChildren();
    guarded(side, () => write(side, left, stopping.signal));
  }
  async function look(side, n, what, host) {
    host.replaceChildren(element("p", { class: "caption" }, "…"));
    try {
      const found = await ask("/look", { model: side.name, ids: side.tokens.slice(0, n + 1).map(({ id }) => id), what });
      DRAWN[what](found, host);
    } catch (error) {
      host.replaceChildren(element("p", { class: "error" }, error.message));
    }
  }
  const DRAWN = {
    attention({ tokens, layers }, host) {
      const canvas = element("canvas"), heads = Math.max(...layers.map((layer) => layer.length));
      const choice = element("select", { "aria-label": "head" }, element("option", { value: "" }, "mean of the heads"),
        ...Array.from({ length: heads }, (_, head) => element("option", { value: head }, `head ${head}`)));
      const value = (i, j) => choice.value === "" ? layers[i].reduce((sum, head) => sum + head[j], 0) / layers[i].length : layers[i][Number(choice.value)]?.[j] ?? NaN;
      host.replaceChildren(element("p", { class: "caption" }, "What each layer reads where it predicts this token."), choice, canvas);
      const map = tformer.heatmap(canvas, { rows: layers.length, cols: tokens.length, value, min: 0, rowTitle: "layer", label: "attention by layer and token",
        colLabel: (j) => tformer.token(tokens[j]), describe: (i, j) => `layer ${i}, ${tformer.token(tokens[j])}: ${number(value(i, j))}`, numbers: false });
      choice.addEventListener("change", () => map.redraw({ value }));
    },
    lens({ rows, top, probability, rank, target }, host) {
      host.replaceChildren(element("p", { class: "caption", dir: "auto" }, `The answer if the model ended after each layer, and the probability and rank of ${tformer.token(target)}.`), element("div", {}));
      tformer.table(host.lastChild, { caption: "Answers of the layers", sortable: false, columns: ["Layer", "Most probable", { label: "Probability", number: true }, { label: "Rank", number: true }],
        rows: rows.map((row, n) => [row, top[n].map(([word, p]) => `${tformer.token(word)} ${share(p)}`).join("  "), probability[n], rank[n]]) });
    },
    attribution(found, host) {
      host.replaceChildren(...scored(found, `What the logit of ${tformer.token(found.target)} loses without each token (occlusion):`));
    },
  };

  // --- the request ----------------------------------------------------------------------------------------------------

  const python = (value) => value === null ? "None" : typeof value === "boolean" ? (value ? "True" : "False") : Array.isArray(value) ? `[${value.map(python).join(", ")}]`
    : typeof value === "object" ? `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`).join(", ")}}` : JSON.stringify(value);
  function tell(path, body) {
    const url = location.origin + base + path, quoted = JSON.stringify(body).replace(/'/g, "'\\''");
    const bearer = key() ? [" -H 'Authorization: Bearer KEY'", ', "Authorization": "Bearer KEY"'] : ["", ""];
    const texts = { curl: `curl ${url} -H 'Content-Type: application/json'${bearer[0]} -d '${quoted}'`,
      Python: `import json\nimport urllib.request\n\nbody = ${python(body)}\nheaders = {"Content-Type": "application/json"${bearer[1]}}\n` +
        `request = urllib.request.Request("${url}", json.dumps(body).encode(), headers)\nprint(json.load(urllib.request.urlopen(request)))` };
    byId("request").replaceChildren(...Object.entries(texts).map(([name, text]) => element("details", {}, element("summary", {}, name),
      element("pre", { style: "overflow: auto" }, text), button("Copy", () => navigator.clipboard?.writeText(text)))));
  }

  state.onChange((keys) => { if (keys.has("mode") || keys.has("model")) arrange(); });
  begin();
})();
