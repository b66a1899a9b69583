// The plots: rates and shares that are computed from the proxy's points, and drawn by uPlot. Users read single values
// with the pointer or the arrow keys.

import { $, h, setText, color, seconds, count, rate, bytes, percent, clock } from "./dom.js";

const STATES = ["used", "receiving", "leased", "cached", "quarantined", "free"];
const ITL = "baton_inter_token_seconds_bucket{le=";

const WINDOW_S = 5; // rates and shares cover this time, or the time since the preceding point if that is longer
export const MAX_WINDOW = 8; // the counters of this many newest points are stored

/**
 * Returns the plotted values of a new point, computed from its counters and those of earlier points.
 *
 * A value is null if it cannot be computed, for example if the preceding point is more than `gap_s` seconds older.
 */
export function derive(point, points, gap_s) {
  const window = [];
  let newer = point;
  for (let at = points.length - 1; at >= 0 && point.at - newer.at < WINDOW_S; at -= 1) {
    const { raw } = points[at];
    if (raw?.of !== point.of || newer.at - raw.at > gap_s) break;
    if (raw.at === newer.at) continue;
    window.unshift(raw);
    newer = raw;
  }
  const last = window[0];
  const elapsed_s = last ? point.at - last.at : 0;
  const gain = (part, name) => {
    if (!last) return null;
    const [now, then] = part ? [point[part], last[part]] : [point, last];
    const more = (now[name] ?? 0) - (then[name] ?? 0);
    return more >= 0 ? more : null;
  };
  const each = (part, name) => (gain(part, name) === null ? null : gain(part, name) / elapsed_s);
  const share = (some, all) => (all > 0 ? Math.min(some / all, 1) : null);
  const both = (name) => (point.prefill[name] ?? 0) + (point.decode[name] ?? 0);
  const blocks = STATES.map((state) => both(`baton_kv_blocks{state=${state}}`));
  const total = blocks.reduce((sum, number) => sum + number, 0);
  const lookedUp = ["transferred", "recomputed", "skipped"].map((source) => gain("decode", `baton_kv_tokens_total{source=${source}}`));
  const prompt = ["prefill", "decode"].map((part) => each(part, "baton_kv_tokens_total{source=recomputed}"));
  return {
    raw: point,
    at: point.at,
    ttft: exact([...window.slice(1), point].flatMap((each) => each.first_bytes)),
    itl: last ? quantiles(Object.keys(point.decode).filter((name) => name.startsWith(ITL)).map((name) => [bound(name), gain("decode", name) ?? 0])) : [null, null],
    tokens: [each("decode", "baton_generation_tokens_total"), prompt[0] === null ? null : prompt[0] + prompt[1]],
    kv: [each("decode", "baton_kv_transfer_bytes")],
    blocks: total ? blocks.map((number) => number / total) : STATES.map(() => null),
    disaggregated: [share(gain("", "pd"), gain("", "pd") + gain("", "alone"))],
    cached: [share(gain("decode", "baton_cached_prompt_tokens_total"), lookedUp.reduce((sum, n) => sum + n, 0))],
    queues: ["waiting", "receiving", "running"].map((name) => both(`baton_requests_${name}`)),
    ended: [each("", "ended"), each("", "failed")],
  };
}

/**
 * Returns the points of the last `range_s` seconds, with an empty point where nothing was measured for `gap_s` seconds.
 *
 * Short ranges show the recent points. Where there are none, because no page was open, they show points of the history.
 */
export function selectPoints(recent, history, now, range_s, gap_s) {
  let points = history;
  if (range_s <= FINE_RANGE_S) {
    const missing = history.filter((one) => !recent.some((other) => Math.abs(other.at - one.at) < gap_s / 2));
    points = [...missing, ...recent].sort((a, b) => a.at - b.at);
  }
  const shown = [];
  for (const point of points) {
    if (point.at < now - range_s) continue;
    const before = shown.at(-1);
    if (before && point.at - before.at > gap_s) shown.push({ at: before.at + 0.001 });
    shown.push(point);
  }
  return shown;
}

