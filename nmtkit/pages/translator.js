// The translator's page. Text comes into it only by textContent, so that script in a text is text.

import { Translations, ask } from "./client.js";
import { changed, characters, differences, directionOf, linkedWords, pieces, sentences, tagOf } from "./text.js";

const TYPING_PAUSE = 300;  // ms without a key, after which what was typed is sent
const ALTERNATIVES = 4;
const OPENED = 20_000;  // characters of a text file that is opened in the page; a longer one is translated as a file
const LONG = 600;  // characters from which the letters are smaller

const $ = id => document.getElementById(id);
const source = $("source"), mirror = $("mirror"), output = $("output"), menu = $("alternatives");

const state = {
  settings: {},
  languages: [],
  from: "", to: "",
  items: [],  // sentences on the page, in order: {before, text, mirror, output, shown, words}
  after: "",  // white space after the last
  translations: null,  // of the two languages chosen
  chosen: new Map(),  // text -> the translation that was chosen for it
  apiKey: "",  // in memory only
  alignment: true,  // until the server leaves it out
};
const pairs = new Map();  // Translations by "from to", so that going back to a pair asks for nothing again
const itemOf = new WeakMap();  // of the elements of a sentence
let typing = 0, composing = false, announcing = 0, opened = null;

function element(name, classes = "", text = undefined) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
}

const button = (text, action, classes = "") => {
  const made = element("button", classes, text);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
};

/** Says something to those who hear the page. */
function announce(text) {
  clearTimeout(announcing);
  announcing = setTimeout(() => { $("status").textContent = text; }, 150);
}

// --- notices ----------------------------------------------------------------------------------------------------------

/** Shows what is wrong, and what can be done about it; nothing without a text. */
function notice(text = "", bad = false, ...actions) {
  const box = $("notice");
  if (text === (box.dataset.text ?? "") && text) return;
  box.dataset.text = text;
  box.hidden = !text;
  box.classList.toggle("bad", bad);
  box.replaceChildren(...(text ? [element("p", "", text), ...actions] : []));
}

function waiting(reason) {
  if (!reason) return notice();
  const seconds = Math.max(1, Math.round(reason.seconds));
  if (reason.kind === "busy") notice(`The server is busy. Trying again in ${seconds} s …`);
  else notice(`The server cannot be reached. Trying again in ${seconds} s …`, true, button("Try now", retry));
}

function retry() {
  notice();
  if (!state.languages.length) return begin();
  state.translations.want([]);
  state.translations.forgetFailures();
  translate();
}

function askForKey(message) {
  const form = element("form"), field = element("input");
  Object.assign(field, { type: "password", autocomplete: "off", required: true, placeholder: "API key" });
  field.setAttribute("aria-label", "API key");
  const send = element("button", "filled", "Use it");
  form.append(field, send);
  form.addEventListener("submit", event => {
    event.preventDefault();
    state.apiKey = field.value.trim();
    source.focus();
    retry();
  });
  notice(message, false, form);
}

function failed(error) {
  if (error.kind === "key") {
    const wrong = state.apiKey !== "";
    state.apiKey = "";
    askForKey(wrong ? "The server does not know this API key." : "This server asks for an API key. It is forgotten when you leave the page.");
  } else {
    notice(`This could not be translated: ${error.message}`, true, button("Try again", retry));
  }
  render();
}

/** Returns the answer of the server to a request with the key, if there is one. */
function post(path, fields, options) {
  if (fields instanceof FormData) { if (state.apiKey) fields.set("api_key", state.apiKey); }
  else if (state.apiKey) fields = { ...fields, api_key: state.apiKey };
  return ask(path, { body: fields, waiting, ...options });
}

// --- languages --------------------------------------------------------------------------------------------------------

const targetsOf = code => state.languages.find(language => language.code === code)?.targets ?? [];
const nameOf = code => state.languages.find(language => language.code === code)?.name ?? code;

function fill(select, codes, chosen) {
  const options = [...codes].sort((a, b) => nameOf(a).localeCompare(nameOf(b))).map(code => new Option(nameOf(code), code));
  select.replaceChildren(...options);
  select.value = chosen;
  select.disabled = codes.length < 2;
}

