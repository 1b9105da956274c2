// The sections of the page of a sweep: each takes what the filter lets through and returns nodes.

// Small charts side by side, as many as fit; each drawer gets the width of one.
function panels(area, drawers) {
  const wide = Math.max(area.clientWidth, 280),
    gap = 28;
  const columns = Math.max(1, Math.min(3, drawers.length, Math.floor((wide + gap) / (250 + gap))));
  const width = (wide - gap * (columns - 1)) / columns;
  const grid = element(
    "div",
    { class: "panels" },
    drawers.map(draw => draw(width)),
  );
  grid.style.setProperty("--columns", columns);
  return grid;
}

const figure = (title, ...children) => element("figure", {}, element("figcaption", {}, title), ...children);
const moved = (data, row) => row.words.map(word => data.sentences[row.sentence].tokens[word]).join(" + ");
const setting = (data, row) =>
  [data.models.length > 1 ? data.models[row.model] : null, data.norms[row.norm]].filter(Boolean).join(" · ");
const radiusName = (data, rows) => {
  const norms = [...new Set(rows.map(row => row.norm))];
  return norms.length === 1 ? `radius (${data.norms[norms[0]]})` : "radius";
};

function methodsTable(data, rows, failures) {
  const key = row => `${row.model} ${row.norm} ${row.method}`;
  const failed = groupBy(
    failures.filter(row => row.status !== "ok"),
    key,
  );
  const lines = [...groupBy(rows, key).entries()].map(([name, group]) =>
    summaryLine(group, (failed.get(name) ?? []).length, data),
  );
  lines.sort((a, b) => a.model - b.model || a.norm - b.norm || a.method - b.method);
  const highest = Math.max(...lines.map(line => line.mean ?? 0), 1);
  const number = (name, field, text, title, first = "descending") => ({
    name,
    title,
    first,
    key: line => line[field],
    cell: line => text(line[field]),
  });
  const columns = [
    ...(data.models.length > 1 ? [column("model", line => data.models[line.model])] : []),
    column("norm", line => data.norms[line.norm]),
    column("method", line => data.methods[line.method]),
    { ...number("tasks", "tasks", value => value.toLocaleString("en"), "Answered tasks"), spare: true },
    ...(lines.some(line => line.failed) ? [number("failed", "failed", String, "Tasks without an answer")] : []),
    {
      name: "",
      title: "Mean ratio",
      left: true,
      spare: true,
      key: line => line.mean,
      cell: line =>
        line.mean === null
          ? ""
          : bracketBar({
              proven: (100 * line.mean) / highest,
              end: 0,
              tick: 100 / highest,
              label: `${floored(line.mean, 3)} times`,
            }),
    },
    number(
      "mean ×",
      "mean",
      value => floored(value, 3),
      "Certified radius divided by the reference's, mean over the tasks both answered",
    ),
    number("median ×", "median", value => floored(value, 3), "The same, median"),
    number("worst ×", "worst", value => floored(value, 3), "The same, smallest"),
    number("cert./att.", "bracket", value => floored(value, 3), "Certified divided by attacked radius, mean"),
    number(`≥ ${data.fair}`, "fair", percent, `Tasks with certified / attacked of at least ${data.fair}`),
    number(`≥ ${data.good}`, "good", percent, `Tasks with certified / attacked of at least ${data.good}`),
    number("time", "seconds", seconds, "Seconds of proofs, all tasks"),
    number(
      "time ×",
      "time",
      value => (value === null ? "–" : value.toFixed(2)),
      "Time divided by the reference's, over the tasks both answered",
    ),
  ];
  return makeTable({ caption: "Radius and time by method", columns, rows: lines, portion: 60 });
}

// Methods far below the reference would squeeze all others: they are named instead of drawn.
const FAINT = 0.1;

function faintNote(faint, what) {
  if (!faint.length) return null;
  return element(
    "p",
    { class: "note" },
    `Below ${FAINT} × and not drawn: ${faint.map(([name, value]) => `${name} (${what} ${value.toPrecision(2)} ×)`).join(", ")}`,
  );
}

