"use strict";
// Tables sort by their headers. The address remembers it: #sort=<table>:<column>:<ascending|descending>
const cell = (row, index) => {
  const text = row.cells[index].dataset.value;
  return row.cells[index].classList.contains("number") ? (text === "" ? NaN : Number(text)) : text;
};
const compare = (a, b) => {
  if (typeof a === "string") return a.localeCompare(b, undefined, { numeric: true });
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
  return a - b;
};
function sort(table, header, order) {
  const index = header.cellIndex;
  const sign = order === "descending" ? -1 : 1;
  const rows = Array.from(table.tBodies[0].rows);
  rows.sort((a, b) => {
    const x = cell(a, index), y = cell(b, index);
    const missing = Number.isNaN(x) || Number.isNaN(y); // what was not measured comes last in both orders
    return (missing ? 1 : sign) * compare(x, y) || a.dataset.place - b.dataset.place;
  });
  table.tBodies[0].append(...rows);
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
}
function follow() {
  const parts = /^#sort=([\w-]+):([\w-]+):(ascending|descending)$/.exec(location.hash);
  const table = parts && document.getElementById(parts[1]);
  const header = table && table.querySelector(`thead th[data-key="${parts[2]}"]`);
  if (!header) return;
  const details = table.closest("details");
  if (details) details.open = true;
  sort(table, header, parts[3]);
}
for (const table of document.querySelectorAll("table.sortable")) {
  Array.from(table.tBodies[0].rows).forEach((row, place) => { row.dataset.place = place; });
  for (const header of table.tHead.rows[0].cells) {
    header.querySelector("button").addEventListener("click", () => {
      const first = header.querySelector(".unit, .count") ? "descending" : "ascending";
      const now = header.getAttribute("aria-sort");
      const order = now ? (now === "ascending" ? "descending" : "ascending") : first;
      sort(table, header, order);
      history.replaceState(null, "", `#sort=${table.id}:${header.dataset.key}:${order}`);
    });
  }
}
addEventListener("hashchange", follow);
addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("details")) details.open = true; });
follow();
