// The translator page. Text enters the page through textContent only, so that a script in a text remains text.

import { Translations, ask } from "./client.js";
import { openFile, save, takeDrops } from "./files.js";
import { $, announce, button, element, forget, notice } from "./page.js";
import { changed, characters, differences, directionOf, linkedWords, pieces, readHash, sentences, tagOf } from "./text.js";
import { followWords } from "./words.js";

const TYPING_PAUSE = 300;  // milliseconds without a key until the text is translated
const ALTERNATIVES = 4;
const LONG = 600;  // longer texts have smaller letters
const MANY = 5;  // more failed sentences are not underlined
const IS_TOUCH = matchMedia("(hover: none)").matches;

const DOUBTS = {
  uncertain: "The model is not sure of this translation.",
  too_short: "This is much shorter than the original. Something may be missing.",
  too_long: "This is much longer than the original. Something may be repeated or invented.",
  copied: "Much of the original was copied without translation.",
};

const KEY_NEEDED = "This server needs an API key. The page forgets the key when you leave.";

const source = $("source"), mirror = $("mirror"), output = $("output"), menu = $("alternatives");

const state = {
  settings: {},
  languages: [],
  from: "", to: "",
  items: [],  // sentences of the page in order: {before, text, mirror, output, shown, words}
  after: "",  // white space after the last sentence
  isOver: false,  // whether the text is longer than the server accepts
  translations: null,  // Translations between the chosen languages
  chosen: new Map(),  // sentence -> translation that the user has chosen
  apiKey: "",  // in memory only
};
const pairs = new Map();  // "from to" -> Translations, so that nothing is requested twice
const itemOf = new WeakMap();  // element of a sentence -> item
let typing = 0, composing = false, opened = null;

// --- errors -----------------------------------------------------------------------------------------------------------

function waiting(reason) {
  if (!reason) return forget("waiting");
  const seconds = Math.max(1, Math.round(reason.seconds));
  if (reason.kind === "busy") notice("waiting", `The server is busy. Trying again in ${seconds} s …`);
  else notice("waiting", `The server cannot be reached. Trying again in ${seconds} s …`, true, button("Try now", retry));
}

function retry() {
  notice("");
  if (!state.languages.length) return begin();
  state.translations.want([]);
  state.translations.forgetFailures();
  translate();
}

function askForKey(message) {
  const form = element("form"), field = element("input");
  Object.assign(field, { type: "password", autocomplete: "off", required: true, placeholder: "API key" });
  field.setAttribute("aria-label", "API key");
  const send = element("button", "filled", "Use key");
  form.append(field, send);
  form.addEventListener("submit", event => {
    event.preventDefault();
    state.apiKey = field.value.trim();
    source.focus();
    retry();
  });
  notice("key", message, false, form);
}

function failed(error) {
  if (error.kind === "key") {
    const wrong = state.apiKey !== "";
    state.apiKey = "";
    askForKey(wrong ? "The server does not accept this API key." : KEY_NEEDED);
  } else {
    const what = everythingFailed() ? "The text" : "A part of the text";
    notice("refused", `${what} could not be translated. ${error.message}`, true, button("Try again", retry));
  }
  render();
}

/** Sends a request with the API key, if there is one, and returns the answer. */
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
  $("swap").title = back ? "Swap languages" : `This server does not translate ${nameOf(state.to)} to ${nameOf(state.from)}`;
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
  const answer = await post("translate", { q, source: from, target: to, alignment: true, quality: true }, { signal });
  return texts.map((text, index) => ({
    text: answer.translatedText[index], links: answer.alignment?.[index] ?? [], others: null,
    doubts: (answer.quality?.[index] ?? []).flatMap(line => line.flags).map(flag => DOUBTS[flag]).filter(Boolean),
  }));
}

function swap() {
  if ($("swap").disabled) return;
  const text = translation();
  if (text.trim()) source.value = text;
  choose(state.to, state.from);
}

// --- from the text to sentences on the page ---------------------------------------------------------------------------

/** Reads the text. Unchanged sentences keep their elements, new sentences get new elements. */
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
  mirror.lastChild.textContent = `${found.after}\u200b`;  // gives an empty last line its height
  output.lastChild.textContent = found.after;
  const count = characters(source.value), limit = state.settings.charLimit ?? -1;
  const over = state.isOver = limit >= 0 && count > limit;
  $("count").textContent = !count && !over ? "" : count.toLocaleString("en") + (limit >= 0 ? ` / ${limit.toLocaleString("en")}` : "");
  $("count").classList.toggle("over", over);
  $("count").title = over ? "Longer than this server accepts" : "";
  $("clear").hidden = !source.value;
  document.body.classList.toggle("long", count > LONG);
  for (const item of state.items) if (item.shown === undefined) show(item);
  buttons();
}

/** Returns the item of a new sentence. Until it is translated, it shows the translation of its predecessor. */
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