function tradeOff(data, rows, area) {
  const points = [...groupBy(rows, row => row.method).entries()]
    .map(([method, group]) => {
      const line = summaryLine(group, 0, data),
        name = data.methods[method];
      return {
        name,
        x: line.time,
        y: line.mean,
        tip: `${name}: ${floored(line.mean, 3)} × the radius, ${line.time?.toFixed(2)} × the time`,
      };
    })
    .filter(point => point.x > 0 && point.y !== null);
  const drawn = points.filter(point => point.y >= FAINT);
  if (drawn.length < 2) return null;
  const width = Math.max(area.clientWidth, 280),
    reference = data.methods[data.reference];
  const chart = namedPoints(drawn, {
    width,
    height: Math.min(360, width * 0.8),
    xName: `time, × ${reference}`,
    yName: `mean radius, × ${reference}`,
    label: "Mean radius against time of every method, both relative to the reference; the table has the numbers",
  });
  return [
    chart,
    faintNote(
      points.filter(point => point.y < FAINT).map(point => [point.name, point.y]),
      "mean",
    ),
  ];
}

function scatters(data, rows, area) {
  const reference = data.methods[data.reference];
  const compared = rows.filter(row => row.against && row.method !== data.reference);
  const groups = [...groupBy(compared, row => row.method).entries()].sort(([a], [b]) => a - b);
  const draw =
    ([method, group]) =>
    width => {
      const name = data.methods[method],
        above = group.filter(row => row.certified > row.against.certified).length;
      const points = group.map(row => ({
        x: row.against.certified,
        y: row.certified,
        tip: () => [
          `${moved(data, row)} (${setting(data, row)})`,
          [
            ["attacked", row.texts[1]],
            ["certified by", ""],
            [name, row.texts[0]],
            [reference, row.against.texts[0]],
          ],
        ],
      }));
      const side = Math.min(width, 420);
      return figure(
        name,
        scatterPlot(points, {
          width: side,
          height: side,
          xName: `${reference}: ${radiusName(data, group)}`,
          yName: name,
          label: `Certified radius of ${name} against ${reference}: larger in ${above} of ${group.length} tasks`,
        }),
        element("p", { class: "note" }, `larger in ${above.toLocaleString("en")} of ${plural(group.length, "task")}`),
      );
    };
  return groups.length ? panels(area, groups.map(draw)) : null;
}

function ratioBoxes(data, rows, area) {
  const groups = [
    ...groupBy(
      rows.filter(row => row.ratio !== null && row.method !== data.reference),
      row => row.method,
    ).entries(),
  ]
    .sort(([a], [b]) => a - b)
    .map(([method, group]) => {
      const values = group.map(row => row.ratio),
        ordered = [...values].sort((a, b) => a - b),
        name = data.methods[method];
      const figures = [0, 0.25, 0.5, 0.75, 1].map(share => floored(quantile(ordered, share), 3)).join(", ");
      const tip = `${name}, ${plural(values.length, "task")}: smallest, quartiles, largest ${figures}`;
      return { name, values, middle: quantile(ordered, 0.5), tip };
    });
  const drawn = groups.filter(group => group.middle >= FAINT);
  if (!drawn.length) return null;
  const reference = data.methods[data.reference];
  const label = `Certified radius divided by that of ${reference}: ${drawn.map(group => group.tip).join("; ")}`;
  const chart = boxPlots(drawn, {
    width: Math.max(area.clientWidth, 280),
    least: FAINT,
    xName: `certified radius, × ${reference}`,
    label,
  });
  return [
    chart,
    faintNote(
      groups.filter(group => group.middle < FAINT).map(group => [group.name, group.middle]),
      "median",
    ),
  ];
}

function bracketPanels(data, best, area) {
  const groups = [...groupBy(best, row => `${row.model} ${row.norm}`).values()];
  const size = row => row.attacked ?? Infinity;
  const draw = group => width => {
    const ordered = [...group].sort((a, b) => (size(a) === size(b) ? a.certified - b.certified : size(a) - size(b)));
    return figure(
      setting(data, group[0]),
      bracketColumns(ordered, {
        width,
        height: Math.max(240, Math.min(width * 0.8, 320)),
        xName: `${plural(group.length, "task")}, by attacked radius`,
        yName: `radius (${data.norms[group[0].norm]})`,
        label: `Certified and attacked radius of ${plural(group.length, "task")}; the table of tasks has the numbers`,
      }),
    );
  };
  return panels(area, groups.sort((a, b) => a[0].model - b[0].model || a[0].norm - b[0].norm).map(draw));
}

