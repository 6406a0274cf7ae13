// Files: short text files are opened in the page; other files are sent to the server, which returns translated files.

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

const translatedName = (name, language) => name.replace(/(\.[^.]*)?$/, ending => `.${language}${ending}`);

/**
 * Opens a file: calls `show` with the text of a short file, and has other files translated. `now` returns the settings of
 * the server and the chosen languages, `post` sends a request, and `failed` handles a missing API key.
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
      return notice("file", `${file.name} is not encoded in UTF-8. Save it as UTF-8 and open it again.`, true);
    }
  }
  if (!formats.some(ending => name.endsWith(ending))) {
    return notice("file", `${file.name} cannot be translated, because its format is unknown. Known formats: ${formats.join(", ")}.`, true);
  }
  const row = element("li"), abort = new AbortController(), result = translatedName(file.name, to);
  row.append(element("span", "", `Translating ${file.name} …`), button("Cancel", () => { abort.abort(); row.remove(); }, "quiet"));
  $("files").prepend(row);
  try {
    const form = new FormData();
    for (const [field, value] of [["file", file], ["source", from], ["target", to]]) form.set(field, value);
    const { translatedFileUrl } = await post("translate_file", form, { signal: abort.signal });
    const path = new URL(translatedFileUrl).pathname.split("/").slice(-2).join("/");  // relative to this page, whatever the address of the proxy is
    const answer = await fetch(path, { signal: abort.signal });
    if (!answer.ok) throw new Error("The translation has expired.");
    const contents = await answer.blob();
    row.replaceChildren(element("span", "", `${result} is ready`), button("Download", () => save(contents, result), "filled"), button("Remove", () => row.remove(), "quiet"));
    announce(`${result} is ready`);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error.kind === "key") failed(error);
    row.replaceChildren(element("span", "bad", `${file.name} could not be translated. ${error.message}`), button("Remove", () => row.remove(), "quiet"));
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
