// Tables inside of .sortable sort by a click, or by Enter, on a heading: numbers by size, the rest by name, gaps last.
function sortBy(table, column) {
  const heads = [...table.querySelectorAll("th")], body = table.tBodies[0], rows = [...body.rows];
  const text = (row) => row.cells[column].textContent.trim();
  const numeric = rows.some((row) => Number.isFinite(parseFloat(text(row))));
  const before = heads[column].getAttribute("aria-sort");
  const down = before ? before === "ascending" : numeric; // numbers begin with the largest
  const value = (row) => (numeric ? parseFloat(text(row)) : text(row));
  const gap = (row) => numeric && !Number.isFinite(value(row));
  rows.sort((a, b) => {
    if (gap(a) || gap(b)) return gap(a) - gap(b);
    const order = numeric ? value(a) - value(b) : value(a).localeCompare(value(b));
    return down ? -order : order;
  });
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
}

function makeSortable() {
  document.querySelectorAll(".sortable table").forEach((table) => {
    table.querySelectorAll("th").forEach((head, column) => {
      head.tabIndex = 0;
      head.addEventListener("click", () => sortBy(table, column));
      head.addEventListener("keydown", (event) => event.key === "Enter" && sortBy(table, column));
    });
  });
}
document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", makeSortable) : makeSortable();