function choose(from, to) {
  const sources = state.languages.filter(language => language.targets.length).map(language => language.code);
  state.from = sources.includes(from) ? from : sources[0] ?? "";
  const targets = targetsOf(state.from);
  state.to = targets.includes(to) ? to : targets.find(code => code !== state.from) ?? targets[0] ?? "";
  fill($("from"), sources, state.from);
  fill($("to"), targets, state.to);
  for (const [node, code] of [[source, state.from], [mirror, state.from], [output, state.to], [menu, state.to]]) {
    node.lang = tagOf(code);
    node.dir = directionOf(code);
  }
  const back = targetsOf(state.to).includes(state.from);
  $("swap").disabled = !back;
  $("swap").title = back ? "Swap languages" : `No model here translates ${nameOf(state.to)} to ${nameOf(state.from)}`;
  document.title = `${nameOf(state.from)} – ${nameOf(state.to)} · nmtkit`;
  history.replaceState(null, "", `#${encodeURIComponent(state.from)}/${encodeURIComponent(state.to)}`);
  const pair = `${state.from} ${state.to}`, from_ = state.from, to_ = state.to;
  state.translations?.want([]);
  if (!pairs.has(pair)) {
    const request = (texts, signal) => translationsOf(texts, from_, to_, signal);
    pairs.set(pair, new Translations({ request, arrived, failed, idle: finished }));
  }
  state.translations = pairs.get(pair);
  state.chosen.clear();
  draw([]);
  read();
  translate();
}

async function translationsOf(texts, from, to, signal) {
  const q = texts.map(text => text.normalize("NFC"));
  const answer = await post("translate", { q, source: from, target: to, alignment: state.alignment }, { signal });
  if (texts.length && !answer.alignment) state.alignment = false;
  notice();
  return texts.map((text, index) => ({ text: answer.translatedText[index], links: answer.alignment?.[index] ?? [], others: null }));
}

function swap() {
  if ($("swap").disabled) return;
  const text = translation();
  if (text.trim()) source.value = text;
  choose(state.to, state.from);
}

// --- from the text to sentences on the page ---------------------------------------------------------------------------

/** Reads the text: sentences that are still there keep their elements, and all others are drawn anew. */
function read() {
  const found = sentences(source.value, state.from);
  const { start, oldEnd, newEnd } = changed(state.items, found.sentences);
  const removed = state.items.slice(start, oldEnd), next = state.items[oldEnd];
  const added = found.sentences.slice(start, newEnd).map((sentence, index) => drawn(sentence, removed[index]));
  for (const item of added) {
    mirror.insertBefore(item.mirror, next?.mirror ?? mirror.lastChild);
    output.insertBefore(item.output, next?.output ?? output.lastChild);
  }
  for (const item of removed) { item.mirror.remove(); item.output.remove(); }
  state.items.splice(start, oldEnd - start, ...added);
  if (removed.includes(opened)) closeMenu();
  state.after = found.after;
  mirror.lastChild.textContent = `${found.after}\u200b`;  // so that a last line without text is as high as in the field
  output.lastChild.textContent = found.after;
  const count = characters(source.value), limit = state.settings.charLimit ?? -1;
  const over = limit >= 0 && count > limit;
  $("count").textContent = !count && !over ? "" : count.toLocaleString("en") + (limit >= 0 ? ` / ${limit.toLocaleString("en")}` : "");
  $("count").classList.toggle("over", over);
  $("count").title = over ? "More than this server takes" : "";
  $("clear").hidden = !source.value;
  document.body.classList.toggle("long", count > LONG);
  for (const item of state.items) if (item.shown === undefined) show(item);
  buttons();
}

/** Returns the elements of a sentence; until it is translated it shows what stood there before. */
function drawn(sentence, predecessor) {
  const item = { ...sentence, shown: undefined, predecessor: predecessor?.visible ?? "", words: null, visible: "" };
  for (const side of ["mirror", "output"]) {
    item[side] = element("span");
    item[side].append(sentence.before, element("span", "sentence"));
    itemOf.set(item[side].lastChild, item);
  }
  item.mirror.lastChild.textContent = item.text;
  return item;
}

