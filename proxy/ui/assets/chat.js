// A chat through the cluster: answers as they stream, the timeline of each answer, and commands that do the same.

import { $, h, setText, seconds, plural } from "./dom.js";
import { drawTimeline, elapsed, kvText } from "./requests.js";
import { headers, askForKey } from "./key.js";

const MAX_TURNS = 40; // messages that are shown and sent
const MAX_CHARS = 200_000; // characters of an answer that are shown

export class Chat {
  constructor() {
    this.turns = [];
    this.open = new Map(); // answers to requests with rows that may still change, by x-request-id
    this.log = $("chat-log");
    $("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("chat-input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("chat-form").requestSubmit();
      }
    });
    $("chat-stop").addEventListener("click", () => this.controller?.abort());
    $("chat-new").addEventListener("click", () => {
      this.controller?.abort();
      this.turns = [];
      this.open.clear();
      this.log.replaceChildren();
      $("chat-hint").hidden = false;
      $("chat-input").focus();
    });
    $("chat-model").addEventListener("change", () => this.snippets());
    for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
    this.snippets();
  }

  update(store) {
    this.offer([...store.servers.values()].flatMap((server) => server.models));
    this.setKeys(store.hasKeys);
    this.follow(store);
  }

  /** Sets whether the commands to copy contain an API key. */
  setKeys(hasKeys) {
    if (this.hasKeys === hasKeys) return;
    this.hasKeys = hasKeys;
    this.snippets();
  }

  offer(given) {
    const models = [...new Set(given)].sort();
    const select = $("chat-model");
    if ([...select.options].map((option) => option.value).join("\n") !== models.join("\n")) {
      const chosen = select.value;
      select.parentElement.hidden = !models.length;
      select.replaceChildren(...models.map((model) => h("option", { value: model }, model)));
      if (models.includes(chosen)) select.value = chosen;
      this.snippets();
    }
  }

  /** Fetches the models for a client with a key that may chat, but may not see the page's numbers. */
  async askForModels() {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (answer.ok) this.offer((await answer.json()).data.map((model) => model.id));
  }

  follow(store) {
    for (const row of store.requests.values()) {
      const answer = this.open.get(row.id);
      if (!answer) continue;
      this.atEnd(() => drawTimeline(answer.timeline, row, elapsed(row, store.now)));
      if (row.end_s !== null && Object.keys(row.served).length === new Set(row.legs.map(([name]) => name)).size) this.open.delete(row.id);
    }
  }

  async send() {
    const text = $("chat-input").value.trim();
    if (!text || this.controller) return;
    $("chat-input").value = "";
    this.controller = new AbortController();
    this.busy(true);
    const turns = this.turns; // the user may begin a new conversation before the answer ends
    turns.push({ role: "user", content: text });
    if (turns.length > MAX_TURNS) turns.splice(0, 2); // a question and its answer: chat templates require that the user comes first
    const answer = this.show(text);
    try {
      await this.ask(answer);
      turns.push({ role: "assistant", content: answer.said });
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.message.classList.add("error");
        answer.message.append(`${answer.message.textContent ? "\n" : ""}${error.message}`);
      }
      if (answer.said && error.name === "AbortError") turns.push({ role: "assistant", content: answer.said });
      else turns.pop();
    } finally {
      this.controller = null;
      this.busy(false);
      this.atEnd(() => this.tell(answer));
    }
  }

  /** Makes a change of the log; if its end was visible before, scrolls so that the end stays visible. */
  atEnd(change) {
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    change();
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  show(text) {
    const answer = { message: h("div", { class: "message" }), told: h("p", { class: "told" }), timeline: h("span", { class: "timeline", role: "img", "aria-label": "no phases yet" }), began: performance.now(), first: null, last: null, tokens: 0, said: "", kv: null };
    $("chat-hint").hidden = true;
    this.log.append(h("div", { class: "message user" }, text), h("div", { class: "answer" }, answer.message, answer.timeline, answer.told));
    while (this.log.children.length > 2 * MAX_TURNS) this.log.firstChild.remove();
    this.log.scrollTop = this.log.scrollHeight;
    this.tell(answer);
    return answer;
  }

  async ask(answer) {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({
        ...($("chat-model").value ? { model: $("chat-model").value } : {}),
        messages: this.turns,
        max_tokens: $("chat-tokens").valueAsNumber || 128,
        temperature: Number.isNaN($("chat-temperature").valueAsNumber) ? 1 : $("chat-temperature").valueAsNumber,
        stream: true,
      }),
      signal: this.controller.signal,
    });
    const id = response.headers.get("x-request-id");
    if (id) this.open.set(id.slice(0, 128), answer);
    if (this.open.size > MAX_TURNS) this.open.delete(this.open.keys().next().value);
    if (!response.ok) {
      if (response.status === 401) askForKey();
      const told = await response.json().catch(() => null);
      throw new Error(told?.error?.message ?? `status ${response.status}`);
    }
    for await (const data of events(response.body)) this.hear(answer, data);
  }

  hear(answer, data) {
    if (data.error) throw new Error(data.error.message);
    if (data.baton_kv) answer.kv = data.baton_kv;
    const piece = data.choices?.[0]?.delta;
    const text = `${piece?.reasoning_content ?? ""}${piece?.content ?? ""}`;
    if (!text) return;
    answer.last = performance.now();
    answer.first ??= answer.last;
    answer.tokens += 1;
    this.atEnd(() => {
      if (answer.message.textContent.length < MAX_CHARS) {
        answer.message.append(text);
        answer.said += piece.content ?? ""; // reasoning is not sent back in the next request
      }
      this.tell(answer);
    });
  }

  tell(answer) {
    const since = (at) => seconds((at - answer.began) / 1000);
    const parts = [answer.first === null ? (this.controller ? "waiting" : "no token") : `first token after ${since(answer.first)}`];
    if (answer.tokens > 1) parts.push(`then one each ${seconds((answer.last - answer.first) / 1000 / (answer.tokens - 1))}`, `${plural(answer.tokens, "piece")} in ${since(answer.last)}`);
    setText(answer.told, parts.join(", "));
    if (answer.kv) answer.told.append(h("br", {}), "prompt tokens transferred / recomputed / skipped ", h("b", {}, kvText(answer.kv)));
  }

  busy(isBusy) {
    $("chat-send").hidden = isBusy;
    $("chat-stop").hidden = !isBusy;
    this.log.setAttribute("aria-busy", String(isBusy));
    if (!isBusy) $("chat-input").focus({ preventScroll: true });
  }

  snippets() {
    const model = $("chat-model").value || "MODEL";
    const url = `${location.origin}/v1`;
    const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
    const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello!" }], stream: true });
    setText($("code-curl"), `curl -N ${url}/chat/completions \\\n${this.hasKeys ? '  -H "Authorization: Bearer $BATON_API_KEY" \\\n' : ""}  -H "Content-Type: application/json" \\\n  -d ${shell(body)}`);
    setText($("code-python"), [
      "# pip install openai",
      ...(this.hasKeys ? ["import os"] : []),
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url=${JSON.stringify(url)},`,
      `                api_key=${this.hasKeys ? 'os.environ["BATON_API_KEY"]' : '"none"'})`,
      "stream = client.chat.completions.create(",
      `    model=${JSON.stringify(model)},`,
      '    messages=[{"role": "user", "content": "Hello!"}],',
      "    stream=True,",
      ")",
      "for chunk in stream:",
      "    for choice in chunk.choices:",
      '        print(choice.delta.content or "", end="", flush=True)',
    ].join("\n"));
  }
}

/** Yields the parsed JSON of each event of a stream, until the event [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split(/\r?\n\r?\n/);
    rest = pieces.pop();
    for (const piece of pieces) {
      const data = piece.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function copy(button) {
  const block = $(button.dataset.copy);
  const label = button.firstChild;
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(block.textContent);
  } catch { // browsers forbid this on pages of other hosts without TLS: select the text instead
    getSelection().selectAllChildren(block);
    isCopied = document.execCommand("copy");
  }
  label.textContent = isCopied ? "Copied" : "Selected";
  setTimeout(() => (label.textContent = "Copy"), 1500);
}
