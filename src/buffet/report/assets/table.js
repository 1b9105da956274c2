// A table that sorts by any column and shows its rows in portions.

// A column: name, cell(row) → text or node, key(row) → what to sort by, and optionally title, left, wrap,
// spare (gone on a phone), style(row) → class, first: "descending".
const kinds = column => ["left", "wrap", "spare"].filter(kind => column[kind]).join(" ") || null;

function makeTable({ caption, columns, rows, portion = 50, sort = null }) {
  const body = element("tbody");
  const more = element("button", {
    type: "button",
    class: "more",
    click: () => {
      shown += portion;
      draw();
    },
  });
  const heads = columns.map(column =>
    element(
      "th",
      { scope: "col", class: kinds(column), title: column.title },
      element("button", { type: "button", click: () => order(column) }, column.name),
    ),
  );
  let current = sort,
    shown = portion,
    ordered = rows;

  function order(column) {
    const again = current && current.column === column.name;
    const first = column.first ?? "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    current = { column: column.name, direction: again && current.direction === first ? other : first };
    shown = portion;
    draw();
  }

  function draw() {
    columns.forEach((column, number) => {
      if (current && current.column === column.name) heads[number].setAttribute("aria-sort", current.direction);
      else heads[number].removeAttribute("aria-sort");
    });
    if (current) {
      const key = columns.find(column => column.name === current.column).key;
      ordered = sorted(rows, key, current.direction === "ascending");
    }
    body.replaceChildren(
      ...ordered.slice(0, shown).map(row =>
        element(
          "tr",
          {},
          columns.map(column => {
            const kind = column.style ? `${kinds(column)} ${column.style(row)}` : kinds(column);
            return element("td", { class: kind }, column.cell(row));
          }),
        ),
      ),
    );
    more.hidden = shown >= ordered.length;
    more.textContent = `Show more (${(ordered.length - shown).toLocaleString("en")} left)`;
  }

  draw();
  const table = element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, heads)),
    body,
  );
  return element(
    "div",
    { class: "table" },
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table),
    more,
  );
}

// What is missing goes last, whichever way the rest is sorted.
function sorted(rows, key, ascending) {
  const sign = ascending ? 1 : -1;
  const missing = value => value === null || value === undefined;
  return rows
    .map(row => [key(row), row])
    .sort(([a], [b]) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      if (typeof a === "string") return sign * a.localeCompare(b);
      return sign * (a - b);
    })
    .map(([, row]) => row);
}
