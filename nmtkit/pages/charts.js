"use strict";
// Charts say their values where one points at them, and a click makes one as wide as the page.
for (const figure of document.querySelectorAll(".chart")) {
  const svg = figure.querySelector("svg");
  const curves = [...svg.querySelectorAll("polyline")].map(line => ({
    name: line.dataset.name, colour: line.getAttribute("class"),
    values: line.dataset.points.split(" ").map(point => point.split(",").map(Number)),
    spots: line.getAttribute("points").split(" ").map(point => point.split(",").map(Number)),
  }));
  if (!curves.length) continue;
  const cursor = svg.querySelector(".grid").cloneNode();
  cursor.setAttribute("class", "cursor");
  const reading = document.createElement("div");
  reading.className = "reading";
  const hide = () => { cursor.remove(); reading.remove(); };
  svg.addEventListener("pointermove", event => {
    const view = svg.viewBox.baseVal, { a: scale, e: left } = svg.getScreenCTM();  // a pixel is left + scale * x
    const x = (event.clientX - left) / scale;
    const nearest = curves.map(curve => {
      const distance = spot => Math.abs(spot[0] - x);
      const index = curve.spots.reduce((best, spot, at) => distance(spot) < distance(curve.spots[best]) ? at : best, 0);
      return { curve, update: curve.values[index][0], value: curve.values[index][1], column: curve.spots[index][0] };
    });
    const first = nearest.reduce((best, item) => Math.abs(item.column - x) < Math.abs(best.column - x) ? item : best);
    for (const [name, value] of [["x1", first.column], ["x2", first.column], ["y1", 8], ["y2", view.height - 22]]) cursor.setAttribute(name, value);
    svg.append(cursor);
    reading.replaceChildren(`update ${first.update.toLocaleString("en")}`, ...nearest.map(({ curve, value }) => {
      const row = document.createElement("div"), key = document.createElement("span");
      key.className = `key ${curve.colour}`;
      key.textContent = curve.name;
      row.append(key, ` ${value}`);
      return row;
    }));
    figure.append(reading);
    const box = figure.getBoundingClientRect(), at = left + scale * first.column - box.left, right = at > box.width / 2;
    reading.style.left = right ? "" : `${at + 12}px`;
    reading.style.right = right ? `${box.width - at + 12}px` : "";
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("click", () => { hide(); figure.classList.toggle("large"); });
}
