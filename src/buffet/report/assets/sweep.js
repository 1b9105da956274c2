// The page of a sweep: a filter, and sections that are drawn again when it changes.

{
  const data = pageData();
  const prepared = (columns, rows) => {
    const found = records(columns, rows);
    for (const row of found) {
      row.model = data.sentences[row.sentence].model;
      row.task = `${row.sentence} ${row.norm} ${row.words}`;
    }
    return found;
  };
  const rows = prepared(data.columns, data.rows);
  const failures = prepared(data.failure_columns, data.failures);
  compare(rows, data.reference);

  const filter = place("filter"),
    cardsAtOnce = 10;
  const choice = name => (filter.elements[name].value === "" ? null : Number(filter.elements[name].value));
  const lower = data.sentences.map(sentence => sentence.text.toLowerCase());
  for (const [name, values] of [
    ["model", data.models],
    ["norm", data.norms],
    ["method", data.methods],
  ]) {
    filter.elements[name].append(...values.map((value, number) => element("option", { value: number }, value)));
    filter.elements[name].closest("label").hidden = values.length < 2;
  }

  function allowed() {
    const [model, norm, method, text] = [
      choice("model"),
      choice("norm"),
      choice("method"),
      filter.elements.text.value.trim().toLowerCase(),
    ];
    return row =>
      (model === null || row.model === model) &&
      (norm === null || row.norm === norm) &&
      (method === null || row.method === method) &&
      (text === "" || lower[row.sentence].includes(text));
  }

  // A section without content says so, or disappears if there is none of it at all.
  function show(id, content) {
    const nodes = [content].flat().filter(Boolean);
    place(id).replaceChildren(
      ...(nodes.length ? nodes : [element("p", { class: "empty" }, "Nothing to show for this filter.")]),
    );
  }

  let shown = [],
    best = [];

  function drawCharts() {
    show("trade-off", tradeOff(data, shown, place("trade-off")));
    show("scatters", scatters(data, shown, place("scatters")));
    show("boxes", ratioBoxes(data, shown, place("boxes")));
    show("brackets", best.length ? [bracketKey(), bracketPanels(data, best, place("brackets"))] : []);
  }

  function drawCards() {
    const sentences = [...groupBy(best, row => row.sentence).entries()].sort(([a], [b]) => a - b);
    const list = element("div", { class: "cards" });
    let next = 0;
    const more = element("button", { type: "button", class: "more" });
    const add = () => {
      list.append(
        ...sentences.slice(next, next + cardsAtOnce).map(([number, group]) => sentenceCard(data, number, group)),
      );
      next += cardsAtOnce;
      more.hidden = next >= sentences.length;
      more.textContent = `Show more (${(sentences.length - next).toLocaleString("en")} sentences left)`;
    };
    more.addEventListener("click", add);
    add();
    show("sentences", sentences.length ? [legends(data, best), list, more] : []);
  }

  function draw() {
    const passes = allowed();
    tooltip.hide();
    shown = rows.filter(passes);
    best = bestOf(shown);
    place("status").textContent = `${shown.length.toLocaleString("en")} of ${plural(rows.length, "answer")}`;
    const method = choice("method");
    for (const node of document.querySelectorAll(".whose")) {
      node.textContent = method === null ? "the best of the methods shown" : data.methods[method];
    }
    show("methods", shown.length ? methodsTable(data, shown, failures.filter(passes)) : []);
    drawCharts();
    drawCards();
    show("weakest", best.length ? weakest(data, best) : []);
    show("slowest", shown.length ? slowest(data, shown) : []);
    if (failures.length) show("failures", failures.some(passes) ? failureTable(data, failures.filter(passes)) : []);
  }

  let waiting = 0;
  filter.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(draw, 120);
  });
  filter.addEventListener("submit", event => event.preventDefault());
  filter.addEventListener("reset", () => setTimeout(draw, 0));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      requestAnimationFrame(drawCharts);
    }
  });
  draw();
}
