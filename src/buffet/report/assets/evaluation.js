// The page of an evaluation: the curve, a filter, and the sentences that it lets through.

// points: [{ at, text, certified, attacked, clean, low, high, tip }], `at` from 0 to 1; shares are of one.
function accuracyChart(points, { width, height, xName, label }) {
  const w = width - EDGE.left - EDGE.right,
    h = height - EDGE.top - EDGE.bottom,
    bottom = height - EDGE.bottom;
  const thick = Math.min(34, Math.max(4, (w / points.length) * 0.5)),
    inset = thick / 2 + 6;
  const x = point => EDGE.left + inset + point.at * (w - 2 * inset);
  const y = share => bottom - share * h;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map(value => ({ at: value * h, text: String(value) }));
  const parts = frame(width, height, { y: { ticks }, xName, yName: "share of sentences" });
  const column = (kind, at, from, to, stroke) =>
    shape("path", { class: kind, d: `M${fixed(at)} ${fixed(from)}V${fixed(to)}`, "stroke-width": fixed(stroke) });
  for (const point of points) {
    const at = x(point);
    parts.push(
      shape(
        "g",
        {},
        shape("title", {}, point.tip),
        column("open", at, y(point.certified), y(point.attacked), thick),
        column("proven", at, bottom, y(point.certified), thick),
        column("attack", at, y(point.attacked) + 1, y(point.attacked) - 1, thick),
        point.low === null ? null : column("base", at, y(point.low), y(point.high), 1),
      ),
    );
  }
  // Names of levels that would touch are left out.
  let end = -Infinity;
  for (const point of points) {
    const half = point.text.length * 3.6;
    if (x(point) - half < end + 6) continue;
    end = x(point) + half;
    parts.push(write("tick", x(point), bottom + 16, point.text, { "text-anchor": "middle" }));
  }
  parts.push(line("equal", EDGE.left, y(points[0].clean), width - EDGE.right, y(points[0].clean)));
  return canvas(width, height, label, parts);
}

{
  const data = pageData();
  const rows = records(data.columns, data.rows);
  const filter = place("filter"),
    last = data.levels.length - 1;
  const OUTCOMES = ["certified", "open", "falsified", "wrong", "refused", "failed"];
  filter.elements.level.append(...data.levels.map((text, number) => element("option", { value: number }, text)));
  filter.elements.level.closest("label").hidden = last === 0;
  filter.elements.outcome.append(...OUTCOMES.map(name => element("option", { value: name }, name)));
  for (const row of rows) row.lower = row.text.toLowerCase();

  let level = last;
  const outcome = row =>
    row.state !== "right" ? row.state : row.verdicts[level] === "unknown" ? "open" : row.verdicts[level];
  const kinds = { certified: "certified", falsified: "falsified", open: "unknown" };

  function drawCurve() {
    const area = place("curve"),
      width = Math.min(Math.max(area.clientWidth, 280), 720);
    const largest = Math.max(...data.sizes);
    const points = data.curve.map((at, number) => {
      const [clean, certified, attacked, open] = at.texts;
      return {
        at: last === 0 ? 0.5 : data.sizes[number] / largest,
        text: data.levels[number],
        clean: at.clean.share,
        certified: at.certified.share,
        attacked: at.attacked.share,
        low: at.certified.interval ? at.certified.interval[0] : null,
        high: at.attacked.interval ? at.attacked.interval[1] : null,
        tip: `${data.axis} ${data.levels[number]}: certified ${certified}, under attack ${attacked}, open ${open}, clean ${clean}`,
      };
    });
    const columns = [
      { name: data.axis, left: true, key: point => point.place, cell: point => data.levels[point.place] },
      ...["clean", "certified", "under attack", "open"].map((name, number) => ({
        name,
        first: "descending",
        key: point => data.curve[point.place][["clean", "certified", "attacked", "open"][number]].share,
        cell: point => data.curve[point.place].texts[number],
      })),
    ];
    area.replaceChildren(
      bracketKey(),
      accuracyChart(points, {
        width,
        height: Math.min(320, width * 0.75),
        xName: data.axis,
        label: points.map(point => point.tip).join("; "),
      }),
      makeTable({ caption: "Accuracies", columns, rows: data.levels.map((_, number) => ({ place: number })) }),
    );
  }

  const text = (name, field, more = {}) => ({ name, left: true, key: row => row[field], cell: row => row[field], ...more });
  const sentence = text("sentence", "text", { wrap: true });
  const number = (name, field, shown, more = {}) => ({ name, key: row => row[field], cell: shown, ...more });
  const clean = number("clean margin", "clean", row => row.texts.clean);
  const seconds = number("seconds", "seconds", row => (row.seconds === null ? "—" : row.seconds.toFixed(2)), {
    first: "descending",
    spare: true,
  });
  const proven = {
    name: "proven margin",
    key: row => row.margins[level],
    cell: row => row.texts.margins[level] ?? "—",
  };

  function show(id, found, columns, sort, portion = 20) {
    place(id).replaceChildren(
      found.length
        ? makeTable({ caption: id, columns, rows: found, portion, sort })
        : element("p", { class: "empty" }, "Nothing to show for this filter."),
    );
  }

  function draw() {
    tooltip.hide();
    level = Number(filter.elements.level.value);
    const [wanted, contains] = [filter.elements.outcome.value, filter.elements.text.value.trim().toLowerCase()];
    const shown = rows.filter(row => (wanted === "" || outcome(row) === wanted) && row.lower.includes(contains));
    place("status").textContent = `${shown.length.toLocaleString("en")} of ${plural(rows.length, "sentence")}`;
    const broken = shown.filter(row => outcome(row) === "falsified").sort((a, b) => a.broken - b.broken || a.clean - b.clean);
    const changed = [
      text("change", "change", { wrap: true }),
      number("margin", "flip_margin", row => row.texts.flip),
    ];
    const becomes = data.kind === "at_most" ? [text("becomes", "flipped", { wrap: true })] : [];
    const breaks = { name: "breaks at", key: row => row.broken, cell: row => data.levels[row.broken] };
    show("hardest", broken, [...changed, ...(last ? [breaks] : []), sentence, ...becomes], null);
    const open = shown.filter(row => outcome(row) === "open");
    show("open", open, [sentence, clean, seconds, text("reason", "reason", { wrap: true })], null);
    const answers = [
      text("label", "label", { spare: true }),
      text("answer", "answer", { spare: true }),
      { name: "outcome", left: true, key: outcome, cell: outcome, style: row => kinds[outcome(row)] ?? "" },
    ];
    show("all", shown, [sentence, ...answers, proven, clean, seconds], null);
  }

  filter.addEventListener("input", draw);
  filter.addEventListener("submit", event => event.preventDefault());
  filter.addEventListener("reset", () =>
    setTimeout(() => {
      filter.elements.level.value = last;
      draw();
    }),
  );
  filter.elements.level.value = last;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) drawCurve();
    width = innerWidth;
  });
  drawCurve();
  draw();
}
