// The guide: a search over the sections of all topics, and places of the page that the URL names beside the theme.
"use strict";
(() => {
  const { element, state } = tformer;
  const query = document.getElementById("query");
  const found = document.getElementById("found");
  const text = document.getElementById("text");
  const SHOWN = 30;
  const BEFORE = 60;
  const AFTER = 160;

  // A place of this page, or the search of a page before: #early-stopping&theme=dark, #q=early stopping.
  function go() {
    query.value = state.get("q", "");
    search();
    document.getElementById(location.hash.slice(1).split("&")[0])?.scrollIntoView();
  }

  // The theme goes with the reader to the next page.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href]");
    const theme = state.get("theme", "");
    if (link === null || theme === "" || link.protocol !== location.protocol) return;
    link.hash = [link.hash.slice(1).split("&")[0], "theme=" + theme].filter((part) => part !== "").join("&");
  });

  // Words are found where a word begins; headings come first, then texts with all of them in a row.
  const safe = (word) => (/^\w/.test(word) ? "\\b" : "") + word.replace(/[^\w\s]/g, "\\$&");
  async function search() {
    const words = query.value.split(/\s+/).filter((word) => word !== "").map(safe);
    const sections = JSON.parse(new TextDecoder().decode(await tformer.blob("guide")));
    found.hidden = words.length === 0;
    text.hidden = !found.hidden;
    if (found.hidden) return;
    const patterns = words.map((word) => new RegExp(word, "i"));
    const phrase = new RegExp(words.join("\\W+"), "i");
    const score = ({ heading, body }) => 4 * phrase.test(heading) + 2 * phrase.test(body) +
      patterns.filter((pattern) => pattern.test(heading)).length / words.length;
    const matches = sections
      .map(([topic, anchor, heading, title, body]) => ({ topic, anchor, heading, title, body }))
      .filter((one) => patterns.every((pattern) => pattern.test(one.heading) || pattern.test(one.body)));
    matches.sort((a, b) => score(b) - score(a));
    const count = matches.length === 1 ? "1 section" : matches.length + " sections";
    const more = matches.length > SHOWN ? ", the first " + SHOWN + " shown" : "";
    found.replaceChildren(element("p", { class: "caption" }, count + more), ...matches.slice(0, SHOWN).map(shown));

    function shown(one) {
      const href = one.topic + ".html" + (one.anchor === "" ? "" : "#" + one.anchor);
      const place = one.anchor === "" ? [] : [" ", element("span", { class: "caption" }, one.title)];
      return element("div", { class: "hit" },
        element("p", {}, element("a", { href, onclick: leave }, one.heading), ...place), excerpt(one));
    }
    function excerpt(one) {
      const at = [phrase, ...patterns].map((pattern) => one.body.search(pattern)).find((place) => place >= 0) ?? 0;
      const start = at > BEFORE ? one.body.indexOf(" ", at - BEFORE) + 1 : 0;
      const end = start + BEFORE + AFTER < one.body.length ? one.body.lastIndexOf(" ", start + BEFORE + AFTER) : one.body.length;
      const piece = one.body.slice(start, end);
      const parts = piece.split(new RegExp("(" + words.join("|") + ")", "i"));
      const marked = parts.map((part, index) => (index % 2 === 1 ? element("mark", {}, part) : part));
      return element("p", {}, start > 0 ? "… " : "", ...marked, end < one.body.length ? " …" : "");
    }
  }
  // A link to this page itself shows its text again.
  function leave() {
    query.value = "";
    state.set({ q: null });
    found.hidden = true;
    text.hidden = false;
  }
  query.addEventListener("input", () => { state.set({ q: query.value || null }); search(); });
  query.addEventListener("keydown", (event) => { if (event.key === "Escape") { leave(); } });
  window.addEventListener("hashchange", go);
  go();
})();
