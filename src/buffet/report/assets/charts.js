// Charts as SVG. Each is drawn for the width it has, and scales with the page from there (in print, say).

const EDGE = { top: 10, right: 14, bottom: 44, left: 50 };
const fixed = value => value.toFixed(1);

function canvas(width, height, label, ...children) {
  return shape("svg", { viewBox: `0 0 ${width} ${height}`, class: "plot", role: "img", "aria-label": label }, children);
}

const line = (kind, x1, y1, x2, y2) =>
  shape("path", { class: kind, d: `M${fixed(x1)} ${fixed(y1)}L${fixed(x2)} ${fixed(y2)}` });
const write = (kind, x, y, text, attributes = {}) =>
  shape("text", { class: kind, x: fixed(x), y: fixed(y), ...attributes }, text);

// Grid lines, ticks and the names of both axes; either axis may be missing. y grows upwards.
function frame(width, height, { x = null, y = null, xName = "", yName = "", left = EDGE.left }) {
  const bottom = height - EDGE.bottom,
    right = width - EDGE.right;
  const parts = [];
  for (const tick of x ? x.ticks : []) {
    parts.push(line("grid", left + tick.at, EDGE.top, left + tick.at, bottom));
    parts.push(write("tick", left + tick.at, bottom + 16, tick.text, { "text-anchor": "middle" }));
  }
  for (const tick of y ? y.ticks : []) {
    parts.push(line("grid", left, bottom - tick.at, right, bottom - tick.at));
    parts.push(write("tick", left - 7, bottom - tick.at + 4, tick.text, { "text-anchor": "end" }));
  }
  parts.push(line("base", left, bottom, right, bottom));
  parts.push(write("name", (left + right) / 2, height - 8, xName, { "text-anchor": "middle" }));
  const middle = (EDGE.top + bottom) / 2;
  if (yName)
    parts.push(
      write("name", 12, middle, yName, { "text-anchor": "middle", transform: `rotate(-90 12 ${fixed(middle)})` }),
    );
  return parts;
}

// points: [{ x, y, tip: () => [title, lines] }], both axes alike, with the line y = x.
function scatterPlot(points, { width, height, xName, yName, label }) {
  const w = width - EDGE.left - EDGE.right,
    h = height - EDGE.top - EDGE.bottom;
  const values = points.flatMap(point => [point.x, point.y]);
  const x = makeAxis(values, w),
    y = makeAxis(values, h),
    bottom = height - EDGE.bottom;
  const placed = points.map(point => ({ ...point, left: EDGE.left + x.at(point.x), top: bottom - y.at(point.y) }));
  const svg = canvas(
    width,
    height,
    label,
    frame(width, height, { x, y, xName, yName }),
    line("equal", EDGE.left, bottom, width - EDGE.right, EDGE.top),
    // One path of dots: thousands of elements would be slow.
    shape("path", {
      class: points.length > 400 ? "dots many" : "dots",
      d: placed.map(p => `M${fixed(p.left)} ${fixed(p.top)}h0`).join(""),
    }),
  );
  const ring = shape("circle", { class: "ring", r: "5", visibility: "hidden" });
  svg.append(ring);
  const near = event => {
    const box = svg.getBoundingClientRect(),
      scale = width / box.width;
    const at = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    let nearest = null,
      least = 144;
    for (const point of placed) {
      const far = (point.left - at[0]) ** 2 + (point.top - at[1]) ** 2;
      if (far < least) [nearest, least] = [point, far];
    }
    ring.setAttribute("visibility", nearest ? "visible" : "hidden");
    if (!nearest) {
      tooltip.hide();
      return;
    }
    ring.setAttribute("cx", fixed(nearest.left));
    ring.setAttribute("cy", fixed(nearest.top));
    const left = box.left + nearest.left / scale,
      top = box.top + nearest.top / scale;
    tooltip.show({ left: left - 6, top: top - 6, width: 12, bottom: top + 6 }, ...nearest.tip());
  };
  svg.addEventListener("pointermove", near);
  svg.addEventListener("click", near);
  svg.addEventListener("pointerleave", () => {
    ring.setAttribute("visibility", "hidden");
    tooltip.hide();
  });
  return svg;
}

