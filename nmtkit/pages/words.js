// Marks a word and the words linked to it in both texts, for pointers and for arrow keys.

import { t } from "./messages.js";
import { announce } from "./page.js";

/**
 * Follows words on the page. `items` returns the sentences, `itemOf` maps elements to sentences, and `choose` opens the
 * other translations of a sentence.
 */
export function followWords({ source, mirror, output, items, itemOf, choose }) {
  /** Marks a word and its linked words, and returns the text of the linked words. Without a word, only removes marks. */
  function mark(word) {
    for (const marked of document.querySelectorAll(".word.on")) marked.classList.remove("on");
    const sentence = word?.closest(".sentence"), item = sentence && itemOf.get(sentence);
    if (!item?.words) return null;
    const side = output.contains(word) ? "target" : "source", other = side === "target" ? "source" : "target";
    const inOther = side === "target" ? item.mirror : item.output;
    const { to } = item.words[side][word.dataset.word];
    word.classList.add("on");
    const linked = to.map(index => inOther.querySelector(`[data-word="${index}"]`)).filter(Boolean);
    for (const one of linked) one.classList.add("on");
    return linked.map(one => one.textContent).join(" ");
  }

  function near(sentence) {
    for (const marked of document.querySelectorAll(".sentence.near")) marked.classList.remove("near");
    const item = sentence && itemOf.get(sentence);
    if (item) for (const side of [item.mirror, item.output]) side.lastChild.classList.add("near");
  }

  /** Returns the element of the source word at a point of the window. The element lies behind the text field. */
  function wordUnder(x, y) {
    return document.elementsFromPoint(x, y).find(found => mirror.contains(found) && found.classList.contains("word"));
  }

  /** Returns the element of the source word at an offset of the text. */
  function wordAt(place) {
    let at = 0;
    for (const item of items()) {
      at += item.before.length;
      const index = item.words?.source.findIndex(word => at + word.start <= place && place <= at + word.end) ?? -1;
      if (index >= 0) return item.mirror.querySelector(`[data-word="${index}"]`);
      at += item.text.length;
      if (at > place) break;
    }
    return null;
  }

  function point(word, sentence) {
    mark(word);
    near(sentence);
  }

  output.addEventListener("pointerover", event => point(event.target.closest(".word"), event.target.closest(".sentence")));
  output.addEventListener("pointerleave", () => point(null, null));
  let pointed = 0;
  source.addEventListener("pointermove", event => {
    cancelAnimationFrame(pointed);
    pointed = requestAnimationFrame(() => { const word = wordUnder(event.clientX, event.clientY); point(word, word?.closest(".sentence")); });
  });
  source.addEventListener("pointerleave", () => { cancelAnimationFrame(pointed); point(null, null); });
  source.addEventListener("keyup", event => { if (/^(Arrow|Home|End|Page)/.test(event.key)) mark(wordAt(source.selectionStart)); });
  source.addEventListener("blur", () => mark(null));

  const stops = () => [...output.querySelectorAll(".word, .sentence[tabindex]")];

  output.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const all = stops(), at = all.indexOf(document.activeElement);
    const sentence = stop => stop?.closest(".sentence");
    const forward = output.dir === "rtl" ? "ArrowLeft" : "ArrowRight", backward = output.dir === "rtl" ? "ArrowRight" : "ArrowLeft";
    let to = null;
    if (event.key === forward) to = all[at + 1];
    else if (event.key === backward) to = all[Math.max(0, at - 1)];
    else if (event.key === "ArrowDown") to = all.slice(at + 1).find(stop => sentence(stop) !== sentence(all[at]));
    else if (event.key === "ArrowUp") to = all.slice(0, Math.max(0, at)).findLast(stop => sentence(stop) !== sentence(all[at]));
    else if (event.key === "Home") to = all[0];
    else if (event.key === "End") to = all.at(-1);
    else if ((event.key === "Enter" || event.key === " ") && at >= 0) { event.preventDefault(); return void choose(itemOf.get(sentence(all[at]))); }
    else return;
    event.preventDefault();
    to?.focus();
  });
  output.addEventListener("focusin", event => {
    const word = event.target.closest(".word");
    point(word, event.target.closest(".sentence"));
    const doubts = event.target.closest(".sentence")?.title ?? "";
    if (word) announce(`${t("{word}, from {words}.", { word: word.textContent, words: mark(word) })} ${doubts}`);
  });
  output.addEventListener("focusout", () => point(null, null));
}
