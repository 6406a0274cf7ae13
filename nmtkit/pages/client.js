// What speaks to the server: requests that wait and try again, and translations, each asked for once.

import { portions } from "./text.js";

const LONGEST_PAUSE = 30;  // seconds
const AT_A_TIME = 2;  // requests
const KEPT = 5000;  // translations

/** An answer that no waiting mends: `kind` is key (one is needed, or it is wrong) or refused; `message` is for people. */
export class Refusal extends Error {
  constructor(kind, message, status) {
    super(message);
    Object.assign(this, { kind, status });
  }
}

/** Returns the seconds to wait after `attempt` tries: what the server asks for, else twice as long each time. */
export function pause(attempt, retryAfter, random = Math.random()) {
  const asked = Number.parseFloat(retryAfter);
  const seconds = asked >= 0 ? asked * Math.max(1, attempt) : 2 ** (attempt - 1);
  return Math.min(LONGEST_PAUSE, seconds) * (0.75 + 0.5 * random);  // so that not all clients come back at once
}

function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });
}

/**
 * Returns the JSON of an answer. Where the server is busy or gone it tries again, and tells `waiting` so: busy or gone,
 * and in how many seconds; null when it has an answer. Throws a Refusal, or an AbortError when `signal` says so.
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
      const message = answer.error || `the server answered ${response.status}`;
      if (response.status === 403) throw new Refusal("key", message, 403);
      if (![429, 502, 503].includes(response.status)) throw new Refusal("refused", message, response.status);
      kind = response.status === 502 ? "gone" : "busy";
      retryAfter = response.headers.get("Retry-After");
    } catch (error) {
      if (error instanceof Refusal || error.name === "AbortError") throw error;
    }
    const seconds = pause(attempt, retryAfter);
    waiting({ kind, seconds });
    await again(seconds, signal);
  }
}

/**
 * Translations of sentences between two languages. `want` says what is on the page: what is missing is asked for, a few
 * sentences a request, and requests of which nothing is wanted any more are cancelled.
 */
export class Translations {
  constructor({ request, arrived, failed, idle = () => {} }) {
    Object.assign(this, { request, arrived, failed, idle });
    this.known = new Map();  // text -> what the server found
    this.refused = new Map();  // text -> Refusal
    this.alone = new Set();  // texts of a request that failed: which of them it was shows when each has its own
    this.running = [];
    this.wanted = [];
  }

  get missing() { return this.wanted.filter(text => !this.known.has(text) && !this.refused.has(text)); }

  want(texts) {
    this.wanted = [...new Set(texts)];
    const wanted = new Set(this.wanted);
    for (const request of this.running) if (!request.texts.some(text => wanted.has(text))) request.abort.abort();
    this.running = this.running.filter(request => !request.abort.signal.aborted);
    this.start();
  }

  forgetFailures() { this.refused.clear(); }

  start() {
    const onTheWay = new Set(this.running.flatMap(request => request.texts));
    const next = portions(this.missing.filter(text => !onTheWay.has(text)), { alone: this.alone });
    while (this.running.length < AT_A_TIME && next.length) this.run(next.shift());
    if (!this.running.length) this.idle();
  }

  async run(texts) {
    const request = { texts, abort: new AbortController() };
    this.running.push(request);
    let refusal = null;
    try {
      const found = await this.request(texts, request.abort.signal);
      texts.forEach((text, index) => this.keep(text, found[index]));
    } catch (error) {
      if (request.abort.signal.aborted) return;
      refusal = error;
      if (refusal.kind === "refused" && texts.length > 1) texts.forEach(text => this.alone.add(text));
      else (refusal.kind === "key" ? this.missing : texts).forEach(text => this.refused.set(text, refusal));
    }
    this.running = this.running.filter(other => other !== request);
    if (refusal === null) this.arrived(texts);
    else if (this.refused.has(texts[0])) this.failed(refusal, texts);
    this.start();
  }

  keep(text, found) {
    if (this.known.size >= KEPT) this.known.delete(this.known.keys().next().value);
    this.known.set(text, found);
  }
}