// points: [{ name, x, y, tip }], ratios to a reference that lies at 1, 1; few enough to be named in the chart.
// Names move up or down where they would cover each other.
function namedPoints(points, { width, height, xName, yName, label }) {
  const w = width - EDGE.left - EDGE.right,
    h = height - EDGE.top - EDGE.bottom,
    bottom = height - EDGE.bottom;
  const x = makeAxis([0.8, 1.25, ...points.map(p => p.x)], w, { log: true });
  const y = makeAxis([0.8, 1.25, ...points.map(p => p.y)], h, { log: true });
  const parts = frame(width, height, { x, y, xName, yName });
  parts.push(line("equal", EDGE.left + x.at(1), EDGE.top, EDGE.left + x.at(1), bottom));
  parts.push(line("equal", EDGE.left, bottom - y.at(1), width - EDGE.right, bottom - y.at(1)));
  const taken = [];
  for (const point of points) {
    const left = EDGE.left + x.at(point.x),
      top = bottom - y.at(point.y);
    parts.push(
      shape("circle", { class: "point", cx: fixed(left), cy: fixed(top), r: 5 }, shape("title", {}, point.tip)),
    );
    taken.push([left - 6, left + 6, top - 6, top + 6]);
  }
  for (const point of points) {
    const left = EDGE.left + x.at(point.x),
      top = bottom - y.at(point.y),
      wide = point.name.length * 6.8;
    const right = left + 10 + wide < width,
      from = right ? left + 10 : left - 10 - wide;
    const free = shift =>
      taken.every(([a, b, c, d]) => from + wide < a || from > b || top + shift + 5 < c || top + shift - 7 > d);
    const shift = [0, -12, 12, -24, 24, -36, 36].find(free) ?? 0;
    taken.push([from, from + wide, top + shift - 7, top + shift + 5]);
    parts.push(
      write("label", right ? from : left - 10, top + shift + 4, point.name, { "text-anchor": right ? "start" : "end" }),
    );
  }
  return canvas(width, height, label, parts);
}

// groups: [{ name, values, tip }]; box: quartiles and median, whiskers: smallest and largest. A line marks 1.
// What is below `least` lies on the edge.
function boxPlots(groups, { width, least: floor, xName, label }) {
  const narrow = width < 480,
    row = narrow ? 46 : 34;
  const longest = Math.max(...groups.map(group => group.name.length));
  const left = narrow ? 8 : Math.min(longest * 7.4 + 20, width * 0.35),
    height = EDGE.top + row * groups.length + EDGE.bottom;
  const values = groups.flatMap(group => group.values);
  const x = makeAxis([0.9, 1.1, ...values.filter(value => value >= floor)], width - left - EDGE.right, { log: true });
  const name = values.some(value => value < floor) ? `${xName} (below ${floor}: at the edge)` : xName;
  const parts = frame(width, height, { x, xName: name, left });
  parts.push(line("one", left + x.at(1), EDGE.top, left + x.at(1), height - EDGE.bottom));
  groups.forEach((group, number) => {
    const ordered = [...group.values].sort((a, b) => a - b);
    const [least, lower, middle, upper, most] = [0, 0.25, 0.5, 0.75, 1].map(
      share => left + x.at(quantile(ordered, share)),
    );
    const y = EDGE.top + row * number + (narrow ? 32 : row / 2);
    parts.push(
      narrow
        ? write("label", left, y - 14, group.name)
        : write("label", left - 12, y + 4, group.name, { "text-anchor": "end" }),
    );
    parts.push(
      shape(
        "g",
        { class: "box" },
        shape("title", {}, group.tip),
        line("whisker", least, y, most, y),
        line("whisker", least, y - 4, least, y + 4),
        line("whisker", most, y - 4, most, y + 4),
        shape("rect", {
          x: fixed(lower),
          y: fixed(y - 8),
          width: fixed(Math.max(upper - lower, 1.5)),
          height: 16,
          rx: 2,
        }),
        line("median", middle, y - 8, middle, y + 8),
      ),
    );
  });
  return canvas(width, height, label, parts);
}

