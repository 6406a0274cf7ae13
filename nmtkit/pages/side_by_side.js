"use strict";
// Sorts and filters the sentences of a comparison.
const form = document.querySelector(".tools"), list = document.querySelector("#sentences");
const sentences = [...list.children].map(element => {
  const { number, length, differences, a, b } = element.dataset;
  return { element, number: Number(number), length: Number(length), faults: Number(a) - Number(b),
    differences: differences.split(" ").map(Number), text: element.textContent.toLowerCase() };
});
const keys = {  // a sentence with a smaller key comes first
  size: index => each => -Math.abs(each.differences[index]),
  down: index => each => -each.differences[index],
  up: index => each => each.differences[index],
  faults: side => each => side === "a" ? -each.faults : each.faults,
  length: order => each => order === "down" ? -each.length : each.length,
  number: () => each => each.number,
};
function arrange() {
  const [name, argument] = form.elements.order.value.split(":"), key = keys[name](argument);
  const text = form.elements.text.value.toLowerCase(), different = form.elements.different.checked;
  sentences.sort((one, other) => key(one) - key(other) || one.number - other.number);
  let shown = 0;
  for (const each of sentences) {
    each.element.hidden = (different && "equal" in each.element.dataset) || !each.text.includes(text);
    shown += !each.element.hidden;
  }
  list.replaceChildren(...sentences.map(each => each.element));
  form.querySelector("output").textContent = `${shown.toLocaleString("en")} shown`;
}
form.addEventListener("input", arrange);
form.addEventListener("submit", event => event.preventDefault());
arrange();
