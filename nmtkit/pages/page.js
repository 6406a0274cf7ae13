// What every part of the page makes and says things with.

export const $ = id => document.getElementById(id);
let announcing = 0;

export function element(name, classes = "", text = undefined) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
}

export const button = (text, action, classes = "") => {
  const made = element("button", classes, text);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
};

/** Says something to those who hear the page. */
export function announce(text) {
  clearTimeout(announcing);
  announcing = setTimeout(() => { $("status").textContent = text; }, 150);
}

/** Shows what is wrong, and what can be done about it; nothing without a text. `about` names it for `forget`. */
export function notice(about, text = "", bad = false, ...actions) {
  const box = $("notice");
  if (text && text === box.dataset.text) return;
  Object.assign(box.dataset, { about, text });
  box.hidden = !text;
  box.classList.toggle("bad", bad);
  box.replaceChildren(...(text ? [element("p", "", text), ...actions] : []));
}

/** Takes a notice away when it is about this. */
export function forget(about) {
  if ($("notice").dataset.about === about) notice("");
}
