// Requests to the server, which are repeated while the server is busy, and translations, which are requested once each.

import { t } from "./messages.js";
import { portions } from "./text.js";

const LONGEST_PAUSE = 30;  // seconds
const LONGEST_WAIT = 60;  // seconds; the quota of a minute begins again in this time. No retry if Retry-After is longer
const AT_A_TIME = 2;  // requests at the same time
const KEPT = 5000;  // translations in memory
const FAILURES = 8;  // after so many failed sentences in a row, the other sentences are not requested

/** An error that waiting cannot solve. `kind` is "key" (the API key is missing or wrong) or "refused"; `message` is for people. */
export class Refusal extends Error {
  constructor(kind, message, status) {
    super(message);
    Object.assign(this, { kind, status });
  }
}

/** Returns a sentence for people about an error answer of the server. */
export function explained(status, message = "") {
  if (status === 413) return t("It is too long for this server.");
  if (status === 504) return t("It took too long. Try a shorter text.");
  if (status >= 500 && status !== 501) return t("The server failed to translate it.");
  const reason = message.replace(/^Invalid request: /, "").trim();
  if (!reason) return t("The server answered with error {status}.", { status });
  return reason[0].toUpperCase() + reason.slice(1).replace(/[.\s]*$/, ".");
}

/** Returns the seconds to wait after `attempt` attempts: a multiple of `retryAfter`, else twice as long each time. */
export function pause(attempt, retryAfter, random = Math.random()) {
  const asked = Number.parseFloat(retryAfter);
  const seconds = asked >= 0 ? asked * Math.max(1, attempt) : 2 ** (attempt - 1);
  return Math.min(LONGEST_PAUSE, seconds) * (0.75 + 0.5 * random);  // clients should not all return at the same time
}

function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });
}

/**
 * Returns the JSON of an answer. Repeats the request while the server is busy or gone, unless the quota of a day or of
 * a month is used up. Before each repetition, calls `waiting` with the kind ("busy" or "gone") and the seconds to the
 * next attempt; after success, calls `waiting` with null. Throws a Refusal, or an AbortError if `signal` is aborted.
 */
export async function ask(path, { body, signal, waiting = () => {}, again = sleep } = {}) {
  for (let attempt = 1; ; attempt++) {
    let kind = "gone", retryAfter = null;
    try {
      const isForm = typeof FormData !== "undefined" && body instanceof FormData;
      const response = await fetch(path, body === undefined ? { signal } : {
        method: "POST", signal,
        headers: isForm ? {} : { "Content-Type": "application/json" },
        body: isForm ? body : JSON.stringify(body),
      });
      const answer = await response.json().catch(() => ({}));
      if (response.ok) { waiting(null); return answer; }
      const message = explained(response.status, answer.error);
      if (response.status === 403) throw new Refusal("key", message, 403);
      retryAfter = response.headers.get("Retry-After");
      const isUsedUp = response.status === 429 && Number.parseFloat(retryAfter) > LONGEST_WAIT;
      if (isUsedUp || ![429, 502, 503].includes(response.status)) throw new Refusal("refused", message, response.status);
      kind = response.status === 502 ? "gone" : "busy";
    } catch (error) {
      if (error instanceof Refusal || error.name === "AbortError") throw error;
    }
    const seconds = pause(attempt, retryAfter);
    waiting({ kind, seconds });
    await again(seconds, signal);
  }
}

/**
 * Translations of sentences between two languages. `want` takes the sentences of the page: missing translations are
 * requested, a few sentences at a time, and requests without a wanted sentence are cancelled.
 */
export class Translations {
  constructor({ request, arrived, failed, idle = () => {} }) {
    Object.assign(this, { request, arrived, failed, idle });
    this.known = new Map();  // text -> translation
    this.refused = new Map();  // text -> Refusal
    this.alone = new Set();  // texts of failed requests: a request for each text shows which text fails
    this.running = [];
    this.wanted = [];
    this.failures = 0;  // sentences that failed since the last success
  }

  get missing() { return this.wanted.filter(text => !this.known.has(text) && !this.refused.has(text)); }

  want(texts) {
    this.wanted = [...new Set(texts)];
    const wanted = new Set(this.wanted);
    for (const request of this.running) if (!request.texts.some(text => wanted.has(text))) request.abort.abort();
    this.running = this.running.filter(request => !request.abort.signal.aborted);
    this.start();
  }

  forgetFailures() { this.refused.clear(); this.failures = 0; }

  start() {
    const requested = new Set(this.running.flatMap(request => request.texts));
    const next = portions(this.missing.filter(text => !requested.has(text)), { alone: this.alone });
    while (this.running.length < AT_A_TIME && next.length) this.run(next.shift());
    if (!this.running.length) this.idle();
  }

  async run(texts) {
    const request = { texts, abort: new AbortController() };
    this.running.push(request);
    let refusal = null;
    try {
      const translations = await this.request(texts, request.abort.signal);
      texts.forEach((text, index) => this.keep(text, translations[index]));
      this.failures = 0;
    } catch (error) {
      if (request.abort.signal.aborted) return;
      refusal = error;
      if (refusal.kind === "refused" && texts.length > 1) texts.forEach(text => this.alone.add(text));
      else {
        this.failures += refusal.kind === "refused" ? 1 : 0;
        const isHopeless = refusal.kind === "key" || this.failures >= FAILURES;
        for (const text of isHopeless ? [...this.missing, ...texts] : texts) this.refused.set(text, refusal);
      }
    }
    this.running = this.running.filter(other => other !== request);
    if (refusal === null) this.arrived(texts);
    else if (this.refused.has(texts[0])) this.failed(refusal, texts);
    this.start();
  }

  keep(text, translation) {
    if (this.known.size >= KEPT) this.known.delete(this.known.keys().next().value);
    this.known.set(text, translation);
  }
}
