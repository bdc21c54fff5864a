// The document: small helpers that redraw without disturbing what is there.

export const $ = (id) => document.getElementById(id);

/** Set a node's text, keeping its text node, so that a selection around it survives. */
export function text(node, value) {
  const wanted = String(value);
  if (node.textContent === wanted) return;
  if (node.childNodes.length === 1 && node.firstChild.nodeType === Node.TEXT_NODE) node.firstChild.data = wanted;
  else node.textContent = wanted;
}

export function attr(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const drawn = new WeakMap();

/** Make `parent`'s children match `items`: nodes are reused by key and move only when the order changed. */
export function keyed(parent, items, keyOf, create, update) {
  const before = drawn.get(parent) ?? new Map();
  const after = new Map();
  items.forEach((item, index) => {
    const key = keyOf(item, index);
    const node = before.get(key) ?? create(item);
    after.set(key, node);
    update(node, item);
  });
  for (const [key, node] of before) if (!after.has(key)) node.remove();
  let place = parent.firstElementChild;
  for (const node of after.values()) {
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  drawn.set(parent, after);
}

let toSay = "";
let saying = 0;

/** Tell screen readers, once a line has stood for a moment. */
export function announce(line) {
  if (line === toSay) return;
  toSay = line;
  clearTimeout(saying);
  saying = setTimeout(() => text($("announce"), line), 1500);
}
