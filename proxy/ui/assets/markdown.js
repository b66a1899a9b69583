// Renders Markdown from a model as sanitized HTML, which has no scripts, styles, images or forms.

import { h } from "./dom.js";

const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
marked.use({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text), // HTML in an answer is shown as text
    image: ({ href, text }) => `<a href="${escape(href).replaceAll('"', "&quot;")}">${escape(text || href)}</a>`, // the page loads nothing from other hosts
  },
});
const PURIFY_OPTIONS = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "pre", "code", "em", "strong", "del", "a", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Replaces the content of `element` with rendered Markdown. Each block of code gets a button that copies it. */
export function renderMarkdown(element, text) {
  const content = DOMPurify.sanitize(marked.parse(text), PURIFY_OPTIONS);
  for (const link of content.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const table of content.querySelectorAll("table")) {
    const box = h("div", { class: "scroll" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const block of content.querySelectorAll("pre")) {
    const code = block.textContent.replace(/\n$/, "");
    const box = h("div", { class: "code" });
    block.replaceWith(box);
    block.tabIndex = 0;
    box.append(block, copyButton(() => code, "Copy", "code"));
  }
  element.replaceChildren(content);
}

/** Returns a button that copies a text; `what` names the text for screen readers. */
export function copyButton(text, label, what) {
  const button = h("button", { type: "button", class: "quiet" }, label, h("span", { class: "hidden" }, ` the ${what}`));
  button.addEventListener("click", () => copy(button, text()));
  return button;
}

/** Copies a text, and shows the result on the button for a moment. */
export async function copy(button, text) {
  const label = button.firstChild;
  const original = button.dataset.label ?? label.textContent;
  button.dataset.label = original;
  label.textContent = (await write(text)) ? "Copied" : "Failed";
  setTimeout(() => (label.textContent = original), 1500);
}

async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // without TLS, browsers allow navigator.clipboard only on pages of localhost
    const field = h("textarea", { class: "hidden" });
    field.value = text;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}
