// A sortable table that a screen reader understands: tformer.table(host, {columns, rows, caption, sortable, limit}).
// columns: [{label, number: true, format(value)}] or plain labels; rows: arrays of values. → {redraw(changes)}
"use strict";
tformer.table = (host, settings) => {
  const { element } = tformer;
  let options = { sortable: true, limit: 2000, ...settings };
  let order = null; // {column, down}

  function compare(a, b) {
    const [x, y] = [a[order.column], b[order.column]];
    const missing = (value) => value === null || value === undefined || Number.isNaN(value);
    if (missing(x) || missing(y)) return missing(x) - missing(y); // last, whichever way
    const result = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return order.down ? -result : result;
  }

  function header(column, index) {
    const label = typeof column === "string" ? column : column.label;
    const cell = element("th", { scope: "col", class: column.number ? "number" : null });
    if (!options.sortable) {
      cell.append(label);
      return cell;
    }
    if (order && order.column === index) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
    const sort = () => {
      order = { column: index, down: order && order.column === index ? !order.down : Boolean(column.number) };
      draw();
      host.querySelectorAll("thead button")[index].focus();
    };
    cell.append(tformer.button(label, sort));
    return cell;
  }

  function draw() {
    const rows = order ? [...options.rows].sort(compare) : options.rows;
    const body = rows.slice(0, options.limit).map((row) => element("tr", {}, ...row.map((value, index) => {
      const column = options.columns[index];
      const text = column.format ? column.format(value) : typeof value === "number" ? tformer.number(value) : value ?? "–";
      return element("td", { class: column.number ? "number" : null, dir: column.number ? null : "auto" }, text);
    })));
    const table = element("table", {},
      element("caption", { class: "sr" }, options.caption || ""),
      element("thead", {}, element("tr", {}, ...options.columns.map(header))),
      element("tbody", {}, ...body));
    const parts = [element("div", { class: "table", tabindex: 0, role: "region", "aria-label": options.caption || "table" }, table)];
    if (rows.length > options.limit) {
      parts.push(element("p", { class: "help" }, `The first ${options.limit} of ${rows.length} rows; the CSV has all.`));
    }
    host.replaceChildren(...parts);
  }
  draw();
  return { redraw: (changes = {}) => { options = { ...options, ...changes }; draw(); } };
};
