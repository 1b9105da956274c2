// A sentence whose words are coloured by what is proven about them, with the numbers of each on demand.

// items: [{ words: rows that move, shade, title, lines: [[name, value], …], label }]; a word in several takes the weakest.
function wordMap(tokens, items, label) {
  const chips = makeChips(tokens, items, word => tokens[word]);
  return chipGroup(
    "words",
    label,
    chips,
    chips.flatMap(chip => [chip, " "]),
  );
}

// Every row as an element that shows face(row): with numbers if it moved, plain if not.
function makeChips(tokens, items, face) {
  const about = new Map();
  for (const item of items) {
    for (const word of item.words) {
      if (!about.has(word)) about.set(word, []);
      about.get(word).push(item);
    }
  }
  return tokens.map((token, word) => {
    const found = about.get(word);
    if (!found) return element("span", { class: "token" }, face(word));
    const weakest = found.reduce((a, b) => (b.shade < a.shade ? b : a));
    const spoken = found
      .slice(0, 4)
      .map(item => item.label)
      .join("; ");
    const chip = element(
      "button",
      {
        type: "button",
        class: `token chip s${weakest.shade}`,
        tabindex: "-1",
        "aria-label": `${token}: ${spoken}`,
      },
      face(word),
    );
    const show = () => {
      const lines = found
        .slice(0, 4)
        .flatMap(item => (found.length > 1 ? [[item.title, ""], ...item.lines] : item.lines));
      if (found.length > 4) lines.push(["", `and ${found.length - 4} more`]);
      tooltip.show(chip.getBoundingClientRect(), found.length > 1 ? token : found[0].title, lines);
    };
    for (const event of ["pointerenter", "focus", "click"]) chip.addEventListener(event, show);
    for (const event of ["pointerleave", "blur"]) chip.addEventListener(event, () => tooltip.hide());
    return chip;
  });
}

// One stop for Tab; the arrow keys go from chip to chip, up and down too where the chips are a grid.
function chipGroup(name, label, chips, children, columns = null) {
  const stops = chips.filter(chip => chip.classList.contains("chip"));
  if (stops.length) stops[0].tabIndex = 0;
  const across = (chip, step) => {
    let at = chips.indexOf(chip);
    do at += step;
    while (chips[at] && !stops.includes(chips[at]));
    return chips[at];
  };
  const move = event => {
    const from = document.activeElement;
    const at = stops.indexOf(from);
    if (at < 0) return;
    const to = {
      ArrowRight: stops[at + 1],
      ArrowLeft: stops[at - 1],
      Home: stops[0],
      End: stops.at(-1),
      ...(columns && { ArrowUp: across(from, -columns), ArrowDown: across(from, columns) }),
    }[event.key];
    if (!to) return;
    event.preventDefault();
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  };
  return element("div", { class: name, role: "group", "aria-label": label, keydown: move }, children);
}

// The ramp with the values at which one colour becomes the next.
function legend(edges, what) {
  const last = edges.length;
  const steps = Array.from({ length: last + 1 }, (_, step) =>
    element(
      "span",
      {},
      element("i", { class: `s${step}` }, { 0: "fragile", [last]: "robust" }[step] ?? ""),
      step < last ? element("b", {}, edges[step]) : null,
    ),
  );
  const spoken = `Colours of ${what}, from fragile to robust: below ${edges[0]} to above ${edges[last - 1]}`;
  return element(
    "div",
    { class: "legend", role: "img", "aria-label": spoken },
    element("span", {}, what),
    element("span", { class: "ramp" }, steps),
  );
}
