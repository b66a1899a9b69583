// A chat through the cluster. Answers are streamed, and shown as Markdown with their times, their timelines and the
// sources of their KV.

import { $, h, setText, seconds, plural } from "./dom.js";
import { drawTimeline, elapsed } from "./requests.js";
import { headers, askForKey } from "./key.js";
import { kvHelp, kvNumbers } from "./kv.js";
import { copyButton, renderMarkdown } from "./markdown.js";
import { updateSnippets } from "./snippets.js";

const MAX_TURNS = 40; // limit on messages that are shown and sent
const MAX_CHARS = 200_000; // limit on characters of an answer that are shown
const DRAW_MS = 80; // pause between drawings of an answer, because rendering takes longer than receiving a token
const SYSTEM = "baton-system"; // the system prompt, stored until the tab is closed

export class Chat {
  constructor() {
    this.turns = [];
    this.openAnswers = new Map(); // answers with timelines that may still change, by x-request-id
    this.log = $("chat-log");
    $("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = $("chat-input").value.trim();
      if (!text || this.controller) return;
      $("chat-input").value = "";
      this.send(text);
    });
    $("chat-input").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.controller?.abort();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("chat-form").requestSubmit();
      }
    });
    $("chat-stop").addEventListener("click", () => this.controller?.abort());
    $("chat-new").addEventListener("click", () => this.reset());
    $("chat-wide").addEventListener("click", () => this.toggleWide());
    $("chat-system").value = sessionStorage.getItem(SYSTEM) ?? "";
    $("chat-system").addEventListener("input", () => {
      sessionStorage.setItem(SYSTEM, $("chat-system").value);
      this.showSystem();
    });
    $("chat-model").addEventListener("change", () => this.showSnippets());
    this.showSystem();
    this.showSnippets();
  }

  update(store) {
    this.setModels([...store.servers.values()].flatMap((server) => server.models));
    this.setKeys(store.hasKeys);
    this.updateTimelines(store);
  }

  reset() {
    this.controller?.abort();
    this.turns = [];
    this.openAnswers.clear();
    this.log.replaceChildren();
    $("chat-hint").hidden = false;
    $("chat-input").focus();
  }

  toggleWide() {
    const isWide = document.body.classList.toggle("wide-chat");
    $("chat-wide").setAttribute("aria-pressed", String(isWide));
    $("chat").scrollIntoView({ block: "start" });
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** Shows the beginning of the system prompt next to the title of its field, which may be closed. */
  showSystem() {
    const text = $("chat-system").value.trim();
    setText($("chat-system-state"), text ? `: ${text.length > 40 ? `${text.slice(0, 40)}…` : text}` : "");
  }

  /** Sets whether the commands for users to copy send an API key. */
  setKeys(hasKeys) {
    if (this.hasKeys === hasKeys) return;
    this.hasKeys = hasKeys;
    this.showSnippets();
  }

  showSnippets() {
    updateSnippets($("chat-model").value || "MODEL", Boolean(this.hasKeys));
  }

  setModels(names) {
    const models = [...new Set(names)].sort();
    const select = $("chat-model");
    if ([...select.options].map((option) => option.value).join("\n") !== models.join("\n")) {
      const chosen = select.value;
      select.parentElement.hidden = models.length < 2;
      select.replaceChildren(...models.map((model) => h("option", { value: model }, model)));
      if (models.includes(chosen)) select.value = chosen;
      this.showSnippets();
    }
  }

  /** Fetches the names of the models, for a user with an API key that may chat but may not read the page's data. */
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

  async send(text) {
    const turns = this.turns; // the user may begin a new conversation before the answer ends
    turns.push({ role: "user", content: text });
    if (turns.length > MAX_TURNS) turns.splice(0, 2); // a question with its answer: chat templates need a user's message first
    this.controller = new AbortController();
    this.setBusy(true);
    const answer = this.addTurn(text);
    let error = null;
    try {
      await this.requestAnswer(answer);
    } catch (problem) {
      error = problem;
    }
    const isStopped = error?.name === "AbortError";
    if (error && !isStopped) answer.element.append(h("div", { class: "message error" }, error.message));
    if (!error || (isStopped && answer.content)) turns.push({ role: "assistant", content: answer.content });
    else turns.pop();
    this.controller = null;
    this.setBusy(false);
    this.atEnd(() => this.endAnswer(answer, isStopped));
  }

  /** Removes an answer and sends its question again. */
  regenerate(answer) {
    if (this.controller) return;
    if (this.turns.at(-1)?.role === "assistant") this.turns.splice(-2);
    answer.element.previousElementSibling.remove();
    answer.element.remove();
    this.send(answer.question);
  }

  /** Calls `change`, which changes the log. If the end of the log was visible before, scrolls to the end. */
  atEnd(change) {
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    change();
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  addTurn(question) {
    const answer = {
      question, content: "", reasoning: "", kv: null, tokens: null, pieces: 0,
      startedAt: performance.now(), firstAt: null, lastAt: null,
      message: h("div", { class: "message markdown" }),
      thoughts: h("pre", { tabindex: 0 }),
      times: h("p", { class: "times" }),
      timeline: h("span", { class: "timeline", role: "img", "aria-label": "no phases yet" }),
    };
    answer.details = h("details", { class: "reasoning", open: "", hidden: "" }, h("summary", {}, "Reasoning"), answer.thoughts);
    answer.element = h("div", { class: "answer" }, answer.details, answer.message, answer.timeline, answer.times);
    $("chat-hint").hidden = true;
    this.log.append(h("div", { class: "message user" }, question), answer.element);
    while (this.log.children.length > 2 * MAX_TURNS) this.log.firstChild.remove();
    this.log.scrollTop = this.log.scrollHeight;
    this.showTimes(answer);
    return answer;
  }

  async requestAnswer(answer) {
    const system = $("chat-system").value.trim();
    const maxTokens = $("chat-tokens").valueAsNumber;
    const temperature = $("chat-temperature").valueAsNumber;
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({
        ...($("chat-model").value ? { model: $("chat-model").value } : {}),
        messages: [...(system ? [{ role: "system", content: system }] : []), ...this.turns],
        max_tokens: maxTokens || 512,
        temperature: Number.isNaN(temperature) ? 1 : temperature,
        stream: true,
        stream_options: { include_usage: true },
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
    answer.kv = data.baton_kv ?? answer.kv;
    answer.tokens = data.usage?.completion_tokens ?? answer.tokens;
    const choice = data.choices?.[0];
    answer.isCut ||= choice?.finish_reason === "length";
    const { reasoning_content: reasoning = "", content = "" } = choice?.delta ?? {};
    if (!reasoning && !content) return;
    answer.lastAt = performance.now();
    answer.firstAt ??= answer.lastAt;
    answer.pieces += 1;
    answer.reasoning = (answer.reasoning + (reasoning ?? "")).slice(0, MAX_CHARS);
    answer.content = (answer.content + (content ?? "")).slice(0, MAX_CHARS); // reasoning is not sent back in the next request
    answer.timer ??= setTimeout(() => this.atEnd(() => this.draw(answer)), DRAW_MS);
  }

  draw(answer) {
    clearTimeout(answer.timer);
    answer.timer = null;
    answer.details.hidden = !answer.reasoning;
    setText(answer.thoughts, answer.reasoning);
    renderMarkdown(answer.message, answer.content);
    this.showTimes(answer);
  }

  endAnswer(answer, isStopped) {
    this.draw(answer);
    if (answer.content) answer.details.open = false;
    const again = h("button", { type: "button", class: "quiet regenerate" }, "Regenerate");
    again.addEventListener("click", () => this.regenerate(answer));
    const notes = [isStopped ? "stopped" : "", answer.isCut ? "cut at the token limit" : ""].filter(Boolean).join(", ");
    answer.element.append(h("div", { class: "actions" }, answer.content ? copyButton(() => answer.content, "Copy", "answer") : null, again, notes ? h("span", { class: "faint" }, notes) : null));
  }

  showTimes(answer) {
    const since = (at) => seconds((at - answer.startedAt) / 1000);
    const parts = [answer.firstAt === null ? (this.controller ? "waiting" : "no token") : `first token after ${since(answer.firstAt)}`];
    const number = answer.tokens ?? answer.pieces;
    const elapsed_s = (answer.lastAt - answer.firstAt) / 1000;
    if (number > 1 && elapsed_s > 0) parts.push(`${((number - 1) / elapsed_s).toFixed(1)} tokens/s`);
    if (number > 1) parts.push(`${plural(number, "token")} in ${since(answer.lastAt)}`);
    if (!answer.kv) setText(answer.times, parts.join(", "));
    else if (!answer.isExplained) {
      answer.isExplained = true;
      const [button, list] = kvHelp();
      answer.times.replaceChildren(parts.join(", "), h("br", {}), "prompt tokens: ", kvNumbers(answer.kv), " ", button);
      answer.times.after(list);
    }
  }

  setBusy(isBusy) {
    $("chat-send").hidden = isBusy;
    $("chat-stop").hidden = !isBusy;
    this.log.setAttribute("aria-busy", String(isBusy));
    if (!isBusy) $("chat-input").focus({ preventScroll: true });
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
