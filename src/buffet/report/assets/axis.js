// From values to pixels, with a few round ticks.

// Linear from 0, or logarithmic when a linear axis would squeeze the smallest value (or where asked for).
function makeAxis(values, length, { log = null } = {}) {
  const positive = values.filter(value => value > 0 && Number.isFinite(value));
  let low = Infinity,
    high = 0;
  for (const value of positive) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!positive.length) {
    low = 1;
    high = 1;
  }
  const logarithmic = log ?? high > 20 * low;
  if (logarithmic) {
    low /= 1.15;
    high *= 1.15;
  } else {
    low = 0;
    high *= 1.04;
  }
  const share = logarithmic
    ? value => Math.log(Math.max(value, low) / low) / Math.log(high / low)
    : value => value / high;
  const at = value => length * Math.min(Math.max(share(value), 0), 1);
  const chosen = (logarithmic ? logTicks(low, high) : linearTicks(high)).filter(value => value >= low && value <= high);
  const ticks = chosen.map(value => ({ value, at: at(value), text: tickText(value) }));
  return { low, high, log: logarithmic, length, at, ticks };
}

function linearTicks(high) {
  const power = 10 ** Math.floor(Math.log10(high / 4));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= high / 4.0001);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, k) => k * step);
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const first = Math.floor(Math.log10(low)),
    last = Math.ceil(Math.log10(high));
  if (decades < 0.5) return fineTicks(low, high);
  const skip = Math.ceil(decades / 6);
  const factors = decades <= 1.3 ? [1, 2, 5] : decades <= 2.6 ? [1, 3] : [1];
  const found = [];
  for (let k = Math.ceil(first / skip) * skip; k <= last; k += skip) found.push(...factors.map(m => m * 10 ** k));
  return found;
}

// Within less than half a decade round steps are nearly even on a logarithmic axis too.
function fineTicks(low, high) {
  const span = high - low,
    power = 10 ** Math.floor(Math.log10(span / 3));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= span / 4);
  const first = Math.ceil(low / step),
    last = Math.floor(high / step);
  return Array.from({ length: last - first + 1 }, (_, k) => (first + k) * step);
}

function tickText(value) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) {
    return Number(value.toPrecision(4)).toExponential().replace("e+", "e");
  }
  return String(Number(value.toPrecision(4)));
}
