// What the table of methods says: the same figures as `buffet summary`, over the rows that are shown.

const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;

function quantile(sorted, share) {
  const at = share * (sorted.length - 1),
    below = Math.floor(at);
  return sorted[below] + (sorted[Math.min(below + 1, sorted.length - 1)] - sorted[below]) * (at - below);
}

const ifAny = (values, figure) => (values.length ? figure(values) : null);
const shareOf = (values, least) => values.filter(value => value >= least).length / values.length;
const bracket = row => (row.attacked > 0 ? row.certified / row.attacked : null);

// Every row with the reference's answer to the same task, where there is one.
function compare(rows, reference) {
  const against = new Map();
  for (const row of rows) if (row.method === reference) against.set(row.task, row);
  for (const row of rows) {
    row.against = against.get(row.task) ?? null;
    row.ratio = row.against && row.against.certified > 0 ? row.certified / row.against.certified : null;
  }
}

function groupBy(rows, key) {
  const groups = new Map();
  for (const row of rows) {
    const name = key(row);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return groups;
}

function summaryLine(rows, failed, data) {
  const ratios = rows
    .map(row => row.ratio)
    .filter(value => value !== null)
    .sort((a, b) => a - b);
  const brackets = rows.map(bracket).filter(value => value !== null);
  const both = rows.filter(row => row.against);
  const [ours, theirs] = [both, both.map(row => row.against)].map(list => list.reduce((s, r) => s + r.seconds, 0));
  return {
    model: rows[0].model,
    norm: rows[0].norm,
    method: rows[0].method,
    tasks: rows.length,
    failed,
    mean: ifAny(ratios, mean),
    median: ifAny(ratios, values => quantile(values, 0.5)),
    worst: ifAny(ratios, values => values[0]),
    bracket: ifAny(brackets, mean),
    good: ifAny(brackets, values => shareOf(values, data.good)),
    fair: ifAny(brackets, values => shareOf(values, data.fair)),
    seconds: rows.reduce((sum, row) => sum + row.seconds, 0),
    time: theirs > 0 ? ours / theirs : null,
  };
}

// What is known about every task, whichever method found it: the largest proof, the smallest attack.
function bestOf(rows) {
  const best = new Map();
  for (const row of rows) {
    const known = best.get(row.task);
    if (!known) best.set(row.task, { ...row, answers: [row] });
    else {
      known.answers.push(row);
      if (row.certified > known.certified) {
        Object.assign(known, { certified: row.certified, shade: row.shade, method: row.method });
        known.texts = [row.texts[0], known.texts[1]];
      }
      if (row.attacked !== null && (known.attacked === null || row.attacked < known.attacked)) {
        known.attacked = row.attacked;
        known.texts = [known.texts[0], row.texts[1]];
      }
    }
  }
  return [...best.values()];
}

const floored = (value, digits) =>
  value === null ? "–" : (Math.floor(value * 10 ** digits) / 10 ** digits).toFixed(digits);
const percent = value => (value === null ? "–" : `${Math.floor(100 * value)} %`);
const seconds = value =>
  value < 100
    ? `${value.toPrecision(3)} s`
    : value < 6000
      ? `${Math.round(value / 60)} min`
      : `${(value / 3600).toFixed(1)} h`;
