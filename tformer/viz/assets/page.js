// The foundation of every page: its data, its state in the URL, its theme, and small helpers. One global: tformer.
"use strict";
const tformer = (() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("page-data").textContent);
  const colourData = JSON.parse(byId("colour-maps").textContent);

  function bytesOf(base64) {
    const text = atob(base64.trim());
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return bytes;
  }

  // Bytes embedded in the page, unpacked when first asked for.
  const blobs = new Map();
  function blob(name) {
    if (!blobs.has(name)) {
      const element = byId("blob-" + name);
      blobs.set(name, element === null ? Promise.reject(new Error("no blob " + name)) : unpack(element));
    }
    return blobs.get(name);
  }
  async function unpack(element) {
    const stream = new Blob([bytesOf(element.textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  // State: strings by key, mirrored in the URL's hash; get() gives the type of its fallback.
  let values = new Map();
  const listeners = [];
  let changed = new Set();
  let writing = null;
  const read = () => new Map(new URLSearchParams(location.hash.slice(1)));
  function get(key, fallback) {
    const text = values.get(key);
    if (text === undefined) return fallback;
    if (typeof fallback === "number") return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : fallback;
    if (typeof fallback === "boolean") return text === "true" || text === "1";
    return text;
  }
  function set(changes) {
    for (const [key, value] of Object.entries(changes)) {
      const text = value === null || value === undefined ? undefined : String(value);
      if (values.get(key) === text) continue;
      if (text === undefined) values.delete(key);
      else values.set(key, text);
      announce(key);
    }
  }
  function announce(key) {
    if (changed.size === 0) queueMicrotask(tell);
    changed.add(key);
    // A browser refuses more than some twenty changes of the URL a second.
    if (writing === null) writing = setTimeout(writeHash, 150);
  }
  function tell() {
    const keys = changed;
    changed = new Set();
    for (const listener of [...listeners]) listener(keys);
  }
  function writeHash() {
    writing = null;
    const hash = new URLSearchParams([...values]).toString();
    history.replaceState(null, "", hash === "" ? location.pathname + location.search : "#" + hash);
  }
  values = read();
  window.addEventListener("hashchange", () => {
    const before = values;
    values = read();
    for (const key of new Set([...before.keys(), ...values.keys()])) if (before.get(key) !== values.get(key)) announce(key);
  });
  window.addEventListener("pagehide", () => { if (writing !== null) writeHash(); });
  const state = { get, set, onChange: (listener) => { listeners.push(listener); } };

  // Theme: the system's, unless the button or the hash says otherwise.
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = {
    get: () => {
      const chosen = state.get("theme", "");
      return chosen === "dark" || chosen === "light" ? chosen : prefersDark.matches ? "dark" : "light";
    },
    set: (name) => state.set({ theme: name }),
  };
  function applyTheme() {
    document.documentElement.dataset.theme = theme.get();
    const button = byId("theme");
    const other = theme.get() === "dark" ? "Light" : "Dark";
    button.textContent = other;
    button.setAttribute("aria-label", "Switch to the " + other.toLowerCase() + " theme");
  }
  applyTheme();
  state.onChange((keys) => { if (keys.has("theme")) applyTheme(); });
  byId("theme").addEventListener("click", () => theme.set(theme.get() === "dark" ? "light" : "dark"));
  prefersDark.addEventListener("change", () => announce("theme"));
  const cssColour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // Colours: 256 × red, green, blue.
  const tables = new Map();
  function colours(name) {
    if (!tables.has(name)) tables.set(name, bytesOf(colourData.maps[name]));
    return tables.get(name);
  }
  function colourAt(name, share) {
    const at = 3 * Math.round(255 * Math.min(Math.max(share, 0), 1));
    const table = colours(name);
    return "#" + [0, 1, 2].map((c) => table[at + c].toString(16).padStart(2, "0")).join("");
  }

  // DOM: element("p", {class: "caption", onclick: f}, "text", child); text is always text, never HTML.
  function element(tag, attributes = {}, ...children) {
    const svg = ["svg", "g", "path", "line", "text", "rect", "circle", "title", "image", "defs", "pattern"].includes(tag);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (typeof value === "function") made.addEventListener(key.replace(/^on/, ""), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return made;
  }

  const GLYPHS = { " ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };
  // A token as text to show: white space as glyphs; controls, and what could reorder its surroundings, spelled out.
  function token(text) {
    if (text === "") return "∅";
    return text
      .replace(/[ \n\r\t\u00a0]/g, (c) => GLYPHS[c])
      .replace(/[\u0000-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff]/g,
        (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
  }

  // A number for people: at most four significant digits.
  function number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US").replace("-", "−");
    const size = Math.abs(value);
    const text = size >= 1e6 || size < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
    return text.replace(/-/g, "−");
  }

  function csv(rows) {
    const cell = (value) => {
      const text = value === null || value === undefined ? "" : String(value);
      return /[",\n\r]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
    };
    return rows.map((row) => row.map(cell).join(",") + "\n").join("");
  }

  // Save content (text, bytes, Blob, a promise or a function of one) as a file.
  async function download(name, mime, content) {
    const made = await (typeof content === "function" ? content() : content);
    const url = URL.createObjectURL(made instanceof Blob ? made : new Blob([made], { type: mime }));
    const link = element("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }

  const button = (label, action) => element("button", { type: "button", onclick: action }, label);

  return {
    data, blob, state, theme, colours, colourAt, palette: colourData.palette, cssColour,
    element, button, token, number, csv, download,
  };
})();
