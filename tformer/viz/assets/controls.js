// Labelled controls bound to the state: tformer.control(kind, options) → {element, get(), set(value), configure(options)}.
// kind: select | range | checkbox | number | text | buttons (one of several, as radio buttons).
// options: id (also the key of the state), label, value (the default), host (default #controls), help;
//   select, buttons: options = [[value, label], …]; range, number: min, max, step; log: true = a logarithmic slider;
//   integer: true = whole numbers.
"use strict";
tformer.control = (kind, settings) => {
  const { element, state } = tformer;
  let options = { ...settings };
  const host = options.host || document.getElementById("controls");
  const fallback = () => options.value;
  const isNumber = kind === "range" || kind === "number";
  const inputs = [];

  const clamp = (value) => {
    let result = Math.min(Math.max(value, options.min ?? -Infinity), options.max ?? Infinity);
    if (options.integer || (options.step && !options.log && Number.isInteger(options.step))) {
      const step = options.log ? 1 : options.step || 1;
      const start = options.min ?? 0;
      result = start + Math.round((result - start) / step) * step;
      if (result > (options.max ?? Infinity)) result -= step;
    }
    return result;
  };
  const get = () => {
    const found = state.get(options.id, fallback());
    if (isNumber) return clamp(found);
    if (kind === "select" || kind === "buttons") {
      return options.options.some(([value]) => String(value) === String(found)) ? found : fallback();
    }
    return found;
  };
  const set = (value) => state.set({ [options.id]: String(value) === String(fallback()) ? null : value });

  // A logarithmic slider runs over 0 … 1000.
  const toSlider = (value) =>
    options.log ? (1000 * Math.log(value / options.min)) / Math.log(options.max / options.min) : value;
  const fromSlider = (place) => {
    if (!options.log) return place;
    const exact = options.min * (options.max / options.min) ** (place / 1000);
    return clamp(Number(exact.toPrecision(3)));
  };

  const change = (read) => (event) => {
    const value = read(event.target);
    if (isNumber && (event.target.value === "" || !Number.isFinite(value))) return;
    set(isNumber ? clamp(value) : value);
  };
  let box;
  if (kind === "checkbox") {
    const input = element("input", { type: "checkbox", id: options.id, onchange: change((target) => target.checked) });
    inputs.push(input);
    box = element("div", { class: "control check" }, input, element("label", { for: options.id }, options.label));
  } else if (kind === "select") {
    const input = element("select", { id: options.id, onchange: change((target) => target.value) });
    inputs.push(input);
    box = element("div", { class: "control" }, element("label", { for: options.id }, options.label), input);
  } else if (kind === "buttons") {
    const choices = element("div", { class: "choices", id: options.id, role: "radiogroup", "aria-label": options.label });
    inputs.push(choices);
    box = element("fieldset", { class: "control" }, element("legend", {}, options.label), choices);
  } else if (kind === "range") {
    const slider = element("input", { type: "range", id: options.id, oninput: change((t) => fromSlider(Number(t.value))) });
    const exact = element("input", {
      type: "number", id: options.id + "-number", "aria-label": options.label + ", exact value",
      onchange: change((target) => Number(target.value)),
    });
    inputs.push(slider, exact);
    const pair = element("div", { class: "pair" }, slider, exact);
    box = element("div", { class: "control" }, element("label", { for: options.id }, options.label), pair);
  } else {
    const read = kind === "number" ? (target) => Number(target.value) : (target) => target.value;
    const input = element("input", { type: kind, id: options.id, onchange: change(read) });
    inputs.push(input);
    box = element("div", { class: "control" }, element("label", { for: options.id }, options.label), input);
  }
  if (options.help) {
    const help = element("span", { class: "help", id: options.id + "-help" }, options.help);
    inputs[0].setAttribute("aria-describedby", help.id);
    box.append(help);
  }

  function show() {
    const value = get();
    if (kind === "checkbox") inputs[0].checked = value;
    else if (kind === "buttons") {
      for (const input of inputs[0].querySelectorAll("input")) input.checked = input.value === String(value);
    } else if (kind === "range") {
      inputs[0].value = toSlider(value);
      inputs[0].setAttribute("aria-valuetext", tformer.number(value));
      inputs[1].value = value;
    } else inputs[0].value = value;
  }
  // New bounds or choices; the value follows.
  function configure(changes) {
    options = { ...options, ...changes };
    if (kind === "select") {
      inputs[0].replaceChildren(...options.options.map(([value, label]) => element("option", { value }, label)));
    } else if (kind === "buttons") {
      inputs[0].replaceChildren(...options.options.map(([value, label]) => element("label", {},
        element("input", { type: "radio", name: options.id, value, onchange: change((target) => target.value) }), label)));
    } else if (kind === "range") {
      const bounds = options.log ? { min: 0, max: 1000, step: 1 } : { min: options.min, max: options.max, step: options.step || 1 };
      Object.assign(inputs[0], bounds);
      Object.assign(inputs[1], { min: options.min, max: options.max, step: options.integer ? 1 : options.log ? "any" : options.step || 1 });
    } else if (kind === "number") {
      for (const key of ["min", "max", "step"]) if (options[key] !== undefined) inputs[0][key] = options[key];
    }
    show();
  }
  configure({});
  state.onChange((keys) => { if (keys.has(options.id)) show(); });
  host.append(box);
  return { element: box, get, set, configure };
};
