// Polls the proxy for changes, stores a limited number of them, and updates every part of the page.

import { $, h, setText, plural } from "./dom.js";
import { Charts, MAX_WINDOW, derive } from "./charts.js";
import { Track } from "./track.js";
import { Servers } from "./servers.js";
import { Requests } from "./requests.js";
import { Chat } from "./chat.js";
import { key, askForKey, offerKey, onKey, headers } from "./key.js";

const MAX_POINTS = 300;
const MAX_HISTORY = 360;
const MAX_REQUESTS = 250;
const MAX_WAIT_S = 5; // longest time between two polls if the proxy does not answer
const POLL_TIMEOUT_S = 10; // a working proxy answers within 2 s; without a timeout, browsers would wait for minutes

const store = { epoch: "", number: 0, servers: new Map(), columns: [], points: [], history: [], requests: new Map() };
const chat = new Chat();
const parts = [new Track(), new Charts(), new Servers(), new Requests(), chat];
let failures = 0;
let timer = 0;
let isPolling = false;

function applyChanges(changes) {
  if (changes.epoch !== store.epoch) {
    store.servers.clear();
    store.requests.clear();
    store.points.length = 0;
    store.history.length = 0;
  }
  Object.assign(store, { epoch: changes.epoch, number: changes.number, interval_s: changes.interval_s, now: changes.at, hasKeys: changes.has_keys });
  store.gap_s = 2.5 * Math.max(changes.history_interval_s, changes.interval_s);
  for (const [name, row] of Object.entries(changes.servers)) {
    const before = store.servers.get(name);
    store.servers.set(name, { ...row, name, before, at: changes.points.at(-1)?.at ?? changes.at });
    if (before) delete before.before;
  }
  const names = new Set(changes.names);
  for (const name of store.servers.keys()) if (!names.has(name)) store.servers.delete(name);
  if (changes.columns) store.columns = changes.columns;
  const named = (row) => Object.fromEntries(store.columns.map((name, at) => [name, row[at] ?? 0]));
  const append = (points, added, maxPoints, others) => {
    for (const point of added) {
      const counters = { ...point, prefill: named(point.prefill), decode: named(point.decode) };
      const before = [...points.slice(-MAX_WINDOW), ...others.slice(-MAX_WINDOW)].filter((other) => other.at < point.at);
      points.push(derive(counters, before.sort((a, b) => a.at - b.at), store.gap_s));
      if (points.length > MAX_WINDOW) delete points.at(-MAX_WINDOW - 1).raw;
    }
    points.splice(0, Math.max(0, points.length - maxPoints));
  };
  append(store.history, changes.history, MAX_HISTORY, []);
  append(store.points, changes.points, MAX_POINTS, store.history);
  for (const row of changes.requests) store.requests.set(row.number, row);
  const running = new Set(changes.running);
  for (const [number, row] of store.requests) if (row.status === null && !running.has(number)) store.requests.delete(number);
  const numbers = [...store.requests.keys()].sort((a, b) => a - b);
  for (const number of numbers.slice(0, Math.max(0, numbers.length - MAX_REQUESTS))) store.requests.delete(number);
}

function updateHeader() {
  const all = [...store.servers.values()];
  const ready = all.filter((server) => server.state === "ready" && server.circuit === "closed");
  const decodes = ready.filter((server) => server.role === "decode");
  const [word, kind] = !decodes.length ? ["not ready", "bad"] : ready.length < all.length ? ["degraded", "warn"] : ["ready", "good"];
  const pill = $("status");
  setText(pill, `${word}: ${ready.length} of ${plural(all.length, "server")}`);
  pill.className = `pill ${kind}`;
  const models = [...new Set(all.flatMap((server) => server.models))];
  const versions = [...new Set(all.map((server) => server.version).filter(Boolean))];
  setText($("models"), [models.join(", "), versions.length ? `Baton ${versions.join(", ")}` : ""].filter(Boolean).join(" · "));
}

function banner(text, needsKey = false) {
  const box = $("banner");
  if (text === box.dataset.text) return;
  box.dataset.text = text;
  box.hidden = !text;
  box.replaceChildren(text);
  if (needsKey) {
    const button = h("button", { type: "button" }, "Give a key");
    button.addEventListener("click", () => askForKey());
    box.append(button);
  }
}

async function poll() {
  if (isPolling || document.hidden) return;
  isPolling = true;
  clearTimeout(timer);
  let wait_s = 1;
  try {
    const url = `/ui/state?since=${store.number}&epoch=${encodeURIComponent(store.epoch)}`;
    const answer = await fetch(url, { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(POLL_TIMEOUT_S * 1000) });
    if (answer.status === 401 || answer.status === 403) {
      const message = answer.status === 401 && !key() ? "This proxy requires an API key. The numbers of this page require an admin key." : (await answer.json()).error.message;
      banner(message, true);
      offerKey(true);
      chat.setKeys(true);
      if (answer.status === 401 && !failures) askForKey(key() ? message : undefined);
      failures += 1;
      wait_s = null; // no poll until the user enters a key
      if (answer.status === 403) await chat.askForModels();
    } else if (!answer.ok) {
      throw new Error(`it answers with status ${answer.status}`);
    } else {
      applyChanges(await answer.json());
      failures = 0;
      banner("");
      updateHeader();
      offerKey(store.hasKeys);
      for (const part of parts) part.update(store);
      wait_s = store.interval_s;
    }
  } catch (error) {
    failures += 1;
    wait_s = Math.min(failures, MAX_WAIT_S);
    const reason = error.name === "TimeoutError" ? `no answer within ${POLL_TIMEOUT_S} s` : error.message;
    banner(`The state of the proxy cannot be read (${reason}); trying again.`);
    $("status").className = "pill bad";
    setText($("status"), "no connection");
  } finally {
    isPolling = false;
  }
  if (wait_s !== null) timer = setTimeout(poll, wait_s * 1000);
}

document.addEventListener("visibilitychange", poll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => parts.forEach((part) => part.recolor?.(store)));
onKey(() => {
  failures = 0;
  poll();
});
poll();
