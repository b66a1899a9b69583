// The list of recent requests. Each has a timeline with a lane for every leg, and a lane for the client.

import { $, h, setText, legend, seconds, clock, plural } from "./dom.js";
import { kvHelp, kvNumbers } from "./kv.js";

const PHASES = ["proxy", "queue", "prefill", "transfer", "fence", "decode", "stream"];
const CLOCK_ROWS = 25; // the shared time axis is long enough for this many of the newest requests, up to 60 s
const LANE_PX = 8;

/** Returns the seconds that a request has taken so far; `now` is the time of the proxy's clock. */
export const elapsed = (row, now) => row.end_s ?? Math.max(0, now - row.at, row.first_s ?? 0, ...row.legs.map(([, at]) => at));

/** Returns the phases of a request as {lane, phase, from, to}, in seconds since the request was read. */
export function segments(row, now_s) {
  const phases = [];
  const end_s = row.end_s ?? now_s;
  const add = (lane, phase, from, to) => {
    if (from === undefined || to === undefined) return;
    const [start, until] = [Math.max(from, 0), Math.min(to, end_s)]; // the servers' clocks may differ from the proxy's
    if (until > start) phases.push({ lane, phase, from: start, to: until, actor: row.legs[lane]?.[0] ?? "client" });
  };
  if (row.legs.length) add(0, "proxy", 0, row.legs[0][1]);
  row.legs.forEach(([name, at], lane) => {
    const next = row.legs[lane + 1];
    const { times, generated } = row.served[name] ?? {};
    if (!times) {
      const isLost = next && kindOf(next[0]) === kindOf(name);
      add(lane, isLost ? "lost" : "under way", at, next ? next[1] : end_s);
      return;
    }
    const { admitted, read, pulled, drawn, end } = times;
    const step = (phase, from, to) => add(lane, phase, from === undefined ? undefined : at + from, to === undefined ? undefined : at + to);
    step("queue", 0, admitted ?? end);
    if (pulled !== undefined) {
      step("transfer", admitted, read ?? pulled);
      if (read !== undefined) step("fence", read, pulled);
      else step("prefill", pulled, drawn ?? end);
      step("decode", read === undefined ? drawn : pulled, end);
    } else {
      step("prefill", admitted, drawn ?? end);
      if (generated > 1) step("decode", drawn, end);
    }
  });
  if (row.first_s !== null) add(row.legs.length, "stream", row.first_s, end_s);
  return phases;
}

const name = (actor, phase) => (phase === "proxy" ? "proxy" : `${actor} ${phase}`);
const kindOf = (name) => name.split("-")[0];

/** Draws the timeline of a request: `span_s` seconds from `from_s` on, or the whole request if `span_s` is null. */
export function drawTimeline(element, row, now_s, from_s = 0, span_s = null) {
  const parts = segments(row, now_s);
  const width_s = span_s ?? Math.max(row.end_s ?? now_s, 1e-6);
  const lanes = Math.max(1, row.legs.length + (row.first_s !== null ? 1 : 0));
  element.style.setProperty("height", `${lanes * LANE_PX}px`);
  const drawn = parts.map(({ lane, phase, from, to, actor }) => {
    const [left, right] = [from, to].map((at) => Math.max(0, Math.min(1, (at - from_s) / width_s)));
    const style = { left: `${left * 100}%`, width: `${(right - left) * 100}%`, top: `${lane * LANE_PX + 1}px` };
    const isPlain = phase === "under way" || phase === "lost";
    if (!isPlain) style.background = `var(--${phase})`;
    return right > left ? h("i", { style, class: isPlain ? phase.replace(" ", "-") : null, title: `${name(actor, phase)}: ${seconds(to - from)}` }) : null;
  });
  element.replaceChildren(...drawn.filter(Boolean));
  element.setAttribute("aria-label", parts.map(({ phase, from, to, actor }) => `${name(actor, phase)} ${seconds(to - from)}`).join(", ") || "no phases yet");
}

export class Requests {
  constructor() {
    this.list = $("requests-list");
    this.rows = new Map();
    this.filter = $("requests-filter");
    this.scale = $("requests-scale");
    this.pause = $("requests-pause");
    $("phases-legend").append(...legend(PHASES), h("span", {}, h("i", { class: "swatch under-way" }), "in progress, or unknown"));
    const [button, list] = kvHelp();
    $("phases-legend").append(h("span", {}, "KV of a prompt: transferred, recomputed or skipped ", button));
    $("phases-legend").after(list);
    this.filter.addEventListener("input", () => this.show());
    this.scale.addEventListener("change", () => this.update(this.store, true));
    this.pause.addEventListener("click", () => {
      const isPaused = this.pause.getAttribute("aria-pressed") === "true";
      this.pause.setAttribute("aria-pressed", String(!isPaused));
      if (isPaused) this.update(this.store, true);
    });
    this.empty = h("p", { class: "empty" }, "No request yet: try the chat.");
    this.list.append(this.empty);
  }

