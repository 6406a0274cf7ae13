// Text without a page: its sentences, what of it has changed, and the links between words of two texts.

const SPACE = /^\s*|\s*$/g;
const ABBREVIATION = /(?:^|[\s(])(?:\p{Lu}|Dr|Mr|Mrs|Ms|Prof|St|Jr|Sr|Sra|Hr|Fr|No|Nr|vs|etc|ca|bzw|Mme|Mlle)\.$/u;
const ORDINAL = /(?:^|\s)\d{1,2}\.$/;  // "am 3. Oktober"
const ORDINAL_LANGUAGES = /^(?:de|deu|da|dan|nb|nob|nn|nno|no|fi|fin|cs|ces|sk|slk|sl|slv|hr|hrv|hu|hun|et|est|is|isl|lv|lav|pl|pol|tr|tur)\b/;
const LINES_KEPT = 5000;

const segmenters = new Map();
const lines = new Map();  // sentences of lines seen, by language and line

/** Returns the sentences of a text: `before` is the white space in front of each; and what is left after the last. */
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

/** Returns which part of `old` became which part of `now`: all before `start` is alike, and as many after both ends. */
export function changed(old, now, same = (a, b) => a.text === b.text && a.before === b.before) {
  let start = 0, end = 0;
  while (start < old.length && start < now.length && same(old[start], now[start])) start++;
  while (end < old.length - start && end < now.length - start && same(old[old.length - 1 - end], now[now.length - 1 - end])) end++;
  return { start, oldEnd: old.length - end, newEnd: now.length - end };
}

/** Returns the texts in portions of a request each; a text of `alone` has one for itself. */
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

/** Returns for each code point of the text's normal form NFC where it begins in the text, in UTF-16; its end comes last. */
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
 * Returns the words of both texts that `links` link, in order: {start, end, to}, in UTF-16; `to` are indices of words on
 * the other side. Links are those of the server, [start, end, start, end] in code points.
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

/** Returns a text in pieces, {text, word}: `word` is the index of its word, none for what lies between. */
export function pieces(text, words) {
  const found = [];
  let at = 0;
  for (const [index, { start, end }] of words.entries()) {
    if (start < at) continue;  // of words that overlap, the first
    if (start > at) found.push({ text: text.slice(at, start) });
    found.push({ text: text.slice(start, end), word: index });
    at = end;
  }
  if (at < text.length) found.push({ text: text.slice(at) });
  return found;
}

/** Returns `text` in pieces, {text, changed}: those that the longest common sequence of words with `other` lacks. */
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

/** Returns how many characters a text has, as the server counts: code points. */
export function characters(text) {
  let pairs = 0;
  for (let index = 0; index < text.length; index++) if ((text.charCodeAt(index) & 0xfc00) === 0xdc00) pairs++;
  return text.length - pairs;
}

/** Returns the language tag of a code such as pt, pt_BR or eng_Latn; empty for what is none. */
export function tagOf(code) {
  try { return new Intl.Locale(code.replaceAll("_", "-")).toString(); } catch { return ""; }
}

/** Returns rtl for languages written from right to left, and for scripts that are, as in heb_Hebr; else ltr. */
export function directionOf(code) {
  const [language, script] = code.split(/[-_]/);
  if (script?.length === 4) return /^(?:arab|hebr|syrc|thaa|nkoo|adlm|rohg)$/i.test(script) ? "rtl" : "ltr";
  return /^(?:ar|ara|arz|he|heb|iw|fa|fas|per|ur|urd|yi|yid|ps|pus|pbt|sd|snd|ug|uig|dv|div|ckb|syr|arc|ks|prs)$/i.test(language) ? "rtl" : "ltr";
}
