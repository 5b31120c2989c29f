// The live part of the page of curves: progress, samples, and new data every two seconds.
"use strict";
(() => {
  const { data, element, number } = tformer;
  const byId = (id) => document.getElementById(id);
  const PAUSE = 2000;
  const clock = (seconds) => {
    if (seconds === null) return "–";
    const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  };
  const stepOf = ({ step, max_steps: all }) => step === null ? "–" : all === null ? number(step)
    : `${number(step)} of ${number(all)} (${Math.floor(100 * Math.min(1, step / all))} %)`;
  const columns = ["Run", "State", { label: "Step", number: true }, { label: "Time left", number: true, format: clock },
    { label: "Best", number: true }, { label: "Tokens per second", number: true }];
  const bestOf = ({ best }) => best && `${best.metric} ${number(best.value)}`;
  const rows = () => data.progress.map((run) => [run.name, run.state, stepOf(run), run.left, bestOf(run), run.tokens_per_second]);
  const table = tformer.table(byId("progress"), { caption: "Progress", columns, rows: rows() });

  function samples() {
    const shown = data.progress.filter(({ state, sample }) => state === "training" && sample !== "");
    byId("samples").replaceChildren(...shown.map(({ name, sample }) => element("section", {},
      element("h2", { dir: "auto" }, `Last sample of ${name}`), element("pre", { dir: "auto", style: "white-space: pre-wrap" }, sample))));
  }
  const say = (text) => { if (byId("live").textContent !== text) byId("live").textContent = text; };
  const training = () => {
    const n = data.progress.filter(({ state }) => state === "training").length;
    return n === 0 ? "No run is being trained." : n === 1 ? "One run is being trained." : `${n} runs are being trained.`;
  };

  // Controls are made from these; when they change, the page is loaded again, and its state stays in the URL.
  const outline = (of) => JSON.stringify([of.metrics, of.axes, of.second, of.runs.map(({ name, tracks }) => [name, Object.keys(tracks)])]);
  let [before, shape] = ["", outline(data)];
  async function ask() {
    try {
      const answer = await fetch(location.pathname.replace(/\/?$/, "/data"), { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text();
      if (text !== before) {
        const fresh = JSON.parse(text);
        if (outline(fresh) !== shape) return location.reload();
        [before, data.runs, data.summary, data.progress] = [text, fresh.runs, fresh.summary, fresh.progress];
        if (tformer.redraw) tformer.redraw(); // none before the first metrics
        table.redraw({ rows: rows() });
        samples();
      }
      say(training());
    } catch {
      say("The server does not answer; the figures are the last ones received.");
    }
    setTimeout(next, PAUSE);
  }
  // A page that nobody sees asks nothing.
  const next = () => document.hidden ? document.addEventListener("visibilitychange", next, { once: true }) : ask();
  say(training());
  samples();
  setTimeout(next, PAUSE);
})();
