// The histogram of rewards, whose bars filter.
import { html } from "./lib.js";
import { bars } from "./layout.js";
import { count, num, percent } from "./format.js";

/** `low` and `high`: the chosen range, or null. `onPick(low, high, last)`: the last bar includes its upper end, others do not; nulls remove the range. */
export function Histogram({ data, low = null, high = null, onPick }) {
  const all = bars(data);
  if (!all.length) return html`<p class="note">No chain here has a reward.</p>`;
  const chosen = (bar) => low !== null && bar.low >= low - 1e-12 && bar.high <= high + 1e-12;
  return html`<div class="histogram" role="group" aria-label="Histogram of rewards">
    <div class="bars">${all.map((bar, index) => {
      const on = chosen(bar);
      const text = `${count(bar.count, "chain")} with a reward from ${num(bar.low, 3)} to ${num(bar.high, 3)}`;
      return html`<button key=${index} type="button" class="bar" aria-pressed=${on} title=${text} aria-label=${text} disabled=${!bar.count && !on}
          onClick=${() => (on ? onPick(null, null) : onPick(bar.low, bar.high, index === all.length - 1))}>
        <i style=${{ height: `${bar.count ? Math.max(2, bar.share * 100) : 0}%` }}></i></button>`;
    })}</div>
    <div class="bar-axis tnum"><span>${num(all[0].low, 3)}</span><span>reward${data.sampled < 1 ? `, estimated from ${percent(data.sampled)} of the chains` : ""}</span><span>${num(all[all.length - 1].high, 3)}</span></div>
  </div>`;
}
