// The clipboard, and files: short text files are opened in the page; the server translates other files.

import { t } from "./messages.js";
import { $, announce, button, element, notice } from "./page.js";
import { characters } from "./text.js";

const OPENED = 20_000;  // text files up to this many characters are opened in the page

export function save(contents, name) {
  const link = element("a");
  link.href = URL.createObjectURL(contents);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // browsers have no clipboard over plain HTTP
    const field = element("textarea", "unseen");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

const translatedName = (name, language) => name.replace(/(\.[^.]*)?$/, ending => `.${language}${ending}`);

/**
 * Opens a file: calls `show` with the text of a short file, and sends other files to the server. `now` returns the
 * settings of the server and the chosen languages, `post` sends a request, and `failed` handles a missing API key.
 */
export async function openFile(file, { now, show, post, failed }) {
  const { settings, from, to } = now();
  const formats = settings.supportedFilesFormat ?? [".txt"], name = file.name.toLowerCase();
  const limit = settings.charLimit ?? -1;
  if (name.endsWith(".txt") && file.size <= 4 * OPENED) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (characters(text) <= Math.min(OPENED, limit < 0 ? OPENED : limit)) return show(text);
    } catch {
      return notice("file", t("{name} is not encoded in UTF-8. Save it as UTF-8 and open it again.", { name: file.name }), true);
    }
  }
  if (!formats.some(ending => name.endsWith(ending))) {
    return notice("file", t("{name} cannot be translated, because its format is unknown. Known formats: {formats}.", { name: file.name, formats: formats.join(", ") }), true);
  }
  const row = element("li"), abort = new AbortController(), result = translatedName(file.name, to);
  row.append(element("span", "", t("Translating {name} …", { name: file.name })), button(t("Cancel"), () => { abort.abort(); row.remove(); }, "quiet"));
  $("files").prepend(row);
  try {
    const form = new FormData();
    for (const [field, value] of [["file", file], ["source", from], ["target", to]]) form.set(field, value);
    const { translatedFileUrl, warnings = [] } = await post("translate_file", form, { signal: abort.signal });
    const path = new URL(translatedFileUrl).pathname.split("/").slice(-2).join("/");  // relative to this page, because a proxy may have a different address
    const answer = await fetch(path, { signal: abort.signal });
    if (!answer.ok) throw new Error(t("The translation has expired."));
    const contents = await answer.blob();
    row.replaceChildren(element("span", "", t("{name} is ready", { name: result })), ...warnings.map(text => element("span", "soft", text)), button(t("Download"), () => save(contents, result), "filled"), button(t("Remove"), () => row.remove(), "quiet"));
    announce(t("{name} is ready", { name: result }));
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error.kind === "key") failed(error);
    row.replaceChildren(element("span", "bad", `${t("{name} could not be translated.", { name: file.name })} ${error.message}`), button(t("Remove"), () => row.remove(), "quiet"));
  }
}

/** Opens files that are dropped on the page. */
export function takeDrops(open) {
  let depth = 0;  // number of elements under the dragged file
  const dragsFile = event => event.dataTransfer?.types.includes("Files");
  addEventListener("dragenter", event => { if (dragsFile(event)) { depth++; $("drop").hidden = false; } });
  addEventListener("dragleave", event => { if (dragsFile(event) && --depth <= 0) { depth = 0; $("drop").hidden = true; } });
  addEventListener("dragover", event => { if (dragsFile(event)) event.preventDefault(); });
  addEventListener("drop", event => {
    if (!dragsFile(event)) return;
    event.preventDefault();
    depth = 0;
    $("drop").hidden = true;
    for (const file of event.dataTransfer.files) open(file);
  });
}