// One sentence of one model: a line of words per norm.
function sentenceCard(data, number, best) {
  const sentence = data.sentences[number];
  const lines = [...groupBy(best, row => row.norm).entries()]
    .sort(([a], [b]) => a - b)
    .map(([norm, group]) => {
      const items = group.map(row => {
        const answers = [...row.answers].sort((a, b) => b.certified - a.certified).slice(0, 6);
        return {
          words: row.words,
          shade: row.shade,
          title: `${moved(data, row)} (${data.norms[norm]})`,
          lines: [
            ["attacked", row.texts[1]],
            ["certified by", ""],
            ...answers.map(answer => [data.methods[answer.method], answer.texts[0]]),
          ],
          label: `certified ${row.texts[0]}, attacked ${row.texts[1]}`,
        };
      });
      return [
        element("span", { class: "norm" }, data.norms[norm]),
        wordMap(sentence.tokens, items, `${data.norms[norm]}: ${sentence.text}`),
      ];
    });
  const about = [
    data.models.length > 1 ? data.models[sentence.model] : null,
    sentence.label,
    `margin ${sentence.margin}`,
  ];
  return element(
    "article",
    { class: "card" },
    element("div", { class: "lines" }, lines),
    element("p", { class: "note" }, about.filter(Boolean).join(" · ")),
  );
}

function legends(data, best) {
  const wanted = new Set(best.map(row => `${row.model} ${row.norm}`));
  const found = data.edges
    .filter(([model, norm]) => wanted.has(`${model} ${norm}`))
    .map(([model, norm, edges]) => legend(edges, `certified radius, ${setting(data, { model, norm })}`));
  const all = element("div", { class: "legends" }, found);
  return found.length > 4
    ? element("details", {}, element("summary", {}, "What the colours mean, by model and norm"), all)
    : all;
}

const column = (name, text, more = {}) => ({ name, left: true, key: text, cell: text, ...more });
const settingColumns = (data, spare) => [
  column("sentence", row => data.sentences[row.sentence].text, {
    spare,
    cell: row =>
      element("span", { class: "clip", title: data.sentences[row.sentence].text }, data.sentences[row.sentence].text),
  }),
  column("norm", row => setting(data, row)),
  column("method", row => data.methods[row.method]),
];
const taskColumns = data => [column("words", row => moved(data, row)), ...settingColumns(data, true)];

function weakest(data, best) {
  const columns = [
    ...taskColumns(data),
    { name: "certified", key: row => row.certified, cell: row => row.texts[0] },
    { name: "attacked", key: row => row.attacked, cell: row => row.texts[1] },
    { name: "cert./att.", key: bracket, cell: row => floored(bracket(row), 3) },
    {
      name: "",
      title: "Certified as a part of attacked",
      left: true,
      key: bracket,
      cell: row =>
        row.attacked > 0
          ? bracketBar({
              proven: 100 * Math.min(bracket(row), 1),
              end: 100,
              tick: 100,
              label: `${percent(bracket(row))} of the attacked radius`,
            })
          : "",
    },
  ];
  const column = best.some(row => row.attacked > 0) ? "cert./att." : "certified";
  return makeTable({
    caption: "Weakest tasks",
    columns,
    rows: best,
    portion: 10,
    sort: { column, direction: "ascending" },
  });
}

// The words of a sentence run together, so time is that of a whole batch.
function slowest(data, rows) {
  const batches = [...groupBy(rows, row => `${row.sentence} ${row.norm} ${row.method}`).values()].map(group => ({
    ...group[0],
    tasks: group.length,
    seconds: group.reduce((sum, row) => sum + row.seconds, 0),
  }));
  const columns = [
    ...settingColumns(data, false),
    { name: "tasks", first: "descending", key: batch => batch.tasks, cell: batch => String(batch.tasks) },
    { name: "seconds", first: "descending", key: batch => batch.seconds, cell: batch => batch.seconds.toPrecision(3) },
    {
      name: "per task",
      first: "descending",
      key: batch => batch.seconds / batch.tasks,
      cell: batch => (batch.seconds / batch.tasks).toPrecision(3),
    },
  ];
  return makeTable({
    caption: "Slowest batches of tasks",
    columns,
    rows: batches,
    portion: 10,
    sort: { column: "seconds", direction: "descending" },
  });
}

function failureTable(data, rows) {
  const columns = [
    ...taskColumns(data),
    column("status", row => (row.status === "ok" ? "answered" : row.status)),
    column("reason", row => row.reason ?? "–", { wrap: true }),
  ];
  return makeTable({ caption: "Tasks with trouble", columns, rows, portion: 20 });
}
