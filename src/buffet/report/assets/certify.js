// The page of one sentence.

{
  const data = pageData();
  const bound = data.at_eps ? "proven margin" : `certified ${data.norm} radius`;
  const facts = task => [
    ...(data.at_eps
      ? [["verdict", task.verdict]]
      : [
          ["certified", task.texts.certified],
          ["attacked", task.texts.attacked],
        ]),
    ["margin", task.texts.margin],
  ];
  const items = data.tasks.map(task => ({
    words: task.words,
    shade: task.shade,
    title: task.text,
    lines: facts(task),
    label: facts(task)
      .map(([name, value]) => `${name} ${value}`)
      .join(", "),
  }));
  place("words").append(
    data.picture
      ? patchMap(data.picture, data.tokens, items, "The image; arrow keys go from patch to patch")
      : wordMap(data.tokens, items, "The sentence; arrow keys go from word to word"),
  );
  if (data.edges.length) place("words").append(legend(data.edges, bound));

  const values = data.at_eps ? [data.clean_margin] : data.tasks.flatMap(task => [task.certified, task.attacked ?? 0]);
  const axis = makeAxis(values, 100);
  const bars = data.tasks.map(task => {
    const proven = axis.at(task.strength);
    const tick = data.at_eps || task.attacked === null ? null : axis.at(task.attacked);
    const end = data.at_eps ? proven : tick === null ? 100 : Math.max(tick, proven);
    const note = data.at_eps
      ? `${task.verdict}, ${task.texts.margin}`
      : `${task.texts.certified} … ${task.texts.attacked}`;
    return { name: task.text, proven, end, tick, note, label: `${task.text}: ${note}` };
  });
  const name = data.at_eps
    ? "proven lower bound of the margin; the axis ends at the clean margin"
    : `radius (${data.norm})`;
  place("brackets").append(
    ...(data.at_eps ? [] : [bracketKey()]),
    bracketChart(bars, axis, axis.log ? `${name}, logarithmic` : name),
  );

  const columns = [
    { name: "#", left: true, cell: task => task.rows, key: task => task.words[0] },
    { name: data.unit, left: true, cell: task => task.text, key: task => task.text },
    ...(data.at_eps
      ? [
          {
            name: "verdict",
            left: true,
            cell: task => task.verdict,
            key: task => task.verdict,
            style: task => task.verdict,
          },
        ]
      : []),
    ...["certified", "attacked", "margin"].map(key => ({
      name: key,
      cell: task => task.texts[key],
      key: task => task[key],
    })),
    ...(data.tasks.some(task => task.nearest)
      ? [
          {
            name: "nearest words",
            title: "Words of the vocabulary in this place, and how far away their rows are",
            left: true,
            wrap: true,
            cell: task => task.nearest,
            key: task => task.away,
          },
        ]
      : []),
  ];
  place("numbers").append(
    makeTable({
      caption: `Every ${data.unit}`,
      columns,
      rows: data.tasks,
      portion: 200,
      sort: { column: "#", direction: "ascending" },
    }),
  );
}
