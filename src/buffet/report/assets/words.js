// A sentence whose words are coloured by what is proven about them, with the numbers of each on demand.

// items: [{ words: rows that move, shade, title, lines: [[name, value], …], label }]; a word in several takes the weakest.
function wordMap(tokens, items, label) {
  const about = new Map();
  for (const item of items) {
    for (const word of item.words) {
      if (!about.has(word)) about.set(word, []);
      about.get(word).push(item);
    }
  }
  const chips = tokens.map((token, word) => {
    const found = about.get(word);
    if (!found) return element("span", { class: "token" }, token);
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
      token,
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
  const stops = chips.filter(chip => chip.classList.contains("chip"));
  if (stops.length) stops[0].tabIndex = 0;
  // One stop for Tab; the arrow keys go from word to word.
  const move = event => {
    const at = stops.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: stops.length - 1 }[event.key];
    if (at < 0 || to === undefined || !stops[to]) return;
    event.preventDefault();
    stops[at].tabIndex = -1;
    stops[to].tabIndex = 0;
    stops[to].focus();
  };
  return element(
    "div",
    { class: "words", role: "group", "aria-label": label, keydown: move },
    chips.flatMap(chip => [chip, " "]),
  );
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
