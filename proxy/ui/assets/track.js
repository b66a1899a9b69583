// The picture of hand-offs: prefill servers, decode servers, and a moving baton for each request that a prefill server
// handed to a decode server. The width of a link shows how many of the latest requests used that pair of servers.

import { $, s, setText, percent, plural } from "./dom.js";

const MAX_BATONS = 48;
const MAX_LINKS = 120;
const FLIGHT_MS = 900;

export class Track {
  constructor() {
    this.svg = $("track");
    this.links = s("g", {});
    this.nodes = s("g", {});
    this.batons = s("g", {});
    this.svg.append(this.links, this.nodes, this.batons);
    this.seen = 0;
    this.flights = [];
    this.places = new Map();
    new ResizeObserver(() => this.store && this.draw(this.store)).observe(this.svg.parentElement);
  }

  update(store) {
    this.store = store;
    this.draw(store);
    if (this.epoch !== store.epoch) this.seen = 0; // a restarted proxy counts requests from 1 again
    this.epoch = store.epoch;
    const isFirst = this.seen === 0;
    for (const row of store.requests.values()) {
      if (row.number <= this.seen || row.status === null) continue;
      if (!isFirst && handOff(row)) this.fly(handOff(row));
    }
    for (const row of store.requests.values()) if (row.status !== null) this.seen = Math.max(this.seen, row.number);
    this.seen = this.seen || 1e-9;
  }

  draw(store) {
    const all = [...store.servers.values()];
    const columns = [all.filter((one) => one.role === "prefill"), all.filter((one) => one.role !== "prefill")];
    const most = Math.max(1, ...columns.map((column) => column.length));
    const width = Math.max(280, this.svg.parentElement.clientWidth - 32);
    const rowHeight = most > 16 ? 20 : most > 6 ? 28 : 44;
    const height = most * rowHeight + 6;
    const nodeWidth = Math.min(210, width * 0.36);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    const drawn = [];
    this.places.clear();
    columns.forEach((column, side) => {
      const top = ((most - column.length) * rowHeight) / 2;
      column.forEach((server, at) => {
        const place = { x: side ? width - nodeWidth - 1 : 1, y: top + at * rowHeight + 3, width: nodeWidth, height: rowHeight - 5, side };
        this.places.set(server.name, place);
        drawn.push(node(server, place));
      });
    });
    this.nodes.replaceChildren(...drawn);
    this.drawLinks(store);
  }

  drawLinks(store) {
    const numbers = new Map();
    let alone = 0;
    let ended = 0;
    for (const row of store.requests.values()) {
      if (row.status === null) continue;
      const pair = handOff(row);
      ended += 1;
      if (pair) numbers.set(pair.join(" "), (numbers.get(pair.join(" ")) ?? 0) + 1);
      else if (row.alone) alone += 1;
    }
    const widest = Math.max(1, ...numbers.values());
    const links = [...numbers].sort((a, b) => b[1] - a[1]).slice(0, MAX_LINKS).flatMap(([pair, number]) => {
      const path = this.path(...pair.split(" "));
      return path ? [s("path", { class: "link", d: path, "stroke-width": 1 + (5 * number) / widest, "stroke-opacity": (0.15 + (0.45 * number) / widest) / (1 + numbers.size / 100) })] : [];
    });
    this.links.replaceChildren(...links);
    const handed = [...numbers.values()].reduce((sum, number) => sum + number, 0);
    setText($("track-summary"), summary(ended, handed, alone));
  }

  path(from, to) {
    const [a, b] = [this.places.get(from), this.places.get(to)];
    if (!a || !b) return null;
    const [x1, y1, x2, y2] = [a.x + a.width, a.y + a.height / 2, b.x, b.y + b.height / 2];
    const middle = (x1 + x2) / 2;
    return `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  }

  fly([from, to]) {
    const path = this.path(from, to);
    if (!path || this.flights.length >= MAX_BATONS || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const line = s("path", { d: path });
    const baton = s("rect", { class: "baton", width: 14, height: 5, rx: 2.5, x: -7, y: -2.5, visibility: "hidden" });
    this.batons.append(baton);
    this.flights.push({ line, length: line.getTotalLength(), baton, from: performance.now() + Math.random() * 900 });
    if (this.flights.length === 1) requestAnimationFrame((now) => this.step(now));
  }

  step(now) {
    this.flights = this.flights.filter(({ line, length, baton, from }) => {
      const part = (now - from) / FLIGHT_MS;
      if (part >= 1) baton.remove();
      else if (part >= 0) {
        const [at, next] = [line.getPointAtLength(part * length), line.getPointAtLength(Math.min(1, part + 0.02) * length)];
        baton.setAttribute("visibility", "visible");
        baton.setAttribute("transform", `translate(${at.x} ${at.y}) rotate(${(Math.atan2(next.y - at.y, next.x - at.x) * 180) / Math.PI})`);
      }
      return part < 1;
    });
    if (this.flights.length) requestAnimationFrame((later) => this.step(later));
  }
}

/** Returns a sentence with the numbers of requests that ended, were disaggregated, and used a decode server alone. */
export function summary(ended, handed, alone) {
  const [pair, single] = ["from a prefill server to a decode server", "to a decode server alone"];
  if (!ended) return "no request has ended yet";
  if (ended === 1) return handed ? `the latest request went ${pair}` : alone ? `the latest request went ${single}` : "the latest request reached no decode server";
  return `of the latest ${plural(ended, "request")}, ${handed} went ${pair} and ${alone} ${single}`;
}

/** Returns the names of the prefill and the decode server of a disaggregated request; null for other requests. */
export function handOff(row) {
  if (row.alone || row.legs.length < 2) return null;
  const [from, to] = [row.legs.at(-2)[0], row.legs.at(-1)[0]];
  return from.startsWith("prefill") && to.startsWith("decode") ? [from, to] : null;
}

function node(server, place) {
  const { x, y, width, height } = place;
  const used = busy(server);
  const isUp = server.state === "ready" && server.circuit === "closed";
  const middle = y + height / 2;
  const status = isUp ? `${server.in_flight} in flight` : server.state === "ready" ? `circuit ${server.circuit}` : server.state === "not_ready" ? "down" : server.state;
  const parts = [
    s("rect", { class: `node ${isUp ? "" : "down"}`, x, y, width, height, rx: 6 }),
    s("rect", { class: "fill", x, y, width: width * used, height, rx: 6 }),
    s("text", { x: x + 9, y: middle + 4 }, server.name),
  ];
  if (width > 170 || !isUp) parts.push(s("text", { class: "faint", x: x + width - 9, y: middle + 4, "text-anchor": "end" }, status));
  parts.push(s("title", {}, `${server.name}: ${status}, ${percent(used)} of its KV blocks in use`));
  return s("g", { class: server.role }, ...parts);
}

function busy(server) {
  const states = Object.entries(server.values ?? {}).filter(([name]) => name.startsWith("baton_kv_blocks{"));
  const total = states.reduce((sum, [, number]) => sum + number, 0);
  const idle = states.filter(([name]) => /free|cached/.test(name)).reduce((sum, [, number]) => sum + number, 0);
  return total ? 1 - idle / total : 0;
}
