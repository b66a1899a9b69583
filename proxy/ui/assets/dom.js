// Creates elements and formats numbers. Data of servers and requests are inserted as text and never as markup.

export const $ = (id) => document.getElementById(id);

/** Creates an HTML element. `props` has its attributes; `style` is an object. The children are nodes or strings. */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function s(tag, props, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Sets the text of an element if it differs. Otherwise screen readers would repeat it, and layout would be redone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (!value) return "0 ms";
  if (value < 0.00095) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.0995) return `${(value * 1e3).toPrecision(2)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1e3)} ms`;
  return value < 100 ? `${value.toPrecision(3)} s` : `${Math.round(value)} s`;
}

/** Returns a number with its noun: "1 request", "2 requests". */
export const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return `${(value / (unit === "k" ? 1e3 : size)).toPrecision(3)}${unit}`;
  }
  return value < 10 && value % 1 ? value.toFixed(1) : `${Math.round(value)}`;
}

export const rate = (value) => (value === null || value === undefined ? "–" : `${count(value)}/s`);
export const bytes = (value) => (value === null || value === undefined ? "–" : `${count(value).replace(/[^\d.]|$/, " $&")}B/s`);
export const memory = (value) => (value === null || value === undefined ? "–" : `${count(value).replace(/[^\d.]|$/, " $&")}B`);
export const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`);
export const clock = (at) => new Date(at * 1000).toTimeString().slice(0, 8);

export const legend = (names) => names.map((name) => h("span", {}, h("i", { class: "swatch", style: { background: `var(--${name})` } }), name));
