// Creates elements of text and attributes only: no answer is ever interpreted as HTML.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export const find = (id) => document.getElementById(id);

// Changes only what differs, so that a screen reader does not start again.
export function show(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// title: what the number in the cell is, in which unit.
export function cell(label, { wide = false, number = false, title = null } = {}, ...children) {
  const classes = [wide && "wide", number && "number"].filter(Boolean).join(" ");
  return make("td", { role: "cell", "data-label": label, class: classes || null, title }, ...children);
}

export const pill = (state, words = state) => make("span", { class: "pill", "data-state": state }, words);

// A bar of parts [[attribute, name, amount]]; the text beside it says the same.
export function bar(parts, whole) {
  const element = make("span", { class: "bar", "aria-hidden": "true" });
  for (const [attribute, name, amount] of parts) {
    if (!(amount > 0)) continue;
    const part = make("i", { [attribute]: name });
    part.style.width = `${Math.min(100, (100 * amount) / Math.max(whole, 1))}%`;
    element.append(part);
  }
  return element;
}

// The configured names of workers, by the address that Envoy sends to.
const names = new Map();
export const known = (workers) => workers.forEach((one) => names.set(one.endpoint, one.name));
export const named = (endpoint) => names.get(endpoint) ?? endpoint;

// A worker's name, with its address in small type if that differs.
export function place(name, endpoint) {
  return [name, name === endpoint || !endpoint ? null : make("small", {}, endpoint)].filter(Boolean);
}

const rounded = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (number) => rounded.format(number);
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "none");
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

// A router that hangs must not stop the page forever.
const PATIENCE_MS = 10000;

export async function ask(path, options) {
  const response = await fetch(path, { ...options, signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!response.ok) {
    const fault = await response.json().catch(() => ({}));
    throw new Error(fault.error || `${path} answered ${response.status}`);
  }
  return response.json();
}
