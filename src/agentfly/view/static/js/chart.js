// Line charts with uPlot: one component, drawn again with the theme, resized with its box.
import uPlot from "../vendor/uplot.js";
import { html, useEffect, useRef } from "./lib.js";
import { num, seconds } from "./format.js";
import { css, theme } from "./theme.js";

const shared = uPlot.sync("charts");

/** `data` = [xs, ys...] (null: no point). `lines` = [{label, colour, dash, thin, points}], one for each ys.
 * `bands` = [[indexHigh, indexLow, colour], ...]. `onPick(x)` is called with the x of a clicked point. */
export function Chart({ data, lines, bands = [], height = 180, log = false, time = false, fixed = null, onPick, label }) {
  const box = useRef(null);
  const plot = useRef(null);
  const pick = useRef(onPick);
  pick.current = onPick;
  const look = JSON.stringify([lines, bands, height, log, time, fixed, theme.value]);
  useEffect(() => {
    const element = box.current; // the ref is empty again when the observer is told of the removal
    const made = new uPlot(options(), data, element);
    plot.current = made;
    const watcher = new ResizeObserver(() => element.clientWidth && made.setSize({ width: element.clientWidth, height }));
    watcher.observe(element);
    made.over.addEventListener("click", () => {
      const index = made.cursor.idx;
      if (index !== null && index !== undefined && pick.current) pick.current(made.data[0][index], index);
    });
    return () => {
      watcher.disconnect();
      plot.current = null;
      made.destroy();
    };
  }, [look]);
  useEffect(() => {
    if (plot.current && plot.current.data !== data) plot.current.setData(data);
  }, [data, look]);

  function options() {
    const grid = css("--line");
    const axis = { stroke: css("--faint"), font: `11px ${css("--font")}`, grid: { stroke: grid, width: 1 }, ticks: { show: false }, gap: 4 };
    const few = data[0].length <= 60;
    return {
      width: box.current.clientWidth || 300, height, padding: [8, 10, 0, 0],
      legend: { show: true, live: true, markers: { width: 0, fill: (plot, index) => lines[index - 1]?.colour } },
      cursor: { sync: { key: shared.key, setSeries: false }, points: { size: 7 }, drag: { x: true, y: false }, focus: { prox: 24 } },
      focus: { alpha: 0.35 },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, ...(fixed ? { range: fixed } : {}) } },
      axes: [
        { ...axis, size: 24, space: 60, values: (_, ticks) => ticks.map((tick) => (time ? seconds(tick) : num(tick))) },
        { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : num(tick, 3))) },
      ],
      series: [
        { label: time ? "time" : "step", value: (_, x) => (x === null ? "–" : time ? seconds(x) : num(x)) },
        ...lines.map((line) => ({
          label: line.label, stroke: line.colour, width: line.thin ? 1 : 1.75, dash: line.dash, spanGaps: true, show: line.show ?? true,
          alpha: line.alpha ?? 1, points: { show: line.points ?? few, size: 5, fill: line.colour },
          value: (_, y) => (y === null || y === undefined ? "–" : num(y)),
        })),
      ],
      // Without the pointer, the legend shows each line's newest value.
      hooks: { ready: [showNewest], setCursor: [showNewest], setData: [showNewest] },
      bands: bands.map(([high, low, fill]) => ({ series: [high + 1, low + 1], fill })),
    };
  }
  return html`<div class=${`chart ${onPick ? "pickable" : ""}`} ref=${box} role="img" aria-label=${label ?? lines.map((line) => line.label).join(", ")}></div>`;
}

function showNewest(plot) {
  if (plot.cursor.idx !== null && plot.cursor.idx !== undefined) return;
  const newest = plot.data.map((column) => {
    let index = column.length - 1;
    while (index > 0 && (column[index] === null || column[index] === undefined)) index -= 1;
    return index;
  });
  if (plot.data[0].length) plot.setLegend({ idxs: newest }, false);
}

/** A colour with its opacity as a CSS colour for canvases. */
export const faded = (colour, share) => `color-mix(in srgb, ${colour} ${Math.round(share * 100)}%, transparent)`;
