// The logic of the translator page, without a browser. Run by test_pages.py: node logic.mjs FOLDER_OF_THE_MODULES
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const folder = pathToFileURL(process.argv[2] + "/");
const text = await import(new URL("text.js", folder)), client = await import(new URL("client.js", folder));
const messages = await import(new URL("messages.js", folder));

const tests = {
  "sentences and the white space between them are the text"() {
    for (const [given, expected] of [
      ["", []],
      ["  \n ", []],
      ["One. Two!  Three?\r\n\n  Four", ["One.", "Two!", "Three?", "Four"]],
      ["Dr. Smith and J. Doe came. They left.", ["Dr. Smith and J. Doe came.", "They left."]],
      ["他来了。她走了。", ["他来了。", "她走了。"]],
    ]) {
      const found = text.sentences(given, "en");
      assert.deepEqual(found.sentences.map(sentence => sentence.text), expected);
      assert.equal(found.sentences.map(sentence => sentence.before + sentence.text).join("") + found.after, given);
    }
    for (const code of ["de", "de-DE", "de_DE", "deu_Latn"]) assert.equal(text.sentences("Am 3. Oktober kam er.", code).sentences.length, 1);
    assert.equal(text.sentences("It was 3. He left.", "en").sentences.length, 2);
  },
  "only what lies between the first and the last change is new"() {
    const of = words => words.split("").map(word => ({ before: "", text: word }));
    assert.deepEqual(text.changed(of("abcde"), of("abXde")), { start: 2, oldEnd: 3, newEnd: 3 });
    assert.deepEqual(text.changed(of("abc"), of("abXbc")), { start: 2, oldEnd: 2, newEnd: 4 });
    assert.deepEqual(text.changed(of("aaa"), of("aa")), { start: 2, oldEnd: 3, newEnd: 2 });
    assert.deepEqual(text.changed([], of("a")), { start: 0, oldEnd: 0, newEnd: 1 });
  },
  "links of code points become places in UTF-16, of texts that are no normal form too"() {
    const source = "😀 cafe\u0301 x", target = "un 😀 𝒙";  // code points of NFC: 😀0 c2 a3 f4 é5 x7
    const words = text.linkedWords(source, target, [[2, 6, 0, 2], [0, 1, 3, 4], [7, 8, 5, 6], [2, 6, 5, 6], [9, 12, 0, 2]]);
    const show = (all, of) => all.map(word => [of.slice(word.start, word.end), word.to]);
    assert.deepEqual(show(words.source, source), [["😀", [1]], ["cafe\u0301", [0, 2]], ["x", [2]]]);
    assert.deepEqual(show(words.target, target), [["un", [1]], ["😀", [0]], ["𝒙", [2, 1]]]);
    assert.equal(text.pieces(target, words.target).map(piece => piece.text).join(""), target);
    assert.deepEqual(text.pieces("ab", []), [{ text: "ab" }]);
  },
  "what differs from another translation is told by words"() {
    const found = text.differences("the dog runs", "the big dog walks");
    assert.deepEqual(found.filter(piece => piece.changed).map(piece => piece.text.trim()), ["big", "walks"]);
    assert.equal(found.map(piece => piece.text).join(""), "the big dog walks");
    assert.deepEqual(text.differences("a b", "a b").filter(piece => piece.changed), []);
  },
  "languages know their direction"() {
    for (const code of ["ar", "he", "fa-IR", "heb_Hebr", "uz_Arab", "ur"]) assert.equal(text.directionOf(code), "rtl", code);
    for (const code of ["en", "de_DE", "eng_Latn", "ku_Latn", "zh-Hant", ""]) assert.equal(text.directionOf(code), "ltr", code);
    assert.equal(text.tagOf("pt_BR"), "pt-BR");
    assert.equal(text.tagOf("no language"), "");
  },
  "characters are counted as the server does"() {
    for (const one of ["", "abc", "😀é", "a\u{1d499}b"]) assert.equal(text.characters(one), [...one].length);
  },
  "an address may hold a percent sign that escapes nothing"() {
    for (const [hash, from, to, shown] of [
      ["#en/de/Jackets at 50% off", "en", "de", "Jackets at 50% off"],
      ["#en/de/Jackets%20at%2050%25%20off", "en", "de", "Jackets at 50% off"],
      ["#en/de/100%/%e4%c3%a4", "en", "de", "100%/%e4%c3%a4"],
      ["#en/de/%c3%a4/%F0%9F%98%80", "en", "de", "ä/😀"],
      ["#en", "en", "", ""], ["", "", "", ""],
    ]) assert.deepEqual(text.readHash(hash), { from, to, text: shown });
  },
  "the page takes the first language of the browser that it has"() {
    for (const [tags, language] of [
      [["de-AT", "en"], "de"], [["nl", "fr-CA", "en"], "fr"], [["en-GB", "de"], "en"], [["zh-Hant-TW"], "zh"], [["nl"], "en"], [[], "en"],
    ]) assert.equal(messages.chosen(tags), language, String(tags));
    assert.equal(messages.t("{done} of {total} sentences", { done: 2, total: "3" }), "2 of 3 sentences");
    assert.equal(messages.languageName("de", "German"), "German");
  },
  "errors of the server become sentences for people"() {
    assert.equal(client.explained(400, "Invalid request: it has no subtitle: no line has times"), "It has no subtitle: no line has times.");
    assert.equal(client.explained(400, "xx is not supported; served: en to de."), "Xx is not supported; served: en to de.");
    assert.equal(client.explained(413, "Invalid request: request (5) exceeds text limit (4)"), "It is too long for this server.");
    assert.equal(client.explained(500, "a line of this text cannot be translated"), "The server failed to translate it.");
    assert.equal(client.explained(418), "The server answered with error 418.");
  },
  async "after many failures in a row the other sentences are not requested"() {
    const asked = [];
    const request = async texts => { asked.push(texts.length); throw new client.Refusal("refused", "No.", 500); };
    const translations = new client.Translations({ request, arrived() {}, failed() {} });
    translations.want(Array.from({ length: 500 }, (_, index) => `sentence ${index}`));
    await new Promise(resolve => setTimeout(resolve, 20));
    assert.ok(asked.length < 20, asked.length);
    assert.deepEqual(translations.missing, []);
    assert.equal(translations.refused.size, 500);
  },
  "a server that is busy is asked again, later and later"() {
    assert.equal(client.pause(1, "2", 0.5), 2);
    assert.ok(client.pause(3, "2", 0.5) > client.pause(1, "2", 0.5));
    assert.deepEqual([1, 2, 3, 9].map(attempt => client.pause(attempt, null, 0.5)), [1, 2, 4, 30]);
    assert.ok(client.pause(9, null, 0.99) < 40);
  },
  async "429 and a server that is gone are waited for, other errors are told"() {
    const answers = [[429, { error: "later" }], null, [200, { ok: 1 }], [403, { error: "no key" }], [400, { error: "wrong" }],
      [429, { error: "the quota is exceeded: 5 characters per month" }, "86400"]];
    const told = [], pauses = [];
    globalThis.fetch = async () => {
      if (!answers.length) throw Object.assign(new Error("no answer is left"), { name: "AbortError" });  // not asked again
      const next = answers.shift();
      if (!next) throw new TypeError("fetch failed");
      return { ok: next[0] < 400, status: next[0], json: async () => next[1], headers: new Map([["Retry-After", next[2] ?? "2"]]) };
    };
    const options = { body: {}, waiting: reason => told.push(reason?.kind ?? "over"), again: async seconds => pauses.push(seconds) };
    assert.deepEqual(await client.ask("translate", options), { ok: 1 });
    assert.deepEqual(told, ["busy", "gone", "over"]);
    assert.equal(pauses.length, 2);
    await assert.rejects(client.ask("translate", options), { kind: "key", message: "No key." });
    await assert.rejects(client.ask("translate", options), { kind: "refused", message: "Wrong." });
    await assert.rejects(client.ask("translate", options), { kind: "refused", message: "The quota is exceeded: 5 characters per month." });
    assert.equal(pauses.length, 2);
  },
  async "a sentence is asked for once, and no more when nobody wants it"() {
    const asked = [], arrived = [];
    const request = (texts, signal) => new Promise((resolve, reject) => {
      asked.push({ texts, resolve, signal });
      signal.addEventListener("abort", () => reject(signal.reason));
    });
    const translations = new client.Translations({ request, arrived: texts => arrived.push(...texts), failed: assert.fail });
    translations.want(["a", "b"]);
    translations.want(["a", "b", "c"]);
    assert.deepEqual(asked.map(one => one.texts), [["a", "b"], ["c"]]);
    translations.want(["a", "b", "d"]);  // c is wanted no more
    assert.deepEqual(asked.map(one => one.signal.aborted), [false, true, false]);
    assert.deepEqual(asked[2].texts, ["d"]);
    asked[0].resolve(["A", "B"]);
    asked[2].resolve(["D"]);
    await new Promise(resolve => setTimeout(resolve));
    assert.deepEqual(arrived, ["a", "b", "d"]);
    translations.want(["b", "d"]);
    assert.equal(asked.length, 3);
    assert.equal(translations.known.get("d"), "D");
  },
  async "of a portion that fails each sentence is tried alone, and a missing key stops all"() {
    const asked = [], failed = [];
    const request = async texts => {
      asked.push(texts.join());
      if (texts.includes("bad")) throw new client.Refusal("refused", "no", 500);
      return texts;
    };
    const translations = new client.Translations({ request, arrived() {}, failed: (error, texts) => failed.push(...texts) });
    translations.want(["a", "bad", "b"]);
    await new Promise(resolve => setTimeout(resolve, 5));
    assert.deepEqual(asked, ["a,bad,b", "a", "bad", "b"]);
    assert.deepEqual(failed, ["bad"]);
    const secrets = Array.from({ length: 20 }, (_, index) => `secret ${index}`);
    asked.length = 0;
    const keyless = new client.Translations({
      request: async texts => { asked.push(texts); throw new client.Refusal("key", "no", 403); }, arrived() {}, failed() {},
    });
    keyless.want(secrets.flatMap(secret => [secret, secret.padEnd(900, "x")]));
    await new Promise(resolve => setTimeout(resolve, 5));
    assert.equal(asked.length, 2);  // those that were on the way
    assert.deepEqual(keyless.missing, []);
  },
};

let failures = 0;
for (const [name, test] of Object.entries(tests)) {
  try { await test(); } catch (error) { failures++; console.log(`${name}\n${error.stack}\n`); }
}
process.exit(failures ? 1 : 0);