/** Shows the translation of a sentence, or until it arrives the old translation or a grey bar. */
function show(item) {
  const known = state.chosen.get(item.text) ?? state.translations?.known.get(item.text);
  const refused = state.translations?.refused.get(item.text)?.kind === "refused";
  const shown = known ?? (refused ? "refused" : "pending");
  if (item.shown === shown) return;
  item.shown = shown;
  const inText = item.mirror.lastChild, inOutput = item.output.lastChild;
  inOutput.className = `sentence${known ? "" : refused ? " failed" : item.predecessor ? " stale" : " pending"}`;
  item.visible = known ? known.text : refused ? item.text : item.predecessor;
  const isPending = !known && !item.visible;
  inOutput.toggleAttribute("aria-hidden", isPending);
  if (!known) {
    inOutput.textContent = item.visible || item.text;
    inOutput.tabIndex = -1;
    return;
  }
  inOutput.classList.toggle("unsure", Boolean(known.doubts?.length));
  inOutput.title = known.doubts?.join(" ") ?? "";
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

const isKnown = item => Boolean(state.translations?.known.has(item.text));
const isPending = item => !isKnown(item) && !state.translations?.refused.has(item.text);  // before the request is sent, too
const everythingFailed = () => state.items.length > 0 && state.items.every(item => state.translations?.refused.has(item.text));

function buttons() {
  const total = state.items.length, done = state.items.filter(isKnown).length, missing = state.items.filter(isPending).length;
  const pending = state.isOver ? 0 : missing;
  $("copy").disabled = $("download").disabled = !done || missing > 0;
  $("hint").textContent = done ? hints().join(" ") : "";
  $("pending").textContent = pending && total > 3 ? `${done.toLocaleString("en")} of ${total.toLocaleString("en")} sentences` : "";
  $("progress").hidden = !pending;
  document.body.classList.toggle("many-failed", state.items.filter(item => state.translations?.refused.has(item.text)).length > MANY);
  output.classList.toggle("over", state.isOver);
  output.setAttribute("aria-busy", String(pending > 0));
}

function hints() {
  const hasWords = state.items.some(item => item.words?.target.length), isUnsure = output.querySelector(".unsure");
  if (IS_TOUCH) {
    return [`Tap a sentence for other translations${isUnsure ? ", and to see why a dotted line marks it as doubtful" : ""}.`];
  }
  return [
    ...(hasWords ? ["Point at a word to see the words that it translates."] : []),
    "Click a sentence for other translations.",
    ...(isUnsure ? ["A dotted line marks a doubtful translation; point at it to see why."] : []),
  ];
}

const translation = () => state.items.map(item => item.before + item.visible).join("") + state.after;

// --- translating ------------------------------------------------------------------------------------------------------

function translate() {
  clearTimeout(typing);
  if (!state.translations) return;
  const limit = state.settings.charLimit ?? -1, count = characters(source.value);
  if (limit >= 0 && count > limit) {
    state.translations.want([]);
    notice("limit", `The text has ${count.toLocaleString("en")} characters, but this server accepts ${limit.toLocaleString("en")}. Shorten it, or translate it in parts.`, true);
  } else {
    forget("limit");
    if (!state.items.some(item => state.translations.refused.has(item.text))) forget("refused");
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
  menu.replaceChildren(element("p", "", "Searching for other translations …"));
  menu.hidden = false;
  const pane = menu.parentElement.getBoundingClientRect();
  menu.style.top = `${[...item.output.lastChild.getClientRects()].at(-1).bottom - pane.top + 6}px`;
  try {
    if (!found.others) {
      const fields = { q: item.text.normalize("NFC"), source: state.from, target: state.to, alternatives: ALTERNATIVES };
      const answer = await post("translate", { ...fields, alignment: true });
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
  const title = found.length > 1 ? "Other translations" : "There is no other translation of this sentence";
  const doubts = (now.doubts ?? []).map(doubt => element("p", "doubt", doubt));
  menu.replaceChildren(...doubts, element("p", "", title), ...rows);
  rows[Math.max(0, found.indexOf(now))].focus();
  if (getComputedStyle(menu).position === "fixed") showAbove(item, menu.getBoundingClientRect().top);
}

/** Scrolls so far that a sentence ends above a row of the window. */
function showAbove(item, row) {
  const below = item.output.lastChild.getBoundingClientRect().bottom + 16 - row;
  if (below > 0) scrollBy({ top: below });
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

// --- buttons and keys -------------------------------------------------------------------------------------------------

async function copy() {
  const text = translation();
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // browsers have no clipboard over plain HTTP
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

function replaceText(text) {
  source.value = text;
  read();
  translate();
}

const open = file => openFile(file, { now: () => state, show: replaceText, post, failed });

function clear() {
  source.value = "";
  notice("");
  typed();
  source.focus();
}

takeDrops(open);
followWords({ source, mirror, output, items: () => state.items, itemOf, choose: openMenu });
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
$("file").addEventListener("change", () => { for (const file of $("file").files) open(file); $("file").value = ""; });
$("help").addEventListener("click", () => $("keyboard").showModal());
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && opened) return closeMenu();
  if (event.isComposing || !(event.ctrlKey || event.metaKey) || event.altKey) return;
  if (event.key === "Enter") { event.preventDefault(); if (!event.shiftKey) retry(); else if (!$("copy").disabled) copy(); }
  if (event.shiftKey && event.key.toLowerCase() === "s") { event.preventDefault(); swap(); }
});
addEventListener("online", retry);

// --- start ------------------------------------------------------------------------------------------------------------

async function begin() {
  const [settings, languages] = await Promise.all([ask("frontend/settings", { waiting }), ask("languages", { waiting })]);
  Object.assign(state, { settings, languages });
  $("file").accept = (settings.supportedFilesFormat ?? [".txt"]).join(",");
  if (settings.keyRequired) askForKey(KEY_NEEDED);
  const { from, to, text } = readHash(location.hash);
  if (text && !source.value) source.value = text;
  choose(from || settings.language?.source?.code, to || settings.language?.target?.code);
}

draw([]);
source.focus({ preventScroll: true });
begin();
