// The translator page. Text enters the page through textContent only, so that a script in a text remains text.

import { sentencePanel } from "./alternatives.js";
import { Translations, ask } from "./client.js";
import { copyText, openFile, save, takeDrops } from "./files.js";
import { DOUBTS, EXAMPLES, formatted, language, languageName, t, useLanguage } from "./messages.js";
import { $, announce, button, element, forget, keep, kept, notice, secretForm } from "./page.js";
import { changed, characters, directionOf, linkedWords, pieces, readHash, sentences, tagOf } from "./text.js";
import { followWords } from "./words.js";

const TYPING_PAUSE = 300;  // milliseconds without a key until the text is translated
const ALTERNATIVES = 4;
const LONG = 600;  // characters; longer texts have smaller letters
const MANY = 5;  // if more sentences fail, they are not underlined
const IS_TOUCH = matchMedia("(hover: none)").matches;
const AUTO = "auto";  // code of a language that the server detects
const DETECTED = 1000;  // characters at the beginning of a text whose language is detected
const SURE = 80;  // minimum confidence in percent to say that a text is in a different language

await useLanguage();

const KEY_NEEDED = t("This server needs an API key. The page forgets the key when you leave.");

const source = $("source"), mirror = $("mirror"), output = $("output"), menu = $("alternatives");

const state = {
  settings: {},
  languages: [],
  from: "", to: "",
  isAuto: false,  // whether the server detects the language of the text
  looked: "",  // beginning of the text whose language was detected last
  detected: "", confidence: 0,  // language of this beginning, and how sure the server is, in percent
  items: [],  // sentences of the page in order: {before, text, mirror, output, shown, words}
  after: "",  // white space after the last sentence
  isOver: false,  // whether the text is longer than the server accepts
  translations: null,  // Translations between the chosen languages
  chosen: new Map(),  // sentence -> translation that the user has chosen
  apiKey: "",  // in memory only
};
const pairs = new Map();  // "from to" -> Translations, so that nothing is requested twice
const itemOf = new WeakMap();  // element of a sentence -> item
let typing = 0, composing = false;

// --- errors -----------------------------------------------------------------------------------------------------------

function waiting(reason) {
  if (!reason) return forget("waiting");
  const seconds = Math.max(1, Math.round(reason.seconds));
  if (reason.kind === "busy") notice("waiting", t("The server is busy. Trying again in {seconds} s …", { seconds }));
  else notice("waiting", t("The server cannot be reached. Trying again in {seconds} s …", { seconds }), true, button(t("Try now"), retry));
}

function retry() {
  notice("");
  if (!state.languages.length) return start();
  state.translations.want([]);
  state.translations.forgetFailures();
  translate();
}

function askForKey(message) {
  const use = key => { state.apiKey = key; source.focus(); retry(); };
  notice("key", message, false, secretForm(t("API key"), t("Use key"), use));
}

