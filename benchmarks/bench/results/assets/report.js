// Draws the report of `baton bench` from the JSON in #data, which has all computed figures.
"use strict";

const report = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#2a7ae2", "#e2762a", "#2aa04a", "#a23bc4", "#c43b3b", "#777777"];
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
const AXIS = { stroke: isDark ? "#bbb" : "#444", grid: { stroke: isDark ? "#333" : "#eee" } };

function addText(parent, tag, text, className) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  parent.append(element);
  return element;
}

function addTable() {
  const table = document.getElementById("figures");
  for (const [index, cells] of report.table.entries()) {
    const row = document.createElement("tr");
    for (const [column, cell] of cells.entries()) {
      addText(row, index === 0 || column === 0 ? "th" : "td", cell);
    }
    table.append(row);
  }
}

// Joins the series of all sides, because uPlot needs one list of x values for all series.
function join(series) {
  return uPlot.join(series.map((each) => [each.x, each.y]));
}

function addPlot(plot) {
  const box = document.createElement("div");
  box.className = "plot";
  addText(box, "h2", plot.title);
  document.getElementById("plots").append(box);
  const isScatter = plot.kind === "points";
  const series = plot.series.map((each, index) => ({
    label: each.name,
    stroke: COLOURS[index % COLOURS.length],
    width: isScatter ? 0 : 2,
    paths: isScatter ? () => null : undefined,
    points: { show: isScatter, size: 5, fill: COLOURS[index % COLOURS.length] },
    spanGaps: !isScatter,
  }));
  const options = {
    width: box.clientWidth,
    height: 280,
    scales: {
      x: { time: false, distr: plot.is_log ? 3 : 1 },
      y: { range: (chart, low, high) => [0, Math.max(high * 1.05, 1e-9)] },
    },
    series: [{ label: plot.x_label }, ...series],
    axes: [
      { ...AXIS, label: plot.x_label },
      { ...AXIS, label: plot.y_label, size: 64 },
    ],
  };
  const chart = new uPlot(options, join(plot.series), box);
  addEventListener("resize", () => chart.setSize({ width: box.clientWidth, height: 280 }));
}

document.getElementById("about").textContent = report.about;
document.getElementById("client").textContent = report.client;
if (report.verdict) addText(document.getElementById("verdict"), "p", report.verdict, "verdict");
for (const warning of report.warnings) {
  addText(document.getElementById("warnings"), "p", warning, "warning");
}
addTable();
for (const plot of report.plots) {
  if (plot.series.some((each) => each.x.length)) addPlot(plot);
}
