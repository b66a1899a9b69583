// The API key. The page requests it if the proxy requires a key, and stores it for this tab only.

import { $, setText } from "./dom.js";

const NAME = "baton-key";
const defaultNote = $("key-note").textContent;
let onChange = () => {};

export const key = () => sessionStorage.getItem(NAME) ?? "";
export const headers = () => (key() ? { authorization: `Bearer ${key()}` } : {});
export const onKey = (callback) => (onChange = callback);

/** Shows the button "API key" only if the proxy requires API keys, or a key is stored. */
export const offerKey = (hasKeys) => ($("key-button").hidden = !hasKeys && !key());

export function askForKey(problem) {
  setText($("key-note"), problem ?? defaultNote);
  $("key-input").value = key();
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-button").addEventListener("click", () => askForKey());
$("key-dialog").addEventListener("close", () => {
  const answer = $("key-dialog").returnValue;
  $("key-dialog").returnValue = "";
  if (answer === "save") sessionStorage.setItem(NAME, $("key-input").value.trim());
  if (answer === "forget") sessionStorage.removeItem(NAME);
  $("key-input").value = "";
  if (answer) onChange();
});

// A browser does not send the key when it follows a link, so the page fetches linked documents itself.
for (const link of document.querySelectorAll("a[data-doc]")) {
  link.addEventListener("click", async (event) => {
    if (!key() || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const shown = window.open("about:blank", "_blank");
    const answer = await fetch(link.href, { headers: headers() });
    const type = (answer.headers.get("content-type") ?? "").includes("html") ? "text/html" : "text/plain";
    const url = URL.createObjectURL(new Blob([await answer.text()], { type: `${type};charset=utf-8` }));
    if (shown) shown.location = url;
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  });
}