function draw(items) {
  state.items = items;
  mirror.replaceChildren(document.createTextNode(""));
  output.replaceChildren(document.createTextNode(""));
}

/** Shows the best that there is for a sentence: the translation chosen, the one found, or what stood there before. */
function show(item) {
  const known = state.chosen.get(item.text) ?? state.translations?.known.get(item.text);
  const refused = state.translations?.refused.get(item.text)?.kind === "refused";
  const shown = known ?? (refused ? "refused" : "pending");
  if (item.shown === shown) return;
  item.shown = shown;
  const inText = item.mirror.lastChild, inOutput = item.output.lastChild;
  inOutput.className = `sentence${known ? "" : refused ? " failed" : item.predecessor ? " stale" : " pending"}`;
  item.visible = known ? known.text : refused ? item.text : item.predecessor;
  if (!known) {
    inOutput.textContent = item.visible || "…";
    inOutput.tabIndex = -1;
    return;
  }
  item.words = linkedWords(item.text, known.text, known.links);
  fillWords(inText, item.text, item.words.source);
  fillWords(inOutput, known.text, item.words.target);
  if (item.words.target.length) inOutput.removeAttribute("tabindex");
  else inOutput.tabIndex = -1;
}

function fillWords(place, text, words) {
  place.replaceChildren(...pieces(text, words).map(piece => {
    if (piece.word === undefined) return document.createTextNode(piece.text);
    const made = element("span", "word", piece.text);
    made.dataset.word = piece.word;
    if (output.contains(place)) made.tabIndex = -1;
    return made;
  }));
}

function render() {
  for (const item of state.items) show(item);
  buttons();
}

function buttons() {
  const ready = state.items.some(item => state.translations?.known.has(item.text));
  $("copy").disabled = $("download").disabled = !ready;
  $("hint").textContent = !ready ? "" : state.items.some(item => item.words?.target.length)
    ? "Point at a word to see what it was translated from. Click a sentence for other translations."
    : "Click a sentence for other translations.";
  $("progress").hidden = !state.translations?.missing.length;
  output.setAttribute("aria-busy", String(!$("progress").hidden));
}

const translation = () => state.items.map(item => item.before + item.visible).join("") + state.after;

// --- translating ------------------------------------------------------------------------------------------------------

function translate() {
  clearTimeout(typing);
  if (!state.translations) return;
  const limit = state.settings.charLimit ?? -1, count = characters(source.value);
  if (limit >= 0 && count > limit) {
    state.translations.want([]);
    notice(`The text has ${count.toLocaleString("en")} characters; this server takes ${limit.toLocaleString("en")}. Shorten it, or translate it in parts.`, true);
  } else {
    if ($("notice").dataset.text?.startsWith("The text has")) notice();
    state.translations.want(state.items.map(item => item.text));
  }
  render();
}

function arrived() { render(); }

function finished() {
  buttons();
  const text = translation().trim();
  if (!text || state.translations.missing.length) return;
  announce(text.length <= 300 ? text : `Translated: ${state.items.length} sentences`);
}

function typed() {
  read();
  clearTimeout(typing);
  if (composing) return;
  const missing = state.items.some(item => !state.translations?.known.has(item.text));
  typing = setTimeout(translate, missing && source.value.trim() ? TYPING_PAUSE : 0);
}

// --- words and what they were translated from -------------------------------------------------------------------------

/** Marks a word and those linked to it, in both texts; nothing without one. */
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

/** Returns the word of the text at a point of the window, which the field hides. */
function wordUnder(x, y) {
  return document.elementsFromPoint(x, y).find(found => mirror.contains(found) && found.classList.contains("word"));
}

/** Returns the word of the text that holds a place in it. */
function wordAt(place) {
  let at = 0;
  for (const item of state.items) {
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

// --- the translation by keyboard --------------------------------------------------------------------------------------

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
  else if ((event.key === "Enter" || event.key === " ") && at >= 0) { event.preventDefault(); return void openMenu(itemOf.get(sentence(all[at]))); }
  else return;
  event.preventDefault();
  to?.focus();
});
output.addEventListener("focusin", event => {
  const word = event.target.closest(".word");
  point(word, event.target.closest(".sentence"));
  if (word) announce(`${word.textContent}, from ${mark(word)}`);
});
output.addEventListener("focusout", () => point(null, null));

