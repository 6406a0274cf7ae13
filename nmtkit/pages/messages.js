// The texts of the page in the language of the browser. The files messages.*.json translate the English texts.

// Descriptions of the flags of a translation, as the server names them.
export const DOUBTS = {
  uncertain: "The model is not sure of this translation.",
  too_short: "This is much shorter than the original. Something may be missing.",
  too_long: "This is much longer than the original. Something may be repeated or invented.",
  copied: "Much of the original was copied without translation.",
};

export const EXAMPLES = {  // sentences to try, by language
  de: "Ein Mann fährt mit dem Fahrrad durch den Schnee.", en: "A man is riding a bicycle through the snow.",
  es: "Un hombre va en bicicleta por la nieve.", fr: "Un homme fait du vélo dans la neige.",
  it: "Un uomo va in bicicletta nella neve.", ja: "男性が雪の中を自転車で走っています。",
  pl: "Mężczyzna jedzie rowerem przez śnieg.", zh: "一个男人在雪中骑自行车。",
};

const LANGUAGES = ["de", "es", "fr", "it", "ja", "pl", "zh"];
const ATTRIBUTES = ["aria-label", "placeholder", "title"];
const languageNames = new Map();  // tag -> name
let texts = {};
export let language = "en";

/** Returns a text in the language of the page. `values` replace the names in braces. */
export const t = (text, values = {}) => (texts[text] ?? text).replace(/\{(\w+)\}/g, (_, name) => values[name]);

/**
 * Returns the name of a language in the language of the page. The name has the script only if the language usually has
 * a different script. If the browser does not know `tag`, a BCP 47 tag, returns `name`, the English name.
 */
export function languageName(tag, name) {
  if (language === "en" || !tag) return name;
  if (!languageNames.has(tag)) {
    const locale = new Intl.Locale(tag), isUsual = locale.minimize().toString() === locale.language && !locale.region;
    const names = new Intl.DisplayNames([language], { type: "language", fallback: "none" });
    languageNames.set(tag, names.of(isUsual ? locale.language : tag));
  }
  return languageNames.get(tag) ?? name;
}

export const formatted = number => number.toLocaleString(language);

/** Returns the first of the preferred languages `tags`, such as de-AT, for which the page has texts, else English. */
export const chosen = tags => tags.map(tag => tag.toLowerCase().split("-")[0]).find(code => code === "en" || LANGUAGES.includes(code)) ?? "en";

/** Shows the page in the language of the browser. If the texts cannot be loaded, the page stays in English. */
export async function useLanguage(tags = navigator.languages ?? []) {
  const code = chosen(tags);
  if (code === "en") return;
  try {
    const answer = await fetch(`static/messages.${code}.json`);
    if (!answer.ok) return;
    texts = await answer.json();
  } catch { return; }
  language = document.documentElement.lang = code;
  for (const node of document.querySelectorAll("body *")) {
    for (const child of node.childNodes) {
      const text = child.nodeType === Node.TEXT_NODE ? child.data.trim() : "";
      if (text) child.data = child.data.replace(text, () => t(text));
    }
    for (const name of ATTRIBUTES) if (node.hasAttribute(name)) node.setAttribute(name, t(node.getAttribute(name)));
  }
}
