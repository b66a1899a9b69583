// Commands for users to copy. They send a request like those of the page's chat.

import { $, setText } from "./dom.js";
import { copy } from "./markdown.js";

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy(button, $(button.dataset.copy).textContent));
}

/** Shows the commands for a model. They send an API key only if the cluster requires one. */
export function updateSnippets(model, hasKeys) {
  const url = `${location.origin}/v1`;
  const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello!" }], stream: true });
  setText($("code-curl"), `curl -N ${url}/chat/completions \\\n${hasKeys ? '  -H "Authorization: Bearer $BATON_API_KEY" \\\n' : ""}  -H "Content-Type: application/json" \\\n  -d ${shell(body)}`);
  setText($("code-terminal"), `baton chat --url ${location.origin}`);
  setText($("code-python"), [
    "# pip install openai",
    ...(hasKeys ? ["import os"] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(url)},`,
    `                api_key=${hasKeys ? 'os.environ["BATON_API_KEY"]' : '"none"'})`,
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