const FINE_RANGE_S = 300; // longer ranges show only the history, because one point per second would be too many
const MIN_SHOWN_S = 60; // the axis has at least this length, even if the proxy has just started

const bound = (name) => (name.includes("Inf") ? Infinity : Number(name.slice(ITL.length, -1)));

function exact(values) {
  if (!values.length) return [null, null];
  const sorted = [...values].sort((a, b) => a - b);
  return [0.5, 0.95].map((share) => sorted[Math.round(share * (sorted.length - 1))]);
}

/** Returns quantiles of a histogram, as if the values in each bucket were evenly distributed. */
function quantiles(buckets) {
  buckets.sort(([a], [b]) => a - b);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!total) return [null, null];
  return [0.5, 0.95].map((share) => {
    let [low, below] = [0, 0];
    for (const [high, number] of buckets) {
      if (number >= share * total) return high === Infinity ? low : low + ((high - low) * (share * total - below)) / Math.max(number - below, 1e-9);
      [low, below] = [high, number];
    }
    return low;
  });
}

const CHARTS = [
  { id: "ttft", title: "Time to first token", labels: ["median", "95 %"], colors: ["prefill", "transfer"], format: seconds },
  { id: "itl", title: "Between tokens", labels: ["median", "95 %"], colors: ["decode", "transfer"], format: seconds },
  { id: "tokens", title: "Tokens", labels: ["generated", "of prompts"], colors: ["decode", "prefill"], format: rate },
  { id: "kv", title: "KV moved", labels: [""], colors: ["transfer"], format: bytes },
  { id: "queues", title: "Sequences", labels: ["waiting", "receiving", "running"], colors: ["queue", "fence", "decode"], format: count },
  { id: "disaggregated", title: "Disaggregated", labels: [""], colors: ["transfer"], format: percent, max: 1 },
  { id: "cached", title: "Prompt tokens found in a cache", labels: [""], colors: ["prefill"], format: percent, max: 1 },
  { id: "ended", title: "Requests ended", labels: ["all", "failed"], colors: ["stream", "quarantined"], format: rate },
  { id: "blocks", title: "KV blocks by state", labels: STATES, colors: STATES, format: percent, max: 1, isStacked: true },
];

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.values = spec.labels.map(() => h("b", {}, "–"));
    this.plot = h("div", { class: "plot", tabindex: 0, role: "img" });
    const readouts = spec.labels.map((label, at) =>
      h("span", {}, h("i", { class: "swatch", style: { background: `var(--${spec.colors[at]})` } }), this.values[at], label ? ` ${label}` : ""));
    this.tile = h("div", { class: spec.labels.length > 3 ? "tile many" : "tile" }, h("h3", {}, spec.title), h("div", { class: "readouts" }, ...readouts), this.plot);
    this.plot.addEventListener("keydown", (event) => this.move(event));
    this.plot.addEventListener("blur", () => this.chart?.setCursor({ left: -10, top: -10 }));
    new ResizeObserver(() => this.chart?.setSize(this.size())).observe(this.plot);
  }

  size() {
    return { width: Math.max(this.plot.clientWidth, 60), height: 104 };
  }

  make() {
    const { spec } = this;
    const axis = { stroke: color("faint"), font: "10px system-ui", grid: { stroke: color("line"), width: 0.5 }, ticks: { show: false } };
    const series = spec.labels.map((label, at) => {
      const stroke = color(spec.colors[at]);
      return { label, stroke, width: spec.isStacked ? 0 : 1.5, fill: spec.isStacked ? stroke : `${stroke}22`, points: { show: !spec.isStacked, size: 3, filter: isolatedPoints } };
    });
    this.chart?.destroy();
    this.chart = new uPlot({
      ...this.size(),
      padding: [6, 16, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { setScale: false, x: false }, sync: { key: "page" }, points: { show: !spec.isStacked } },
      scales: { x: { range: () => this.span }, y: { range: (_, __, max) => [0, spec.max ?? ((max || 0) * 1.15 || 1)] } },
      axes: [
        { ...axis, size: 18, gap: 2, space: 70, grid: { show: false }, values: (_, times) => times.map((time) => (this.span[1] - this.span[0] > FINE_RANGE_S ? clock(time).slice(0, 5) : clock(time))) },
        { ...axis, size: 46, gap: 3, space: 26, values: (_, ticks) => ticks.map((tick) => (tick ? spec.format(tick).replace("/s", "") : "0")) },
      ],
      series: [{}, ...(spec.isStacked ? series.reverse() : series)],
      hooks: { setCursor: [(chart) => this.read(chart.cursor.idx)] },
    }, this.data, this.plot);
  }

  update(points, span) {
    this.points = points;
    this.span = span;
    const rows = this.spec.labels.map((_, at) => points.map((point) => point[this.spec.id]?.[at] ?? null));
    this.rows = rows;
    let lines = rows;
    if (this.spec.isStacked) lines = rows.map((_, at) => points.map((__, x) => (rows[at][x] === null ? null : rows.slice(0, at + 1).reduce((sum, row) => sum + row[x], 0)))).reverse();
    this.data = [points.map((point) => point.at), ...lines];
    if (this.chart) this.chart.setData(this.data);
    else this.make();
    this.read(this.chart.cursor.idx);
  }

  /** Shows the values of the point under the cursor, or of the newest point without a cursor. */
  read(index) {
    const last = this.data[0].length - 1;
    const at = index ?? last;
    const texts = this.rows.map((row, line) => {
      const text = this.spec.format(at < 0 ? null : row[at]);
      setText(this.values[line], text);
      return `${this.spec.labels[line]} ${text}`.trim();
    });
    if (this.plot !== document.activeElement && index !== null && index !== undefined) return;
    this.plot.setAttribute("aria-label", `${this.spec.title}: ${texts.join(", ")}${index === null || index === undefined ? "" : ` at ${clock(this.points[at].at)}`}. Arrow keys read earlier values.`);
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const last = this.data[0].length - 1;
    const at = Math.max(0, Math.min(last, (this.chart.cursor.idx ?? last) + step));
    this.chart.setCursor({ left: this.chart.valToPos(this.data[0][at], "x"), top: 10 });
  }
}

