// The table of servers: state, geometry, KV, queues and work. An update changes the cells of existing rows.

import { $, h, setText, legend, count, rate, bytes, memory, seconds } from "./dom.js";

const STATES = ["used", "receiving", "leased", "cached", "quarantined", "free"];
const COLUMNS = ["State", "Model", "KV cache", "Queue", "Work", "Memory", "Runs on"];

export class Servers {
  constructor() {
    this.body = $("servers-table").tBodies[0];
    this.rows = new Map();
    this.filter = $("servers-filter");
    this.filter.addEventListener("input", () => this.show());
    $("blocks-legend").append(...legend(STATES));
  }

  update(store) {
    const newest = store.points.at(-1)?.at ?? 0;
    for (const [name, row] of this.rows) {
      if (store.servers.has(name)) continue;
      row.element.remove();
      this.rows.delete(name);
    }
    for (const server of store.servers.values()) {
      const row = this.rows.get(server.name) ?? this.add(server.name);
      if (row.server === server && row.isStill) continue;
      row.isStill = newest - server.at > 1.5 * store.interval_s;
      row.server = server;
      fill(row, server, row.isStill ? null : work(server, store.interval_s));
    }
    this.show();
  }

  add(name) {
    const state = h("span", {});
    const bar = h("span", { class: "bar", role: "img" }, ...STATES.map((each) => h("i", { style: { background: `var(--${each})` } })));
    const cells = Object.fromEntries(COLUMNS.map((column) => [column, [h("span", {}), h("small", {})]]));
    cells.State[0].append(state);
    const tds = COLUMNS.map((column) => h("td", { "data-label": column, class: column.toLowerCase().split(" ")[0] }, ...(column === "KV cache" ? [bar] : []), ...cells[column]));
    const element = h("tr", {}, h("th", { scope: "row" }, name), ...tds);
    const row = { name, element, cells, bar };
    this.rows.set(name, row);
    this.body.append(element);
    return row;
  }

  show() {
    const query = this.filter.value.trim().toLowerCase();
    const servers = [...this.rows.values()];
    let shown = 0;
    for (const { element, server } of servers) {
      const text = `${server.name} ${server.models.join(" ")} ${stateOf(server)[0]}`.toLowerCase();
      const isHidden = Boolean(query) && !query.split(/\s+/).every((word) => text.includes(word));
      if (element.hidden !== isHidden) element.hidden = isHidden;
      shown += !isHidden;
    }
    setText($("servers-count"), query ? `${shown} of ${servers.length}` : `${servers.length}`);
  }
}

function stateOf(server) {
  if (server.state === "not_ready") return ["not ready", "bad"];
  if (server.state !== "ready") return [server.state, "warn"];
  if (server.circuit !== "closed") return [`circuit ${server.circuit}`, "warn"];
  return ["ready", "good"];
}

/** Returns the server's rates since the statistics before the current ones; null if there are none. */
function work(server, interval_s) {
  const then = server.before?.values;
  if (!then || !Object.keys(then).length) return null;
  const elapsed_s = Math.max(Math.min(server.at - server.before.at, 1.2 * interval_s), 0.2);
  const gain = (name) => Math.max((server.values[name] ?? 0) - (then[name] ?? 0), 0);
  const steps = gain("baton_engine_steps");
  return {
    tokens: gain("baton_generation_tokens_total") / elapsed_s,
    prompt: gain("baton_kv_tokens_total{source=recomputed}") / elapsed_s,
    kv: gain("baton_kv_transfer_bytes") / elapsed_s,
    step_s: steps ? gain("baton_engine_step_seconds") / steps : null,
  };
}

function fill({ cells, bar }, server, rates) {
  const { values } = server;
  const setCell = (column, main, rest = "") => {
    setText(cells[column][0], main);
    setText(cells[column][1], rest);
  };
  const [state, kind] = stateOf(server);
  setCell("State", state, server.reason);
  cells.State[0].className = kind;
  setCell("Model", server.models.join(", ") || "–", server.version ? `Baton ${server.version}` : "");
  const numbers = STATES.map((each) => values[`baton_kv_blocks{state=${each}}`] ?? 0);
  const total = numbers.reduce((sum, number) => sum + number, 0) || server.num_blocks || 0;
  const inUse = numbers.slice(0, 3).reduce((sum, number) => sum + number, 0);
  STATES.forEach((each, at) => bar.children[at].style.setProperty("width", total ? `${(100 * numbers[at]) / total}%` : "0"));
  bar.setAttribute("aria-label", STATES.map((each, at) => `${numbers[at]} ${each}`).join(", "));
  const kvType = server.kv_dtype ? `${server.kv_dtype} ${server.kv_layout}` : "";
  const size = server.block_size ?? 0;
  setCell("KV cache", total && size ? `${count(inUse * size)} of ${count(total * size)} tokens` : "–", size ? `blocks of ${size} · ${kvType}` : "");
  const queue = (name) => values[`baton_requests_${name}`] ?? 0;
  const hasStats = Object.keys(values).length > 0;
  setCell("Queue", hasStats ? `${queue("running")} running` : "–", hasStats ? `${queue("waiting")} waiting${server.role === "decode" ? `, ${queue("receiving")} receiving` : ""}, ${server.in_flight} from here` : "");
  const parts = [];
  if (rates?.kv) parts.push(`KV ${bytes(rates.kv)}`);
  if (rates?.step_s) parts.push(`step ${seconds(rates.step_s)}`);
  const isIdle = !rates || !(rates.tokens || rates.prompt);
  const main = isIdle ? "idle" : server.role === "prefill" ? `${rate(rates.prompt)} prompt` : `${rate(rates.tokens)} tokens`;
  setCell("Work", hasStats ? main : "–", parts.join(", "));
  const [used, total_memory] = ["used", "total"].map((name) => values[`baton_engine_memory_${name}_bytes`]);
  const isGpu = server.device === "cuda";
  setCell("Memory", used ? `${memory(used)}${isGpu ? ` of ${memory(total_memory)}` : ""}` : "–", used ? (isGpu ? `of ${server.tp > 1 ? "the first" : "its"} GPU` : `of its process; the host has ${memory(total_memory)}`) : "");
  const ranks = server.tp ? `TP ${server.tp}${server.dcp > 1 ? `, DCP ${server.dcp}` : ""}` : "";
  setCell("Runs on", [server.device, ranks].filter(Boolean).join(", ") || "–", server.attention_backend ? `${server.attention_backend}, ${server.dtype}` : "");
}
