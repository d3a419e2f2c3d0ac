// Held-out rewards by source: a curve for each value of a field of the tasks, where one divides them.
import { html, useMemo } from "./lib.js";
import { runApi, useData } from "./api.js";
import { go, runPath, setQuery } from "./router.js";
import { Card, Choice } from "./parts.js";
import { Chart } from "./chart.js";
import { align } from "./curves.js";
import { seriesColour, theme } from "./theme.js";
import { clean, num } from "./format.js";

/** Of how many chains the newest validation has a score, if not of all. */
function lost(points) {
  const [, , scored, all] = points.at(-1);
  return scored < all ? `, ${num(scored)} of ${num(all)} chains scored` : "";
}

/** Shows nothing if no field divides the held-out tasks. `validations`: how many there are; without any, nothing is asked. */
export function Sources({ run, validations, field }) {
  const { data } = useData(validations ? runApi(run, "sources") : null, { field });
  const sources = data?.sources ?? [];
  const table = useMemo(() => align(sources.map(({ points }) => ({ x: points.map((point) => point[0]), y: points.map((point) => point[1]) }))), [data]);
  const lines = useMemo(() => sources.map(({ value, tasks, points }, index) => ({ label: `${clean(value)} (${num(tasks)}${lost(points)})`, colour: seriesColour(index) })), [data, theme.value]);
  if (!sources.length) return null;
  const fields = data.fields.slice(0, 6).map((name) => [name, clean(name)]);
  return html`<${Card} title=${`Validation by ${clean(data.field)}`} note=${data.whole ? "Mean held-out reward of each value of this field of the tasks." : "Only the tasks that could be read in time."}
    tools=${fields.length > 1 && html`<${Choice} label="Field" value=${data.field} options=${fields} onPick=${(source) => setQuery({ source })} />`}>
    <${Chart} data=${table} lines=${lines} height=${170} onPick=${(step) => go(runPath(run, "steps", step))} /><//>`;
}
