// Elements, the data of the page, and the one tooltip. Text only ever becomes text nodes and attributes.

const NAMESPACE = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter(child => child !== null));
  return node;
}

const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const shape = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(NAMESPACE, tag), attributes, children);
const place = id => document.getElementById(id);

function pageData() {
  return JSON.parse(place("data").textContent);
}

// Rows are stored as lists under one list of names.
function records(columns, rows) {
  return rows.map(row => Object.fromEntries(columns.map((name, column) => [name, row[column]])));
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// A title and lines of [name, value]; shown by an anchor's box, one at a time in the whole page.
const tooltip = {
  node: null,

  show(box, title, lines) {
    if (!this.node) {
      this.node = element("div", { class: "tooltip", role: "tooltip", id: "tooltip" });
      document.body.append(this.node);
    }
    const cells = lines.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
    this.node.replaceChildren(element("strong", {}, title), element("dl", {}, cells));
    this.node.hidden = false;
    const size = this.node.getBoundingClientRect();
    const wide = document.documentElement.clientWidth;
    const left = Math.min(Math.max(8, box.left + box.width / 2 - size.width / 2), wide - size.width - 8);
    const above = box.top - size.height - 8;
    this.node.style.left = `${left + scrollX}px`;
    this.node.style.top = `${(above > 8 ? above : box.bottom + 8) + scrollY}px`;
  },

  hide() {
    if (this.node) this.node.hidden = true;
  },
};

addEventListener("keydown", event => {
  if (event.key === "Escape") tooltip.hide();
});
addEventListener("pointerdown", event => {
  if (!event.target.closest(".chip, .plot")) tooltip.hide();
});