// --- other translations of a sentence ---------------------------------------------------------------------------------

output.addEventListener("click", event => {
  const sentence = event.target.closest(".sentence");
  if (sentence && getSelection().isCollapsed) openMenu(itemOf.get(sentence));
});

async function openMenu(item) {
  const found = state.translations.known.get(item.text);
  if (!found) return;
  if (opened === item) return closeMenu();
  closeMenu();
  opened = item;
  item.output.lastChild.classList.add("open");
  menu.replaceChildren(element("p", "", "Looking for other translations …"));
  menu.hidden = false;
  const pane = menu.parentElement.getBoundingClientRect();
  menu.style.top = `${[...item.output.lastChild.getClientRects()].at(-1).bottom - pane.top + 6}px`;
  try {
    if (!found.others) {
      const fields = { q: item.text.normalize("NFC"), source: state.from, target: state.to, alternatives: ALTERNATIVES };
      const answer = await post("translate", { ...fields, alignment: state.alignment });
      const texts = answer.alternatives.map((text, index) => ({ text, links: answer.alternativesAlignment?.[index] ?? [] }));
      const seen = new Set([found.text]);
      found.others = texts.filter(({ text }) => !seen.has(text) && seen.add(text));
    }
    if (opened === item) fillMenu(item, [found, ...found.others]);
  } catch (error) {
    closeMenu();
    failed(error);
  }
}

function fillMenu(item, found) {
  const now = state.chosen.get(item.text) ?? found[0];
  const rows = found.map(one => {
    const row = button("", () => take(item, one, found[0]));
    row.setAttribute("role", "menuitemradio");
    row.setAttribute("aria-checked", String(one === now));
    for (const { text, changed } of differences(now.text, one.text)) row.append(changed ? element("b", "", text) : text);
    return row;
  });
  const title = found.length > 1 ? "Other translations" : "The model has no other translation of this sentence";
  menu.replaceChildren(element("p", "", title), ...rows);
  rows[Math.max(0, found.indexOf(now))].focus();
}

function take(item, chosen, best) {
  if (chosen === best) state.chosen.delete(item.text);
  else state.chosen.set(item.text, chosen);
  closeMenu();
  render();
  (item.output.querySelector(".word") ?? item.output.lastChild).focus();
  announce("Replaced");
}

function closeMenu() {
  const had = menu.contains(document.activeElement), item = opened;
  menu.hidden = true;
  opened = null;
  item?.output.lastChild.classList.remove("open");
  if (had && item) (item.output.querySelector(".word") ?? item.output.lastChild).focus();
}

menu.addEventListener("keydown", event => {
  const rows = [...menu.querySelectorAll("button")], at = rows.indexOf(document.activeElement);
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) { event.preventDefault(); rows[(at + step + rows.length) % rows.length]?.focus(); }
  if (event.key === "Tab") closeMenu();
});
document.addEventListener("pointerdown", event => {
  if (opened && !menu.contains(event.target) && itemOf.get(event.target.closest(".sentence")) !== opened) closeMenu();
});

// --- files ------------------------------------------------------------------------------------------------------------

