"use strict";
// Pointing at a chart shows the values of its curves. A click enlarges the chart to the width of the page.
for (const figure of document.querySelectorAll(".chart")) {
  const svg = figure.querySelector("svg");
  const curves = [...svg.querySelectorAll("polyline")].map(line => ({
    name: line.dataset.name, colour: line.getAttribute("class"),
    values: line.dataset.points.split(" ").map(point => point.split(",").map(Number)),
    positions: line.getAttribute("points").split(" ").map(point => point.split(",").map(Number)),
  }));
  if (!curves.length) continue;
  const rows = [...svg.querySelectorAll(".grid")].map(line => Number(line.getAttribute("y1")));
  const cursor = svg.querySelector(".grid").cloneNode();
  cursor.setAttribute("class", "cursor");
  const reading = document.createElement("div");
  reading.className = "reading";
  const hide = () => { cursor.remove(); reading.remove(); };
  svg.addEventListener("pointermove", event => {
    const { a: scale, e: left } = svg.getScreenCTM();  // column x of the drawing is at pixel left + scale * x
    const x = (event.clientX - left) / scale;
    const nearest = curves.map(curve => {
      const distance = position => Math.abs(position[0] - x);
      const index = curve.positions.reduce((best, position, i) => distance(position) < distance(curve.positions[best]) ? i : best, 0);
      return { curve, update: curve.values[index][0], value: curve.values[index][1], column: curve.positions[index][0] };
    });
    const first = nearest.reduce((best, item) => Math.abs(item.column - x) < Math.abs(best.column - x) ? item : best);
    const ends = { x1: first.column, x2: first.column, y1: Math.min(...rows), y2: Math.max(...rows) };
    for (const [name, value] of Object.entries(ends)) cursor.setAttribute(name, value);
    svg.append(cursor);
    const running = nearest.filter(({ curve }) => curve.values[0][0] <= first.update && first.update <= curve.values.at(-1)[0]);
    reading.replaceChildren(`update ${first.update.toLocaleString("en")}`, ...running.map(({ curve, value }) => {
      const row = document.createElement("div"), key = document.createElement("span");
      key.className = `key ${curve.colour}`;
      key.textContent = curve.name;
      row.append(key, ` ${value}`);
      return row;
    }));
    figure.append(reading);  // below the chart, so that it covers no curve
    const box = figure.getBoundingClientRect(), column = left + scale * first.column - box.left;
    const room = document.documentElement.clientWidth - box.left - reading.offsetWidth - 8;
    reading.style.left = `${Math.min(Math.max(0, column - reading.offsetWidth / 2), room)}px`;
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("click", () => { hide(); figure.classList.toggle("large"); });
}
