// A long list: rows of one height, of which only the visible ones are in the page.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./lib.js";
import { visibleRows } from "./layout.js";

/** `total` rows of `height` pixels. `row(index)` gives a row's content. `onRange(first, last, top)` is told which rows are drawn, and
 * which is at the top. `cursor`: the row that is kept in view. `reset`: scrolls to the beginning when it changes. `above`: how many
 * rows were put before the first one since then; what is visible stays in its place when it grows. */
export function VirtualList({ total, height, row, onRange, cursor = null, label, className = "", reset, above = 0 }) {
  const box = useRef(null);
  const before = useRef({ reset, above });
  const [view, setView] = useState({ top: 0, size: 600 });
  const { first, last } = visibleRows(view.top, view.size, height, total);
  useLayoutEffect(() => {
    const element = box.current;
    const measure = () => setView({ top: element.scrollTop, size: element.clientHeight });
    const watcher = new ResizeObserver(measure);
    watcher.observe(element);
    element.addEventListener("scroll", measure, { passive: true });
    measure();
    return () => {
      watcher.disconnect();
      element.removeEventListener("scroll", measure);
    };
  }, []);
  useLayoutEffect(() => {
    const element = box.current;
    element.scrollTop = before.current.reset === reset ? element.scrollTop + (above - before.current.above) * height : 0;
    before.current = { reset, above };
    setView({ top: element.scrollTop, size: element.clientHeight });
  }, [reset, above]);
  useEffect(() => {
    if (cursor === null) return;
    const element = box.current;
    if (cursor * height < element.scrollTop) element.scrollTop = cursor * height;
    else if ((cursor + 1) * height > element.scrollTop + element.clientHeight) element.scrollTop = (cursor + 1) * height - element.clientHeight;
  }, [cursor === null ? null : cursor - above]); // rows that are loaded above it do not move it
  const top = Math.round(view.top / height);
  useEffect(() => onRange?.(first, last, top), [first, last, top, total, above]);
  const rows = [];
  for (let index = first; index < last; index++) rows.push(html`<div key=${index - above} class="vrow" role="listitem" style=${{ top: `${index * height}px`, height: `${height}px` }}>${row(index)}</div>`);
  return html`<div class=${`vlist ${className}`} ref=${box} role="list" aria-label=${label} tabindex="0"><div class="vspace" style=${{ height: `${total * height}px` }}>${rows}</div></div>`;
}