function save(contents, name) {
  const link = element("a");
  link.href = URL.createObjectURL(contents);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const translatedName = name => name.replace(/(\.[^.]*)?$/, ending => `.${state.to}${ending}`);

async function openFile(file) {
  const formats = state.settings.supportedFilesFormat ?? [".txt"], name = file.name.toLowerCase();
  const limit = state.settings.charLimit ?? -1;
  if (name.endsWith(".txt") && file.size <= 4 * OPENED) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (characters(text) <= Math.min(OPENED, limit < 0 ? OPENED : limit)) {
        source.value = text;
        read();
        return translate();
      }
    } catch {
      return notice(`${file.name} is not UTF-8. Save it as UTF-8, and drop it again.`, true);
    }
  }
  if (!formats.some(ending => name.endsWith(ending))) {
    return notice(`${file.name} cannot be translated here. These can: ${formats.join(", ")}.`, true);
  }
  const row = element("li"), abort = new AbortController(), result = translatedName(file.name);
  row.append(element("span", "", `Translating ${file.name} …`), button("Cancel", () => { abort.abort(); row.remove(); }, "quiet"));
  $("files").prepend(row);
  try {
    const form = new FormData();
    for (const [field, value] of [["file", file], ["source", state.from], ["target", state.to]]) form.set(field, value);
    const { translatedFileUrl } = await post("translate_file", form, { signal: abort.signal });
    const path = new URL(translatedFileUrl).pathname.split("/").slice(-2).join("/");  // of this page's server, whatever its proxy is
    const answer = await fetch(path, { signal: abort.signal });
    if (!answer.ok) throw new Error("the translation is no longer there");
    const contents = await answer.blob();
    row.replaceChildren(element("span", "", `${result} is ready`), button("Download", () => save(contents, result), "filled"), button("Remove", () => row.remove(), "quiet"));
    announce(`${result} is ready`);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error.kind === "key") failed(error);
    row.replaceChildren(element("span", "bad", `${file.name}: ${error.message}`), button("Remove", () => row.remove(), "quiet"));
  }
}

let depth = 0;  // elements that a file is being dragged over
const dragsFile = event => event.dataTransfer?.types.includes("Files");
addEventListener("dragenter", event => { if (dragsFile(event)) { depth++; $("drop").hidden = false; } });
addEventListener("dragleave", event => { if (dragsFile(event) && --depth <= 0) { depth = 0; $("drop").hidden = true; } });
addEventListener("dragover", event => { if (dragsFile(event)) event.preventDefault(); });
addEventListener("drop", event => {
  if (!dragsFile(event)) return;
  event.preventDefault();
  depth = 0;
  $("drop").hidden = true;
  for (const file of event.dataTransfer.files) openFile(file);
});

// --- buttons and keys -------------------------------------------------------------------------------------------------

async function copy() {
  const text = translation();
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // over plain HTTP there is no clipboard
    const field = element("textarea", "unseen");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const label = $("copy").querySelector("span");
  label.textContent = "Copied";
  announce("Copied");
  setTimeout(() => { label.textContent = "Copy"; }, 1600);
}

function clear() {
  source.value = "";
  notice();
  typed();
  source.focus();
}

source.addEventListener("input", typed);
source.addEventListener("compositionstart", () => { composing = true; clearTimeout(typing); });
source.addEventListener("compositionend", () => { composing = false; typed(); });
$("from").addEventListener("change", () => choose($("from").value, state.to));
$("to").addEventListener("change", () => choose(state.from, $("to").value));
$("swap").addEventListener("click", swap);
$("clear").addEventListener("click", clear);
$("copy").addEventListener("click", copy);
$("download").addEventListener("click", () => save(new Blob([translation()], { type: "text/plain" }), `translation.${state.to}.txt`));
$("open-file").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { for (const file of $("file").files) openFile(file); $("file").value = ""; });
$("help").addEventListener("click", () => $("keyboard").showModal());
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && opened) return closeMenu();
  if (event.isComposing || !(event.ctrlKey || event.metaKey) || event.altKey) return;
  if (event.key === "Enter") { event.preventDefault(); if (!event.shiftKey) retry(); else if (!$("copy").disabled) copy(); }
  if (event.shiftKey && event.key.toLowerCase() === "s") { event.preventDefault(); swap(); }
});
addEventListener("online", retry);

// --- the beginning ----------------------------------------------------------------------------------------------------

async function begin() {
  const [settings, languages] = await Promise.all([ask("frontend/settings", { waiting }), ask("languages", { waiting })]);
  Object.assign(state, { settings, languages });
  $("file").accept = (settings.supportedFilesFormat ?? [".txt"]).join(",");
  if (settings.keyRequired) askForKey("This server asks for an API key. It is forgotten when you leave the page.");
  const [from, to, ...text] = decodeURIComponent(location.hash.slice(1)).split("/");
  if (text.length && !source.value) source.value = text.join("/");
  choose(from || settings.language?.source?.code, to || settings.language?.target?.code);
}

draw([]);
source.focus({ preventScroll: true });
begin();
