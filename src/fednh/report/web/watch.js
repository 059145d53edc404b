// The page of `fednh watch --web`: asks again and again how far the runs are, and draws the answer.
"use strict";

const COLOURS = ["#0077bb", "#e08a00", "#009e73", "#cc6699", "#33a6dd", "#d55e00", "#8a63c9", "#b59f00", "#8a8f98", "#a8506e"];
const WIDTH = 640, HEIGHT = 240, LEFT = 48, BOTTOM = 30, TOP = 10;
const byId = (id) => document.getElementById(id);

function add(parent, name, attributes = {}, text = "") {
  const space = parent.namespaceURI.endsWith("svg") || name === "svg" ? "http://www.w3.org/2000/svg" : parent.namespaceURI;
  const made = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text; // never markup: names of folders and errors come from elsewhere
  parent.append(made);
  return made;
}

function table(answer) {
  byId("head").replaceChildren();
  byId("runs").replaceChildren();
  const style = (column, text = "") => text.length > 40 ? "long" : (["state", "note"].includes(answer.columns[column]) ? "word" : "");
  answer.columns.forEach((name, column) => add(byId("head"), "th", { scope: "col", class: style(column) }, name));
  answer.runs.forEach((run, at) => {
    const row = add(byId("runs"), "tr", { "data-state": run.state });
    run.cells.forEach((text, column) => {
      const cell = add(row, "td", { class: style(column, text) });
      if (column === 0) add(add(cell, "svg", { width: 16, height: 10 }), "rect", { width: 10, height: 10, rx: 2, fill: COLOURS[at % COLOURS.length] });
      cell.append(text);
    });
  });
}

function curve(card, name, lines) {
  add(card, "h3", {}, name);
  const points = lines.flatMap((line) => line.points);
  const last = Math.max(...points.map((p) => p[0]), 2), values = points.map((p) => p[1]);
  let low = Math.min(...values), high = Math.max(...values);
  if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
  const x = (round) => LEFT + (round - 1) / (last - 1) * (WIDTH - LEFT - 10);
  const y = (value) => TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const picture = add(add(card, "figure"), "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${name} by round` });
  const small = { fill: "var(--muted)", "font-size": 12 };
  for (const value of [low, (low + high) / 2, high]) {
    add(picture, "line", { x1: LEFT, x2: WIDTH - 10, y1: y(value), y2: y(value), stroke: "var(--line)" });
    add(picture, "text", { ...small, x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, value.toPrecision(3));
  }
  for (const round of [1, last]) add(picture, "text", { ...small, x: x(round), y: HEIGHT - 8, "text-anchor": round === 1 ? "start" : "end" }, `round ${round}`);
  for (const line of lines) {
    const shared = { fill: "none", stroke: line.colour, "stroke-width": 2 };
    add(picture, "polyline", { ...shared, points: line.points.map((p) => `${x(p[0])},${y(p[1])}`).join(" ") });
    const [round, value] = line.points[line.points.length - 1];
    add(add(picture, "circle", { cx: x(round), cy: y(value), r: 3, fill: line.colour }), "title", {}, line.run);
  }
}

function curves(answer) {
  byId("curves").replaceChildren();
  for (const [key, name] of Object.entries(answer.metrics)) {
    const lines = answer.runs.map((run, at) => ({ run: run.cells[0], colour: COLOURS[at % COLOURS.length], points: run.curves[key] || [] }));
    curve(add(byId("curves"), "article", { class: "card", id: `curve-${key}` }), name, lines.filter((line) => line.points.length));
  }
}

async function look() {
  let wait = 2;
  try {
    const answer = await (await fetch("runs.json", { cache: "no-store" })).json();
    wait = answer.every;
    byId("said").textContent = answer.said;
    table(answer);
    curves(answer);
  } catch {
    byId("said").textContent = "fednh watch does not answer any more; what is shown is the last that it said.";
  }
  setTimeout(look, 1000 * wait);
}
look();