/** Returns the points to draw as dots: points between two gaps, which no line connects to other points. */
function isolatedPoints(chart, line, isShown) {
  const row = chart.data[line];
  return isShown ? row.map((_, at) => at).filter((at) => row[at] !== null && (row[at - 1] ?? null) === null && (row[at + 1] ?? null) === null) : null;
}

const RANGE = "baton-range"; // the chosen range, stored by the browser

export class Charts {
  constructor() {
    this.charts = CHARTS.map((spec) => new Chart(spec));
    this.range = $("range");
    $("charts").append(...this.charts.map((chart) => chart.tile));
    const stored = localStorage.getItem(RANGE);
    if ([...this.range.options].some((option) => option.value === stored)) this.range.value = stored;
    this.range.addEventListener("change", () => {
      localStorage.setItem(RANGE, this.range.value);
      this.update(this.store);
    });
  }

  update(store) {
    this.store = store;
    if (!store) return;
    const range_s = Number(this.range.value);
    const points = selectPoints(store.points, store.history, store.now, range_s, store.gap_s);
    const begin = Math.max(store.now - range_s, Math.min(points[0]?.at ?? store.now, store.now - MIN_SHOWN_S));
    for (const chart of this.charts) chart.update(points, [begin, store.now]);
  }

  recolor() {
    for (const chart of this.charts) if (chart.data) chart.make();
  }
}