function failed(error) {
  if (error.kind === "key") {
    const wrong = state.apiKey !== "";
    state.apiKey = "";
    askForKey(wrong ? t("The server does not accept this API key.") : KEY_NEEDED);
  } else {
    const what = everythingFailed() ? t("The text could not be translated.") : t("A part of the text could not be translated.");
    notice("refused", `${what} ${error.message}`, true, button(t("Try again"), retry));
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
const nameOf = code => languageName(tagOf(code), state.languages.find(language => language.code === code)?.name ?? code);
const chosenFrom = () => (state.isAuto ? AUTO : state.from);
const capitalized = name => name.slice(0, 1).toLocaleUpperCase(language) + name.slice(1);

function fill(select, codes, chosen, first = []) {
  const options = [...codes].sort((a, b) => nameOf(a).localeCompare(nameOf(b), language)).map(code => new Option(capitalized(nameOf(code)), code));
  select.replaceChildren(...first, ...options);
  select.value = chosen;
  select.disabled = select.options.length < 2;
}

/** Returns the reason if the languages cannot be swapped, else an empty text. */
const whyNotSwap = () => targetsOf(state.to).includes(state.from) ? "" : t("This server does not translate {from} to {to}.", { from: nameOf(state.to), to: nameOf(state.from) });

/** Shows the detected language in the list of languages. */
function nameDetected() {
  const option = $("from").querySelector(`[value="${AUTO}"]`);
  if (option) option.textContent = state.isAuto && state.detected ? t("Detected: {language}", { language: nameOf(state.from) }) : t("Detect language");
}

/** Translates between two languages from now on. If `from` is AUTO, the text is in the detected language. */
function choose(from, to) {
  const sources = state.languages.filter(language => language.targets.length).map(language => language.code);
  state.isAuto = from === AUTO && Boolean(state.settings.detection);
  if (from === AUTO) from = [state.detected, state.from, state.settings.language?.source?.code].find(code => sources.includes(code));
  state.from = sources.includes(from) ? from : sources[0] ?? "";
  const targets = targetsOf(state.from);
  state.to = targets.includes(to) ? to : targets.find(code => code !== state.from) ?? targets[0] ?? "";
  fill($("from"), sources, chosenFrom(), state.settings.detection ? [new Option("", AUTO)] : []);
  nameDetected();
  fill($("to"), targets, state.to);
  for (const [node, code] of [[source, state.from], [mirror, state.from], [output, state.to], [menu, state.to]]) {
    node.lang = tagOf(code);
    node.dir = directionOf(code);
  }
  $("swap").setAttribute("aria-disabled", String(whyNotSwap() !== ""));
  $("swap").title = whyNotSwap() || t("Swap languages");
  document.title = `${nameOf(state.from)} – ${nameOf(state.to)} · nmtkit`;
  history.replaceState(null, "", `#${encodeURIComponent(chosenFrom())}/${encodeURIComponent(state.to)}`);
  const pair = `${state.from} ${state.to}`, from_ = state.from, to_ = state.to;
  state.translations?.want([]);
  if (!pairs.has(pair)) {
    const request = (texts, signal) => translationsOf(texts, from_, to_, signal);
    pairs.set(pair, Object.assign(new Translations({ request, arrived: render, failed, idle: finished }), { chosen: new Map() }));
  }
  state.translations = pairs.get(pair);
  state.chosen = state.translations.chosen;
  draw([]);
  read();
  keepText();
  offerDetected();
  translate();
}

async function translationsOf(texts, from, to, signal) {
  const q = texts.map(text => text.normalize("NFC"));
  const answer = await post("translate", { q, source: from, target: to, alignment: true, quality: true }, { signal });
  return texts.map((text, index) => ({
    text: answer.translatedText[index], links: answer.alignment?.[index] ?? [], others: null,
    doubts: (answer.quality?.[index] ?? []).flatMap(line => line.flags).filter(flag => DOUBTS[flag]).map(flag => t(DOUBTS[flag])),
  }));
}

function swap() {
  if (whyNotSwap()) return notice("swap", whyNotSwap());
  const text = translation();
  if (text.trim()) source.value = text;
  choose(state.to, state.from);
}

const begin = text => text.trim().slice(0, DETECTED);

/** Detects the language of the text. With AUTO, translates from this language. */
async function detect() {
  const q = begin(source.value);
  if (!state.settings.detection || q === state.looked) return;
  state.looked = q;
  let found = null;
  if (q) try { [found] = await post("detect", { q }); } catch { return void (state.looked = ""); }
  if (q !== state.looked) return;
  Object.assign(state, { detected: found?.confidence ? found.language : "", confidence: found?.confidence ?? 0 });
  if (state.isAuto && state.detected && state.detected !== state.from && targetsOf(state.detected).length) return chooseDetected(AUTO);
  nameDetected();
  offerDetected();
}

const chooseDetected = from => choose(from, state.detected === state.to ? state.from : state.to);

/** Offers to translate from the detected language if this language differs from the chosen language. */
function offerDetected() {
  const code = state.detected, language = nameOf(code);
  if (!code || code === state.from || state.confidence < SURE) return forget("language");
  const offer = targetsOf(code).length ? [button(t("Translate from {language}", { language }), () => chooseDetected(code), "filled")] : [];
  notice("language", t("The text seems to be in {language}.", { language }), false, ...offer);
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
  if (removed.includes(panel.item())) panel.close();
  state.after = found.after;
  mirror.lastChild.textContent = `${found.after}\u200b`;  // gives an empty last line its height
  output.lastChild.textContent = found.after;
  const count = characters(source.value), limit = state.settings.charLimit ?? -1;
  const over = state.isOver = limit >= 0 && count > limit;
  $("count").textContent = !count && !over ? "" : formatted(count) + (limit >= 0 ? ` / ${formatted(limit)}` : "");
  $("count").classList.toggle("over", over);
  $("count").title = over ? t("Longer than this server accepts") : "";
  $("clear").hidden = !source.value;
  $("empty").hidden = source.value !== "" || !state.languages.length;
  $("example").hidden = !EXAMPLES[exampleLanguage()];
  document.body.classList.toggle("long", count > LONG);
  for (const item of state.items) if (item.shown === undefined) show(item);
  buttons();
}

/** Returns the item of a new sentence. Until its translation arrives, it shows the translation of `predecessor`. */
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

/** Shows the translation of a sentence. Until the translation arrives, shows the old translation or a grey bar. */
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
const isPending = item => !isKnown(item) && !state.translations?.refused.has(item.text);  // also before the request
const everythingFailed = () => state.items.length > 0 && state.items.every(item => state.translations?.refused.has(item.text));

function buttons() {
  const total = state.items.length, done = state.items.filter(isKnown).length, missing = state.items.filter(isPending).length;
  const pending = state.isOver ? 0 : missing;
  $("copy").disabled = $("download").disabled = !done || missing > 0;
  $("hint").textContent = done ? hints().join(" ") : "";
  $("hint").hidden = !source.value;
  $("pending").textContent = pending && total > 3 ? t("{done} of {total} sentences", { done: formatted(done), total: formatted(total) }) : "";
  $("progress").hidden = !pending;
  document.body.classList.toggle("many-failed", state.items.filter(item => state.translations?.refused.has(item.text)).length > MANY);
  output.classList.toggle("over", state.isOver);
  output.setAttribute("aria-busy", String(pending > 0));
}

function hints() {
  const hasWords = state.items.some(item => item.words?.target.length), isUnsure = output.querySelector(".unsure");
  if (IS_TOUCH) {
    return [isUnsure ? t("Tap a sentence to edit it, and to see why a dotted line marks it as doubtful.") : t("Tap a sentence to edit it or to choose another translation.")];
  }
  return [
    ...(hasWords ? [t("Point at a word to see the words that it translates.")] : []),
    t("Click a sentence to edit it or to choose another translation."),
    ...(isUnsure ? [t("A dotted line marks a doubtful translation; point at it to see why.")] : []),
  ];
}

const translation = () => state.items.map(item => item.before + item.visible).join("") + state.after;

// --- translating ------------------------------------------------------------------------------------------------------

function translate() {
  clearTimeout(typing);
  forget("swap");
  if (!state.translations) return;
  const limit = state.settings.charLimit ?? -1, count = characters(source.value);
  if (limit >= 0 && count > limit) {
    state.translations.want([]);
    notice("limit", t("The text has {count} characters, but this server accepts {limit}. Shorten it, or translate it in parts.", { count: formatted(count), limit: formatted(limit) }), true);
  } else {
    forget("limit");
    if (!state.items.some(item => state.translations.refused.has(item.text))) forget("refused");
    state.translations.want(state.items.map(item => item.text));
  }
  render();
}

function finished() {
  buttons();
  const text = translation().trim();
  if (!text || state.translations.missing.length) return;
  announce(text.length <= 300 ? text : t("Translated: {count} sentences", { count: formatted(state.items.length) }));
}

/** Keeps the text and the chosen translations for this tab. */
function keepText() {
  const { from, to, detected, confidence, chosen } = state;
  keep(source.value ? { text: source.value, pair: `${from} ${to}`, detected, confidence, chosen: [...chosen] } : null);
}

/** Detects the language and translates. With AUTO, the translation waits for the language. */
async function detectAndTranslate() {
  const found = detect();
  if (state.isAuto) await found;
  translate();
}

function typed() {
  read();
  keepText();
  clearTimeout(typing);
  if (composing) return;
  const missing = state.items.some(item => !state.translations?.known.has(item.text));
  typing = setTimeout(detectAndTranslate, missing && source.value.trim() ? TYPING_PAUSE : 0);
}

// --- the panel of a sentence ------------------------------------------------------------------------------------------

const panel = sentencePanel({
  menu, failed, search: otherTranslations, known: item => state.translations.known.get(item.text),
  shown: item => state.chosen.get(item.text) ?? state.translations.known.get(item.text),
  take(item, translation) {
    if (translation === state.translations.known.get(item.text)) state.chosen.delete(item.text);
    else state.chosen.set(item.text, translation);
    render();
    keepText();
  },
});

async function otherTranslations(item, best) {
  const fields = { q: item.text.normalize("NFC"), source: state.from, target: state.to, alternatives: ALTERNATIVES };
  const answer = await post("translate", { ...fields, alignment: true });
  const texts = answer.alternatives.map((text, index) => ({ text, links: answer.alternativesAlignment?.[index] ?? [] }));
  const seen = new Set([best.text]);
  return texts.filter(({ text }) => !seen.has(text) && seen.add(text));
}

output.addEventListener("click", event => {
  const sentence = event.target.closest(".sentence");
  if (sentence && getSelection().isCollapsed) panel.open(itemOf.get(sentence));
});
document.addEventListener("pointerdown", event => {
  if (panel.item() && !menu.contains(event.target) && itemOf.get(event.target.closest(".sentence")) !== panel.item()) panel.close();
});

// --- buttons and keys -------------------------------------------------------------------------------------------------

async function copy() {
  await copyText(translation());
  const label = $("copy").querySelector("span");
  label.textContent = t("Copied");
  announce(t("Copied"));
  setTimeout(() => { label.textContent = t("Copy"); }, 1600);
}

function replaceText(text) {
  source.value = text;
  read();
  keepText();
  detectAndTranslate();
}

const exampleLanguage = () => (state.isAuto && !EXAMPLES[state.from] ? "en" : state.from).split(/[-_]/)[0];

const open = file => openFile(file, { now: () => ({ ...state, from: chosenFrom() }), show: replaceText, post, failed });

takeDrops(open);
followWords({ source, mirror, output, items: () => state.items, itemOf, choose: panel.open });
source.addEventListener("input", typed);
source.addEventListener("compositionstart", () => { composing = true; clearTimeout(typing); });
source.addEventListener("compositionend", () => { composing = false; typed(); });
$("from").addEventListener("change", () => choose($("from").value, state.to));
$("to").addEventListener("change", () => choose(chosenFrom(), $("to").value));
$("swap").addEventListener("click", swap);
$("clear").addEventListener("click", () => { source.value = ""; notice(""); typed(); source.focus(); });
$("example").addEventListener("click", () => { replaceText(EXAMPLES[exampleLanguage()]); source.focus(); });
$("copy").addEventListener("click", copy);
$("download").addEventListener("click", () => save(new Blob([translation()], { type: "text/plain" }), `translation.${state.to}.txt`));
$("open-file").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => { for (const file of $("file").files) open(file); $("file").value = ""; });
$("help").addEventListener("click", () => $("keyboard").showModal());
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && panel.item()) return panel.close();
  if (event.isComposing || !(event.ctrlKey || event.metaKey) || event.altKey) return;
  if (event.key === "Enter") { event.preventDefault(); if (!event.shiftKey) retry(); else if (!$("copy").disabled) copy(); }
  if (event.shiftKey && event.key.toLowerCase() === "s") { event.preventDefault(); swap(); }
});
addEventListener("online", retry);

// --- start ------------------------------------------------------------------------------------------------------------

async function start() {
  const [settings, languages] = await Promise.all([ask("frontend/settings", { waiting }), ask("languages", { waiting })]);
  Object.assign(state, { settings, languages });
  $("file").accept = (settings.supportedFilesFormat ?? [".txt"]).join(",");
  if (settings.keyRequired) askForKey(KEY_NEEDED);
  const { from, to, text } = readHash(location.hash), last = kept();
  source.value ||= text || last?.text || "";
  $("privacy").textContent = t("Your text is sent only to {host}, which does not store it. This tab keeps the text until you clear it or close the tab.", { host: location.host });
  if (from === AUTO && last?.text === source.value) Object.assign(state, { detected: last.detected, confidence: last.confidence, looked: begin(source.value) });
  choose(from || settings.language?.source?.code, to || settings.language?.target?.code);
  if (last?.text === source.value && last.pair === `${state.from} ${state.to}`) for (const [text, one] of last.chosen) state.chosen.set(text, one);
  render();
  keepText();
  detectAndTranslate();
}

draw([]);
source.focus({ preventScroll: true });
start();