// items in their order: { certified, attacked (null: none found) }; one column each, many become an area.
function bracketColumns(items, { width, height, xName, yName, label }) {
  const w = width - EDGE.left - EDGE.right,
    h = height - EDGE.top - EDGE.bottom,
    bottom = height - EDGE.bottom;
  const y = makeAxis(
    items.flatMap(item => [item.certified, item.attacked ?? 0]),
    h,
  );
  const step = w / items.length,
    stroke = Math.max(step * (step > 3 ? 0.72 : 1), 0.6);
  const columns = (from, to) =>
    items
      .map((item, number) => {
        const x = EDGE.left + step * (number + 0.5),
          [a, b] = [from(item), to(item)];
        return a === null ? "" : `M${fixed(x)} ${fixed(bottom - a)}V${fixed(bottom - b)}`;
      })
      .join("");
  const path = (kind, d, thick) => shape("path", { class: kind, d, "stroke-width": fixed(thick) });
  const end = item => (item.attacked === null ? h : y.at(item.attacked));
  return canvas(
    width,
    height,
    label,
    frame(width, height, { y, xName, yName: y.log ? `${yName}, logarithmic` : yName }),
    path(
      "open",
      columns(item => y.at(item.certified), end),
      stroke,
    ),
    path(
      "proven",
      columns(
        () => 0,
        item => y.at(item.certified),
      ),
      stroke,
    ),
    path(
      "attack",
      columns(
        item => (item.attacked === null ? null : end(item) - 1),
        item => end(item) + 1,
      ),
      stroke,
    ),
  );
}

// One bracket lying down, on an axis from 0 to 100: proven, open up to `end`, a tick where an attack succeeded.
function bracketBar({ proven, end, tick, shade = null, label }) {
  const kind = shade === null ? "fill" : `s${shade}`;
  return shape(
    "svg",
    { viewBox: "0 0 100 16", preserveAspectRatio: "none", class: "bar", role: "img", "aria-label": label },
    shape("rect", { class: "rest", x: 0, y: 5, width: end.toFixed(2), height: 6 }),
    shape("rect", { class: kind, x: 0, y: 2, width: proven.toFixed(2), height: 12 }),
    tick === null
      ? null
      : shape("path", { class: "attack", d: `M${tick.toFixed(2)} 0V16`, "vector-effect": "non-scaling-stroke" }),
  );
}

// What the parts of a bracket mean.
function bracketKey() {
  const sample = (kind, text) => element("span", {}, element("i", { class: kind }), text);
  return element(
    "p",
    { class: "key" },
    sample("proven", "proven: the answer stays"),
    sample("open", "open"),
    sample("attack", "an attack changed the answer"),
  );
}

// Brackets with a name and a note each, above one axis.
function bracketChart(items, axis, axisName) {
  const rows = items.flatMap(item => [
    element("span", { class: "name" }, item.name),
    bracketBar(item),
    element("span", { class: "note" }, item.note),
  ]);
  const ticks = axis.ticks.map(tick => {
    const mark = element("span", {}, tick.text);
    mark.style.left = `${tick.at.toFixed(2)}%`;
    return mark;
  });
  return element(
    "div",
    { class: "bars" },
    rows,
    element("span"),
    element("div", { class: "axis" }, ticks, element("em", {}, axisName)),
    element("span", { class: "note" }),
  );
}
