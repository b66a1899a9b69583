// The plots: rates and shares computed from the proxy's points, drawn by uPlot. The pointer or the arrow keys
// read values.

import { $, h, setText, color, seconds, count, rate, bytes, percent, clock } from "./dom.js";

const STATES = ["used", "receiving", "leased", "cached", "quarantined", "free"];
const ITL = "baton_inter_token_seconds_bucket{le=";

const WINDOW = 5; // number of points over which rates and shares are computed

/**
 * Returns the plotted values of a new point, computed from it and the points before it.
 *
 * A value is null if it cannot be computed, as after a gap: a time in which no page was open, so that nothing
 * was measured.
 */
export function derive(point, points, interval_s) {
  const isGap = points.length > 0 && point.at - points.at(-1).at >= 4 * interval_s + 2;
  const window = [];
  for (let at = points.length - 1; at >= 0 && window.length < WINDOW && !isGap; at -= 1) {
    if (points[at].raw?.of !== point.of) break;
    window.unshift(points[at].raw);
    if (points[at].isGap) break;
  }
  if (points.length >= WINDOW) delete points.at(-WINDOW).raw;
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
    isGap,
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

const GAP_WIDTH = 3; // intervals; every gap is this wide on the axis, however long it lasted

/**
 * Returns the position of each point on the time axis.
 *
 * The points after the last gap are at their times. Earlier points are shifted to the right, so that gaps are
 * narrow.
 */
export function positions(points, interval_s) {
  let shift = 0;
  const places = points.map((point) => point.at);
  for (let at = points.length - 1; at >= 0; at -= 1) {
    places[at] += shift;
    if (at > 0 && points[at].isGap) shift += Math.max(0, points[at].at - points[at - 1].at - GAP_WIDTH * interval_s);
  }
  return places;
}

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
      scales: { y: { range: (_, __, max) => [0, spec.max ?? ((max || 0) * 1.15 || 1)] } },
      axes: [
        { ...axis, size: 18, gap: 2, space: 70, grid: { show: false }, values: (_, places) => places.map((place) => clock(this.time(place))) },
        { ...axis, size: 46, gap: 3, space: 26, values: (_, ticks) => ticks.map((tick) => (tick ? spec.format(tick).replace("/s", "") : "0")) },
      ],
      series: [{}, ...(spec.isStacked ? series.reverse() : series)],
      hooks: { setCursor: [(chart) => this.read(chart.cursor.idx)], draw: [(chart) => this.drawGaps(chart)] },
    }, this.data, this.plot);
  }

  /** Returns the proxy's time at a position on the axis. */
  time(place) {
    const [places] = this.data;
    const next = places.findIndex((each) => each >= place);
    const at = next < 0 ? places.length - 1 : next;
    return at < 0 ? place : this.points[at].at - (places[at] - place);
  }

  drawGaps(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = color("faint");
    ctx.setLineDash([4, 4]);
    this.points.forEach((point, at) => {
      if (!point.isGap || at === 0) return;
      const x = chart.valToPos((this.data[0][at - 1] + this.data[0][at]) / 2, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    });
    ctx.restore();
  }

  update(points, places) {
    this.points = points;
    const rows = this.spec.labels.map((_, at) => points.map((point) => (point.isGap ? null : point[this.spec.id][at])));
    this.rows = rows;
    let lines = rows;
    if (this.spec.isStacked) lines = rows.map((_, at) => points.map((__, x) => (rows[at][x] === null ? null : rows.slice(0, at + 1).reduce((sum, row) => sum + row[x], 0)))).reverse();
    this.data = [places, ...lines];
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

/** Returns the points to draw as dots: those between two gaps, which no line connects. */
function isolatedPoints(chart, line, isShown) {
  const row = chart.data[line];
  return isShown ? row.map((_, at) => at).filter((at) => row[at] !== null && (row[at - 1] ?? null) === null && (row[at + 1] ?? null) === null) : null;
}

export class Charts {
  constructor() {
    this.charts = CHARTS.map((spec) => new Chart(spec));
    $("charts").append(...this.charts.map((chart) => chart.tile));
  }

  update(store) {
    const places = positions(store.points, store.interval_s);
    $("charts-note").hidden = !store.points.some((point, at) => at > 0 && point.isGap);
    for (const chart of this.charts) chart.update(store.points, places);
  }

  recolor() {
    for (const chart of this.charts) if (chart.data) chart.make();
  }
}
