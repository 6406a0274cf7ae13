// The panel of a sentence: a field to edit its translation, and other translations to choose from.

import { t } from "./messages.js";
import { announce, button, element } from "./page.js";
import { differences } from "./text.js";

/**
 * Opens and closes the panel `menu`. `known` returns the translation of a sentence, `shown` the translation on the page,
 * `search` requests other translations, `take` replaces the translation on the page, and `failed` shows an error.
 */
export function sentencePanel({ menu, known, shown, search, take, failed }) {
  let opened = null;

  async function open(item) {
    const found = known(item);
    if (!found) return;
    if (opened === item) return close();
    close();
    opened = item;
    item.output.lastChild.classList.add("open");
    const field = editor(item), list = element("div");
    list.append(element("p", "", t("Searching for other translations …")));
    menu.replaceChildren(...(shown(item).doubts ?? []).map(doubt => element("p", "doubt", doubt)), field, list);
    menu.hidden = false;
    const pane = menu.parentElement.getBoundingClientRect();
    menu.style.top = `${[...item.output.lastChild.getClientRects()].at(-1).bottom - pane.top + 6}px`;
    fit(field.firstChild);
    if (getComputedStyle(menu).position === "fixed") showAbove(item, menu.getBoundingClientRect().top);
    try {
      found.others ??= await search(item, found);
      if (opened === item) fill(item, list, [found, ...found.others]);
    } catch (error) {
      if (opened === item) list.replaceChildren();
      failed(error);
    }
  }

  /** Returns a form with the translation of a sentence. Enter uses the text. */
  function editor(item) {
    const form = element("form"), field = element("textarea");
    Object.assign(field, { value: shown(item).text, rows: 1, spellcheck: true });
    field.setAttribute("aria-label", t("Your translation of this sentence"));
    const use = element("button", "filled", t("Use"));
    use.hidden = true;
    field.addEventListener("input", () => { use.hidden = field.value.trim() === shown(item).text; fit(field); });
    field.addEventListener("keydown", event => {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault();
      event.stopPropagation();
      form.requestSubmit();
    });
    form.addEventListener("submit", event => {
      event.preventDefault();
      if (use.hidden) close();
      else choose(item, { text: field.value.replace(/\s+/g, " ").trim(), links: [], own: true });
    });
    form.append(field, use);
    return form;
  }

  function fit(field) {
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight + 2}px`;
  }

  function fill(item, list, found) {
    const now = shown(item);
    const rows = found.map(one => {
      const row = button("", () => choose(item, one));
      row.setAttribute("aria-pressed", String(one.text === now.text));
      for (const { text, changed } of differences(now.text, one.text)) row.append(changed ? element("b", "", text) : text);
      return row;
    });
    const title = found.length > 1 ? t("Other translations") : t("There is no other translation of this sentence");
    list.replaceChildren(element("p", "", title), ...rows);
    if (menu.contains(document.activeElement)) return;  // the user is already editing
    (rows.find(row => row.getAttribute("aria-pressed") === "true") ?? rows[0]).focus({ preventScroll: true });
    if (getComputedStyle(menu).position === "fixed") showAbove(item, menu.getBoundingClientRect().top);
  }

  /** Scrolls until the sentence ends above `row`, a distance from the top of the window in pixels. */
  function showAbove(item, row) {
    const below = item.output.lastChild.getBoundingClientRect().bottom + 16 - row;
    if (below > 0) scrollBy({ top: below });
  }

  function choose(item, translation) {
    close();
    take(item, translation);
    focus(item);
    announce(t("Replaced"));
  }

  const focus = item => (item.output.querySelector(".word") ?? item.output.lastChild).focus({ preventScroll: true });

  function close() {
    const had = menu.contains(document.activeElement), item = opened;
    menu.hidden = true;
    opened = null;
    item?.output.lastChild.classList.remove("open");
    if (had && item) focus(item);
  }

  menu.addEventListener("keydown", event => {
    const stops = [...menu.querySelectorAll("textarea, button:not([hidden])")], at = stops.indexOf(document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && event.target.localName !== "textarea") { event.preventDefault(); stops[(at + step + stops.length) % stops.length]?.focus(); }
  });
  menu.addEventListener("focusout", event => { if (event.relatedTarget && !menu.contains(event.relatedTarget)) close(); });

  return { open, close, item: () => opened };
}
