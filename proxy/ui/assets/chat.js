// A chat through the cluster: streamed answers, the timeline of each answer, and commands that send the same requests.

import { $, h, setText, seconds, plural } from "./dom.js";
import { drawTimeline, elapsed, kvText } from "./requests.js";
import { headers, askForKey } from "./key.js";

const MAX_TURNS = 40; // messages that are shown and sent
const MAX_CHARS = 200_000; // characters of an answer that are shown

export class Chat {
  constructor() {
    this.turns = [];
    this.openAnswers = new Map(); // answers with timelines that may still change, by x-request-id
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
      this.openAnswers.clear();
      this.log.replaceChildren();
      $("chat-hint").hidden = false;
      $("chat-input").focus();
    });
    $("chat-model").addEventListener("change", () => this.updateSnippets());
    for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
    this.updateSnippets();
  }

  update(store) {
    this.setModels([...store.servers.values()].flatMap((server) => server.models));
    this.setKeys(store.hasKeys);
    this.updateTimelines(store);
  }

  /** Sets whether the commands to copy contain an API key. */
  setKeys(hasKeys) {
    if (this.hasKeys === hasKeys) return;
    this.hasKeys = hasKeys;
    this.updateSnippets();
  }

  setModels(names) {
    const models = [...new Set(names)].sort();
    const select = $("chat-model");
    if ([...select.options].map((option) => option.value).join("\n") !== models.join("\n")) {
      const chosen = select.value;
      select.parentElement.hidden = !models.length;
      select.replaceChildren(...models.map((model) => h("option", { value: model }, model)));
      if (models.includes(chosen)) select.value = chosen;
      this.updateSnippets();
    }
  }

  /** Fetches the models for a client with a key that may chat, but may not see the page's numbers. */
  async askForModels() {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (answer.ok) this.setModels((await answer.json()).data.map((model) => model.id));
  }

  updateTimelines(store) {
    for (const row of store.requests.values()) {
      const answer = this.openAnswers.get(row.id);
      if (!answer) continue;
      this.atEnd(() => drawTimeline(answer.timeline, row, elapsed(row, store.now)));
      if (row.end_s !== null && Object.keys(row.served).length === new Set(row.legs.map(([name]) => name)).size) this.openAnswers.delete(row.id);
    }
  }

  async send() {
    const text = $("chat-input").value.trim();
    if (!text || this.controller) return;
    $("chat-input").value = "";
    this.controller = new AbortController();
    this.setBusy(true);
    const turns = this.turns; // the user may begin a new conversation before the answer ends
    turns.push({ role: "user", content: text });
    if (turns.length > MAX_TURNS) turns.splice(0, 2); // a question and its answer: chat templates require that the user comes first
    const answer = this.addTurn(text);
    try {
      await this.requestAnswer(answer);
      turns.push({ role: "assistant", content: answer.content });
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.message.classList.add("error");
        answer.message.append(`${answer.message.textContent ? "\n" : ""}${error.message}`);
      }
      if (answer.content && error.name === "AbortError") turns.push({ role: "assistant", content: answer.content });
      else turns.pop();
    } finally {
      this.controller = null;
      this.setBusy(false);
      this.atEnd(() => this.showTimes(answer));
    }
  }

  /** Calls `change`, which changes the log. Scrolls to the log's end if that was visible before. */
  atEnd(change) {
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    change();
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  addTurn(text) {
    const answer = { message: h("div", { class: "message" }), times: h("p", { class: "times" }), timeline: h("span", { class: "timeline", role: "img", "aria-label": "no phases yet" }), startedAt: performance.now(), firstAt: null, lastAt: null, tokens: 0, content: "", kv: null };
    $("chat-hint").hidden = true;
    this.log.append(h("div", { class: "message user" }, text), h("div", { class: "answer" }, answer.message, answer.timeline, answer.times));
    while (this.log.children.length > 2 * MAX_TURNS) this.log.firstChild.remove();
    this.log.scrollTop = this.log.scrollHeight;
    this.showTimes(answer);
    return answer;
  }

  async requestAnswer(answer) {
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
    if (id) this.openAnswers.set(id.slice(0, 128), answer);
    if (this.openAnswers.size > MAX_TURNS) this.openAnswers.delete(this.openAnswers.keys().next().value);
    if (!response.ok) {
      if (response.status === 401) askForKey();
      const reply = await response.json().catch(() => null);
      throw new Error(reply?.error?.message ?? `status ${response.status}`);
    }
    for await (const data of events(response.body)) this.addEvent(answer, data);
  }

  addEvent(answer, data) {
    if (data.error) throw new Error(data.error.message);
    if (data.baton_kv) answer.kv = data.baton_kv;
    const piece = data.choices?.[0]?.delta;
    const text = `${piece?.reasoning_content ?? ""}${piece?.content ?? ""}`;
    if (!text) return;
    answer.lastAt = performance.now();
    answer.firstAt ??= answer.lastAt;
    answer.tokens += 1;
    this.atEnd(() => {
      if (answer.message.textContent.length < MAX_CHARS) {
        answer.message.append(text);
        answer.content += piece.content ?? ""; // reasoning is not sent back in the next request
      }
      this.showTimes(answer);
    });
  }

  showTimes(answer) {
    const since = (at) => seconds((at - answer.startedAt) / 1000);
    const parts = [answer.firstAt === null ? (this.controller ? "waiting" : "no token") : `first token after ${since(answer.firstAt)}`];
    if (answer.tokens > 1) parts.push(`then one every ${seconds((answer.lastAt - answer.firstAt) / 1000 / (answer.tokens - 1))}`, `${plural(answer.tokens, "piece")} in ${since(answer.lastAt)}`);
    setText(answer.times, parts.join(", "));
    if (answer.kv) answer.times.append(h("br", {}), "prompt tokens transferred / recomputed / skipped ", h("b", {}, kvText(answer.kv)));
  }

  setBusy(isBusy) {
    $("chat-send").hidden = isBusy;
    $("chat-stop").hidden = !isBusy;
    this.log.setAttribute("aria-busy", String(isBusy));
    if (!isBusy) $("chat-input").focus({ preventScroll: true });
  }

  updateSnippets() {
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