  update(store, isForced = false) {
    this.store = store;
    if (!store || (this.pause.getAttribute("aria-pressed") === "true" && !isForced)) return;
    this.now = store.now;
    for (const [number, shown] of this.rows) {
      if (store.requests.has(number)) continue;
      shown.element.remove();
      this.rows.delete(number);
    }
    const numbers = [...store.requests.keys()].sort((a, b) => a - b);
    const oldest = store.requests.get(numbers.at(-CLOCK_ROWS) ?? numbers[0]);
    this.clock_s = Math.max(2, Math.min(60, this.now - (oldest?.at ?? this.now)));
    for (const number of numbers) {
      const row = store.requests.get(number);
      let shown = this.rows.get(number);
      if (!shown) {
        shown = this.add(number);
        this.list.prepend(shown.element);
      }
      const moves = row.status === null || this.scale.value === "clock";
      if (shown.row !== row || moves || isForced) this.fill(shown, row);
    }
    this.empty.hidden = this.rows.size > 0;
    this.show();
  }

  add(number) {
    const cells = Object.fromEntries(["time", "status", "route", "timeline", "total"].map((name) => [name, h("span", { class: name, ...(name === "timeline" ? { role: "img" } : {}) })]));
    const detail = h("div", { class: "detail" });
    const element = h("details", { class: "request" }, h("summary", {}, ...Object.values(cells)), detail);
    const shown = { element, cells, detail, row: null };
    element.addEventListener("toggle", () => this.fillDetail(shown));
    this.rows.set(number, shown);
    return shown;
  }

  fill(shown, row) {
    shown.row = row;
    const { cells } = shown;
    const now_s = elapsed(row, this.now);
    setText(cells.time, clock(row.at));
    setText(cells.status, row.status === null ? "running" : row.status === "none" ? "left" : row.status);
    cells.status.className = `status ${row.status === null ? "warn" : row.status === "200" ? "good" : "bad"}`;
    setText(cells.route, row.alone ? `${row.alone} → ${row.legs.at(-1)?.[0] ?? "no server"}` : row.legs.map(([name]) => name).join(" → ") || row.path);
    setText(cells.total, seconds(now_s));
    const from = this.now - this.clock_s - row.at;
    drawTimeline(cells.timeline, row, now_s, ...(this.scale.value === "clock" ? [from, this.clock_s] : []));
    this.fillDetail(shown);
  }

  fillDetail({ element, detail, row }) {
    if (!element.open) {
      if (detail.firstChild) detail.replaceChildren();
      return;
    }
    const lines = segments(row, elapsed(row, this.now)).map(({ actor, phase, from, to }) =>
      h("tr", {}, h("td", {}, h("i", { class: "swatch", style: { background: `var(--${phase}, var(--queue))` } }), name(actor, phase)), h("td", {}, `at ${seconds(from)}`), h("td", {}, `for ${seconds(to - from)}`)));
    const reports = Object.entries(row.served).map(([name, one]) =>
      h("p", { class: "faint" }, `${name}: ${one.outcome}${one.error ? ` (${one.error})` : ""}, ${plural(one.prompt_tokens, "prompt token")}, ${one.generated} generated; prompt tokens: `, kvNumbers(one.kv)));
    detail.replaceChildren(h("p", {}, `${row.path} · ${row.id}`), h("table", {}, h("tbody", {}, ...lines)), ...reports);
  }

  show() {
    const query = this.filter.value.trim().toLowerCase();
    let shown = 0;
    for (const { element, row, cells } of this.rows.values()) {
      const text = `${row.id} ${row.path} ${cells.status.textContent} ${cells.route.textContent}`.toLowerCase();
      const isHidden = Boolean(query) && !query.split(/\s+/).every((word) => text.includes(word));
      if (element.hidden !== isHidden) element.hidden = isHidden;
      shown += !isHidden;
    }
    setText($("requests-count"), query ? `${shown} of ${this.rows.size}` : this.rows.size > 1 ? `the latest ${this.rows.size}` : "");
  }
}
