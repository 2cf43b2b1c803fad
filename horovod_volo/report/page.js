"use strict";
// Shows the values under the pointer, and switches between light and dark. The page is complete without it.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.hidden = false;
  name();
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  system.addEventListener("change", name);

  const SVG = "http://www.w3.org/2000/svg";
  const places = (path) => Array.from(path.getAttribute("d").matchAll(/[ML]([-\d.]+) ([-\d.]+)/g), (m) => [+m[1], +m[2]]);

  for (const figure of document.querySelectorAll(".chart")) {
    const said = JSON.parse(figure.dataset.points);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    tip.setAttribute("aria-hidden", "true");
    figure.append(tip);
    for (const svg of figure.querySelectorAll("svg")) prepare(figure, svg, tip, said);
  }

  function prepare(figure, svg, tip, said) {
    const [left, top, right, bottom] = svg.querySelector(".grid").dataset.box.split(" ").map(Number);
    const curves = Array.from(svg.querySelectorAll(".curve"), places);
    const marks = document.createElementNS(SVG, "g");
    svg.append(marks);
    const hide = () => { tip.hidden = true; marks.replaceChildren(); };

    svg.addEventListener("pointermove", (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      if (at.x < left - 12 || at.x > right + 12 || at.y < top - 12 || at.y > bottom + 12) return hide();
      const found = curves.map((points) => nearest(points, at.x));
      const closest = Math.min(...found.map((index, n) => Math.abs(curves[n][index][0] - at.x)));
      const shown = found.flatMap((index, n) =>
        Math.abs(Math.abs(curves[n][index][0] - at.x) - closest) < 12 ? [[n, index]] : []);
      const x = curves[shown[0][0]][shown[0][1]][0];
      marks.replaceChildren(line(x, top, bottom), ...shown.map(([n, index]) => dot(curves[n][index], said.curves[n].color)));
      tip.replaceChildren(...words(shown, said));
      tip.hidden = false;
      place(figure, svg, tip, x, left, right);
    });
    svg.addEventListener("pointerleave", hide);
  }

  function nearest(points, x) {
    let best = 0;
    points.forEach((point, index) => { if (Math.abs(point[0] - x) < Math.abs(points[best][0] - x)) best = index; });
    return best;
  }

  function words(shown, said) {
    const head = document.createElement("b");
    head.textContent = `${said.across}: ${said.curves[shown[0][0]].x[shown[0][1]]}`;
    const rows = shown.map(([n, index]) => {
      const row = document.createElement("div");
      const swatch = document.createElement("i");
      row.className = `c${said.curves[n].color}`;
      row.append(swatch, `${said.curves[n].label} ${said.curves[n].y[index]}`.trim());
      return row;
    });
    return [head, ...rows];
  }

  function place(figure, svg, tip, x, left, right) {
    const box = svg.getBoundingClientRect();
    const outer = figure.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const isRight = x > (left + right) / 2;
    const at = box.left - outer.left + x * scale + (isRight ? -10 - tip.offsetWidth : 10);
    tip.style.left = `${Math.max(4, Math.min(at, outer.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${box.top - outer.top + 16}px`;
  }

  function line(x, top, bottom) {
    return drawn("line", { x1: x, x2: x, y1: top, y2: bottom, class: "cross" });
  }

  function dot([x, y], color) {
    return drawn("circle", { cx: x, cy: y, r: 4.5, class: `dot c${color}` });
  }

  function drawn(tag, attributes) {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }
})();
