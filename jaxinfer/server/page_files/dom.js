// Nodes are made one by one; no text ever passes through an HTML parser.

export const byId = (id) => document.getElementById(id);

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Sets the text only where it has changed, so that selections and screen readers stay undisturbed. */
export function setText(node, text) {
  const now = String(text);
  if (node.textContent !== now) node.textContent = now;
}

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const count = (value) => whole.format(Math.round(value));

export const rate = (value) => (value >= 1000 ? whole.format(Math.round(value)) : short.format(value));

export const percent = (part, all) => (all > 0 ? `${short.format((100 * part) / all)} %` : "–");

/** Seconds, in the unit that reads best. */
export function duration(seconds) {
  return seconds < 1 ? `${short.format(1000 * seconds)} ms` : `${short.format(seconds)} s`;
}

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Can't copy";
  }
  setTimeout(() => (button.textContent = before), 1500);
}
