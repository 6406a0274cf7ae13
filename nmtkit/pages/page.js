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

/** Returns a form for a secret text, with a label and the name of its button. `use` gets the text. */
export function secretForm(label, name, use) {
  const form = element("form"), field = element("input");
  Object.assign(field, { type: "password", autocomplete: "off", required: true, placeholder: label });
  field.setAttribute("aria-label", label);
  form.append(field, element("button", "filled", name));
  form.addEventListener("submit", event => { event.preventDefault(); use(field.value.trim()); });
  return form;
}

/** Announces a text to screen readers. */
export function announce(text) {
  clearTimeout(announcing);
  announcing = setTimeout(() => { $("status").textContent = text; }, 150);
}

/** Shows a notice with buttons, or removes the notice if the text is empty. `about` is the name of the notice. */
export function notice(about, text = "", bad = false, ...actions) {
  const box = $("notice");
  if (text && text === box.dataset.text) return;
  Object.assign(box.dataset, { about, text });
  box.hidden = !text;
  box.classList.toggle("bad", bad);
  box.replaceChildren(...(text ? [element("p", "", text), ...actions] : []));
}

/** Keeps a value for this tab, even if the page is loaded again. If `value` is null, forgets the kept value. */
export function keep(value) {
  try {
    if (value === null) sessionStorage.removeItem("translator");
    else sessionStorage.setItem("translator", JSON.stringify(value));
  } catch { /* the browser stores nothing */ }
}

/** Returns the kept value, or null. */
export function kept() {
  try { return JSON.parse(sessionStorage.getItem("translator")); } catch { return null; }
}

/** Removes the notice if its name is `about`. */
export function forget(about) {
  if ($("notice").dataset.about === about) notice("");
}
