// Shows the sources of a prompt's KV: the number of tokens from each source, with an explanation.

import { h } from "./dom.js";

export const SOURCES = [
  ["transferred", "transfer", "Another server computed these prompt tokens. Their KV was read from its memory."],
  ["recomputed", "prefill", "The server that answered computed these prompt tokens itself: placement chose so, no prefill server was ready, or a pull failed."],
  ["skipped", "cached", "The server that answered had the KV of these prompt tokens in its prefix cache. Nothing was computed or moved."],
];
let openHelp = 0; // number of explanations so far, from which each gets a unique id

/** Returns an element with the numbers of tokens by source. Each number shows its explanation under the pointer. */
export function kvNumbers(kv) {
  return h("span", { class: "kv-numbers" }, ...SOURCES.map(([name, color, help]) =>
    h("span", { title: help }, h("i", { class: "swatch", style: { background: `var(--${color})` } }), h("b", {}, `${kv[name] ?? 0}`), ` ${name}`)));
}

/** Returns a button and an explanation of the three sources, which the button shows and hides. */
export function kvHelp() {
  const id = `kv-help-${(openHelp += 1)}`;
  const button = h("button", { type: "button", class: "quiet what", "aria-expanded": "false", "aria-controls": id }, "?", h("span", { class: "hidden" }, " What do transferred, recomputed and skipped mean"));
  const list = h("dl", { id, class: "kv-help", hidden: "" }, ...SOURCES.flatMap(([name, color, help]) => [
    h("dt", {}, h("i", { class: "swatch", style: { background: `var(--${color})` } }), name), h("dd", {}, help)]));
  button.addEventListener("click", () => {
    list.hidden = !list.hidden;
    button.setAttribute("aria-expanded", String(!list.hidden));
  });
  return [button, list];
}
