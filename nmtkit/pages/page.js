// Elements, announcements for screen readers, and notices.

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

/** Announces a text to screen readers. */
export function announce(text) {
  clearTimeout(announcing);
  announcing = setTimeout(() => { $("status").textContent = text; }, 150);
}

/** Shows a notice with buttons, or removes the notice if the text is empty. `about` is its name for `forget`. */
export function notice(about, text = "", bad = false, ...actions) {
  const box = $("notice");
  if (text && text === box.dataset.text) return;
  Object.assign(box.dataset, { about, text });
  box.hidden = !text;
  box.classList.toggle("bad", bad);
  box.replaceChildren(...(text ? [element("p", "", text), ...actions] : []));
}

/** Removes the notice if it has this name. */
export function forget(about) {
  if ($("notice").dataset.about === about) notice("");
}
