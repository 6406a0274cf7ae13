// Functions on text, independent of the page: sentences, changes, links between words.

const SPACE = /^\s*|\s*$/g;
const ABBREVIATION = /(?:^|[\s(])(?:\p{Lu}|Dr|Mr|Mrs|Ms|Prof|St|Jr|Sr|Sra|Hr|Fr|No|Nr|vs|etc|ca|bzw|Mme|Mlle)\.$/u;
const ORDINAL = /(?:^|\s)\d{1,2}\.$/;  // "am 3. Oktober"
const ORDINAL_LANGUAGES = /^(?:de|deu|da|dan|nb|nob|nn|nno|no|fi|fin|cs|ces|sk|slk|sl|slv|hr|hrv|hu|hun|et|est|is|isl|lv|lav|pl|pol|tr|tur)(?![a-z])/;
const LINES_KEPT = 5000;

const segmenters = new Map();
const lines = new Map();  // language and line -> sentences

/** Returns the sentences of a text, each with the white space `before` it, and the white space `after` the last. */
export function sentences(text, language) {
  const found = [];
  let before = "";
  for (const [index, line] of text.split(/(\r\n|\r|\n)/).entries()) {
    if (index % 2) { before += line; continue; }
    for (const part of sentencesOfLine(line, language)) {
      const [start] = part.match(SPACE), sentence = part.trim();
      before += start;
      if (!sentence) continue;
      found.push({ before, text: sentence });
      before = part.slice(start.length + sentence.length);
    }
  }
  return { sentences: found, after: before };
}

function sentencesOfLine(line, language) {
  const key = `${language} ${line}`;
  if (!lines.has(key)) {
    if (lines.size >= LINES_KEPT) lines.clear();
    lines.set(key, cut(line, language));
  }
  return lines.get(key);
}

function cut(line, language) {
  if (!line || typeof Intl.Segmenter !== "function") return line ? [line] : [];
  if (!segmenters.has(language)) segmenters.set(language, new Intl.Segmenter(tagOf(language) || "en", { granularity: "sentence" }));
  const parts = [];
  for (const { segment } of segmenters.get(language).segment(line)) {
    const last = parts.at(-1)?.trimEnd();
    const goesOn = last !== undefined && (ABBREVIATION.test(last) || (ORDINAL.test(last) && ORDINAL_LANGUAGES.test(language)));
    if (goesOn) parts[parts.length - 1] += segment;
    else parts.push(segment);
  }
  return parts;
}

/** Returns the changed range of two lists: items before `start`, and items from `oldEnd` and `newEnd` on, are the same. */
export function changed(old, now, same = (a, b) => a.text === b.text && a.before === b.before) {
  let start = 0, end = 0;
  while (start < old.length && start < now.length && same(old[start], now[start])) start++;
  while (end < old.length - start && end < now.length - start && same(old[old.length - 1 - end], now[now.length - 1 - end])) end++;
  return { start, oldEnd: old.length - end, newEnd: now.length - end };
}

/** Divides texts into requests of up to `most` texts and `characters` characters. Texts of `alone` are sent alone. */
export function portions(texts, { most = 16, characters = 1500, alone = new Set() } = {}) {
  const found = [];
  let size = Infinity;
  for (const text of new Set(texts)) {
    const last = found.at(-1);
    if (size + text.length > characters || last.length >= most || alone.has(text) || alone.has(last[0])) {
      found.push([text]);
      size = text.length;
    } else {
      last.push(text);
      size += text.length;
    }
  }
  return found;
}

/** Returns the index in `text` (UTF-16 units) of each code point of its NFC form, and finally the length of `text`. */
export function places(text) {
  const found = [];
  let at = 0;
  for (const cluster of text.match(/\P{M}\p{M}*|\p{M}+/gu) ?? []) {
    for (const _ of cluster.normalize("NFC")) found.push(at);
    at += cluster.length;
  }
  return [...found, text.length];
}

/**
 * Returns the linked words of both texts in order: {start, end, to} in UTF-16 units, where `to` holds indices of words of
 * the other text. `links` come from the server: [source start, source end, target start, target end] in code points.
 */
export function linkedWords(source, target, links) {
  const sides = [{ places: places(source), words: new Map() }, { places: places(target), words: new Map() }];
  const word = ({ places, words }, start, end) => {
    if (!(start >= 0 && start < end && end < places.length)) return null;
    if (!words.has(start)) words.set(start, { start: places[start], end: places[end], to: [] });
    return words.get(start);
  };
  const pairs = links.map(([a, b, c, d]) => [word(sides[0], a, b), word(sides[1], c, d)]).filter(([a, b]) => a && b);
  const ordered = sides.map(side => [...side.words.values()].sort((a, b) => a.start - b.start));
  for (const [a, b] of pairs) {
    a.to.push(ordered[1].indexOf(b));
    b.to.push(ordered[0].indexOf(a));
  }
  return { source: ordered[0], target: ordered[1] };
}

/** Returns a text in pieces {text, word}. `word` is the index of a word, undefined for text between words. */
export function pieces(text, words) {
  const found = [];
  let at = 0;
  for (const [index, { start, end }] of words.entries()) {
    if (start < at) continue;  // overlaps the previous word
    if (start > at) found.push({ text: text.slice(at, start) });
    found.push({ text: text.slice(start, end), word: index });
    at = end;
  }
  if (at < text.length) found.push({ text: text.slice(at) });
  return found;
}

/** Returns a text in pieces {text, changed}. Words outside the longest common subsequence of both texts are changed. */
export function differences(other, text) {
  const a = other.split(/(\s+)/), b = text.split(/(\s+)/);
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const found = [];
  for (let i = 0, j = 0; j < b.length;) {
    const alike = i < a.length && a[i] === b[j];
    if (!alike && i < a.length && common[i + 1][j] > common[i][j + 1]) { i++; continue; }
    const isChanged = !alike && b[j].trim() !== "";
    if (found.length && found.at(-1).changed === isChanged) found.at(-1).text += b[j];
    else if (b[j]) found.push({ text: b[j], changed: isChanged });
    if (alike) i++;
    j++;
  }
  return found;
}

/** Returns the number of characters of a text as the server counts them: code points. */
export function characters(text) {
  let pairs = 0;
  for (let index = 0; index < text.length; index++) if ((text.charCodeAt(index) & 0xfc00) === 0xdc00) pairs++;
  return text.length - pairs;
}

/** Returns the BCP 47 tag of a code such as pt, pt_BR or eng_Latn; empty if the code is not a language. */
export function tagOf(code) {
  try { return new Intl.Locale(code.replaceAll("_", "-")).toString(); } catch { return ""; }
}

/** Returns "rtl" for a language or a script (as in heb_Hebr) that is written from right to left, else "ltr". */
export function directionOf(code) {
  const [language, script] = code.split(/[-_]/);
  if (script?.length === 4) return /^(?:arab|hebr|syrc|thaa|nkoo|adlm|rohg)$/i.test(script) ? "rtl" : "ltr";
  return /^(?:ar|ara|arz|he|heb|iw|fa|fas|per|ur|urd|yi|yid|ps|pus|pbt|sd|snd|ug|uig|dv|div|ckb|syr|arc|ks|prs)$/i.test(language) ? "rtl" : "ltr";
}

/** Returns the languages and the text of an address such as #en/de/A dog runs. Invalid percent escapes stay as they are. */
export function readHash(hash) {
  const decoded = escapes => { try { return decodeURIComponent(escapes); } catch { return escapes; } };
  const [from = "", to = "", ...text] = hash.replace(/^#/, "").split("/").map(part => part.replace(/(?:%[0-9a-f]{2})+/gi, decoded));
  return { from, to, text: text.join("/") };
}
