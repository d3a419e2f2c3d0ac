"""The JSON of the dashboard. GET only; a run is addressed by its name in the list, URL-encoded (a name may hold slashes).

An error is {"error": sentence} with status 400 (a wrong request), 404 (no such run or chain), 503 (a query of more than two
seconds, or a store that cannot be read). A parameter that is absent or empty is not set; an unknown one is an error. A number
that is not finite is null. Times are Unix seconds. `?` marks what may be null.

    /api/runs    [{name, state?: "running" "finished" "stopped" "dead", kind: "train" "eval" "sft", model?, world?, algorithm?,
                   seed?, step?, total_steps?, chains, reward?, spark: [number?], first_validation?, best_validation?,
                   last_validation?, unscored?, started?, updated?, age_s?, error?, problem?}]           the newest write first
    /api/runs/N                 {name, state, meta: {...}, config: {...nested}, model?, world?, algorithm?, step?,
                                 total_steps?, chains, chains_per_step?, metrics: [{name, group, description, unit}],
                                 splits: [str], outcomes: [str], tools: [str], checkpoints: [{name, step}], sorts: [str],
                                 live: LIVE}
    /api/runs/N/series?names=a,b&after=STEP         {a: [[step, time?, value?], ...], b: [...]}
    /api/runs/N/steps?after=STEP      {quantiles: [0, 0.1, ...], steps: [{step, split, chains, scored, outcomes: {name: count},
                                       mean?, quantiles: [number], started?, ended?, phase?, whole}]}
    /api/runs/N/chains?FILTER&sort=&cursor=&offset=&at=&limit=&count=   {rows: [ROW], first?: number of the first row, from 0,
                                                                        next?: cursor, total?: int, exact: bool}
        FILTER   step, step_low, step_high, split, task, draw, outcome, tool, low, high, below (of the reward: low <=
                 r <= high, r < below), min_tokens, max_tokens, min_turns, max_turns, trained=0|1,
                 failed=0|1, q (text), in=body (q in whole chains)
        sort     one of `sorts` of the run, "-" in front: from the largest; "-added" if not given.  limit: 1 to 1000, else 100
        start    one of cursor (`next` of the page before), offset (rows to skip) and at (id of a chain); else the beginning
        count    0: do not count (total is null).  exact false: there are at least `total`
        ROW      {key, id, step, split, task_id, draw, chain, outcome, reward?, total_reward?, score?, components: {name:
                  number}, prediction, num_turns, num_tokens, seconds, num_context?, num_calls?, num_invalid?, version_first?,
                  version_last?, generate_s?, tool_s?, wait_s?, started?, error?, advantage?, num_trained?}
    /api/runs/N/histogram?FILTER&bins=20            {edges: [bins + 1], counts: [bins], sampled}    rewards of scored chains
    /api/runs/N/groups?step=&split=train            [{step, task_id, draw, chains, scored, mean?, low?, high?, spread?,
                                                      num_trained?, teaches: bool}]
    /api/runs/N/group?step=&task=&draw=&split=      {task: TASK?, siblings: [ROW], turns: [[TURN? per sibling] per turn],
                                                     differences: [null, DIFFERENCE? per further sibling], note?}
        DIFFERENCE   to the first sibling: {turn, part: "reply" "context", token?, char?, ids: [id?, id?], pieces: [str?, str?]}
    /api/runs/N/chain/ID      {summary: ROW, task: TASK, messages: [MESSAGE], turns: [TURN], untrained?: sentence,
                               times: {started?, seconds, waited_s, scored_s}, siblings: [{id, chain, score?, outcome}],
                               honesty: {unknown_tools: int, bad_arguments: int, written?: int, unsupported?: bool}}
        TASK         {id, messages: [MESSAGE], fields: {...}}
        MESSAGE      {role, content, name?, tool_calls: [CALL], images: int}
        CALL         {name, arguments: {...}, id, error?}
        TURN         {turn, message?: index of its reply in messages, text, stop: "stop" "length", calls: [CALL],
                      results: [{observation, reward?, done, error?, image: bool}], reward, state, restarts,
                      why: its row began, num_context, num_tokens, versions?: [first, last], logprob?: sum, began_s,
                      generate_s, tools_s, calls_s: [number]}
    /api/runs/N/chain/ID/tokens   {note?: why there are no pieces, tokenizer: where it is from, num_tokens: sampled,
                                   series: [names of the lists below], rows: [TOKENS]}
        TOKENS       one per training row: {turns: [{turn, start, sampled, end}], ids: [int], mask: [0|1], pieces?: [str],
                      logprob, version, and those of advantage, trainer_logprob, entropy, trained, ... in `series`: [value?]}
                     A turn's context is start..sampled, its reply sampled..end. Values are null where mask is 0.
    /api/runs/N/envs?since=TIME&points=500    {pools: {kind: {figure: [[t, value?]]}}, chains: {phase: [[t, value?]]},
                     others: {name: [[t, value?]]}, steps: {kind: {figure: [[step, value?]]}},
                     tools: [{name, calls, errors, p50_s?, p95_s?, max_s?}], live: LIVE, events: [EVENT],
                     limits: [{limit, count, chains: int, tools: [str], newest: [id], step?, since?: first counted step}],
                     nodes: [{node, figures: {samplers, env_hosts, chains, cpus: [[step or t, value?]]}}],
                     failures: [{error, count, chain: id, step, outcome}] of the newest 500 failed chains}
        figure       allocated, idle, warming, closing, waiting, started, recycled, failed, reaped, acquire_p95_s, ...
        phase        running (all), environment, sampling, tools, scoring
        LIVE         {chains?: {t, data: [{id, task, turn, phase, tools: [str], seconds}]},
                      leases?: {t, data: [{chain: id, kind, task?, turn?, phase?}]}}     what the run last said about now
        EVENT        {key, t, step?, kind, who?, data: {...}}; kind: phase, chain_started, chain_ended, chain_failed, note,
                     stopped, check_failed, sandbox_limit, environment_failed, environment_recycled, environment_reaped
    /api/runs/N/events?after=KEY&kind=&limit=   [EVENT]       oldest first
    /api/runs/N/checks        {state, warnings: [{name, level: "red" "yellow", text, tips: [str], evidence: [[metric, value]],
                               step}], checks: [{name, promise, ok, failed: int, steps: int, value?, bound?, step,
                               history: [[step, ok, value?, bound?]]}], time: TIME?}
        TIME         {steps, total_s, busy_share?, parts: [{name: metric or "other", label, description, seconds, share}], the
                      largest first, beside: [{name, label, description, seconds}], slowest: [{step, seconds, times_median,
                      reason}], by_step: [[step, {name: seconds}]]}
    /api/runs/N/sources?field=    {fields: [names of task fields that divide the held-out tasks], field?: the one that was used,
                               whole: bool, sources: [{value, tasks, points: [[step, mean reward, scored chains, chains]]}]}
    /api/runs/N/config        {text: the file, config: {...nested}}
    /api/compare?runs=a,b     {runs: [{name, state, ...as in /api/runs}], config: [{key, values: [value? per run]}],
                               results: [{metric, values: [number? per run]}], pairs: [PAIR per further run],
                               tasks: [{task_id, values: [mean reward per run], chains: [id per run]}]}    held out by all
        PAIR         against the first run: {a, b, error?, measure: "success", steps: [int?, int?], held: [int, int], scored:
                      [[scored chains, all chains] per run], bounds: [least, largest difference]? if many have no score,
                      tasks: int in both}; if tasks > 0 also {mean_a, mean_b, difference, low, high (95 %), p, p_sign, wins,
                      losses, ties, verdict: sentence}
    /api/runs/N/export?FILTER&format=jsonl    a file, one trajectory per line
    /api/changes              events: data: {"run": name, "version": int}
    /api/chat ...             see `chat_api`
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..errors import ConfigError
from ..runs.catalog import describe_config, read_config
from ..runs.codec import to_json
from ..runs.directory import RunDirectory
from ..runs.filters import SORTS, ChainFilter
from ..runs.query import RunReader
from ..runs.rows import QUANTILES, Count
from ..watch.metrics import describe, unknown
from .answers import MAX_LIMIT, EventStream, Parameters, answer, dumps, summary_json
from .chains import chain_json, group_json, open_tokenizer, tokens_json
from .compare import compare_json
from .health import checks_json, environments_json, live_json
from .library import Library, NotFound
from .live import LibraryWatcher
from .sources import sources_json

FILTER = (
    "step", "step_low", "step_high", "split", "task", "draw", "outcome", "tool", "low", "high", "below", "min_tokens",
    "max_tokens", "min_turns", "max_turns", "trained", "failed", "q", "in",
)  # fmt: skip
MAX_SIBLINGS = 64
MAX_COMPARED = 8
EXPORT_BATCH = 100
COUNT_S = 0.15

Handler = Callable[[Request], Awaitable[Response]]


def routes(library: Library, changes: LibraryWatcher) -> list[Route]:
    """The routes of the API but for conversations. The longer path of a run comes before the shorter."""
    run = _RunRoutes(library)

    async def runs(request: Request) -> Response:
        Parameters(request, ())
        return answer([summary_json(each) for each in await library.call(library.summaries)])

    async def compared(request: Request) -> Response:
        names = [_named(library, name) for name in Parameters(request, ("runs",)).names("runs", MAX_COMPARED)]
        if len(names) < 2:
            raise ConfigError("compare takes two or more runs: runs=a,b")
        return answer(await library.call(lambda: compare_json(library, names)))

    async def moved(request: Request) -> Response:
        Parameters(request, ())
        if changes.is_full:
            return answer({"error": "too many pages listen for changes: close some"}, 503)
        return EventStream(changes.listen())

    name = "/api/runs/{name:path}"
    return [
        Route("/api/runs", runs),
        Route("/api/compare", compared),
        Route("/api/changes", moved),
        Route(f"{name}/chain/{{id:path}}/tokens", run.tokens),
        Route(f"{name}/chain/{{id:path}}", run.chain),
        *(Route(f"{name}/{part}", getattr(run, part)) for part in _RunRoutes.PARTS),
        Route(name, run.about),
    ]


def _named(library: Library, name: str) -> str:
    """A run's name, which a page may have encoded once more because names may hold commas."""
    return name if name in library.scan() else unquote(name)


class _RunRoutes:
    """The handlers of one run. Each reads its parameters, then asks a reader in a thread."""

    PARTS = (
        "series", "steps", "chains", "histogram", "groups", "group", "envs", "events", "checks", "sources", "config", "export",
    )  # fmt: skip

    def __init__(self, library: Library) -> None:
        self._library = library

    async def _ask(self, request: Request, question: Callable[[RunReader], Any]) -> Response:
        # Written as JSON in the thread as well: the tokens of a long chain take a tenth of a second.
        data = await self._library.ask(request.path_params["name"], lambda reader: dumps(question(reader)))
        return Response(data, media_type="application/json")

    async def about(self, request: Request) -> Response:
        Parameters(request, ())
        name = request.path_params["name"]
        return await self._ask(request, lambda reader: about_json(reader, name))

    async def series(self, request: Request) -> Response:
        given = Parameters(request, ("names", "after"))
        names, after = given.names("names"), given.integer("after")
        return await self._ask(request, lambda reader: reader.series(names, after))

    async def steps(self, request: Request) -> Response:
        after = Parameters(request, ("after",)).integer("after")
        return await self._ask(request, lambda reader: {"quantiles": QUANTILES, "steps": reader.outcomes_by_step(after)})

    async def chains(self, request: Request) -> Response:
        given = Parameters(request, (*FILTER, "sort", "cursor", "offset", "at", "limit", "count"))
        chosen, limit = chain_filter(given), given.integer("limit", 1, MAX_LIMIT) or 100
        sort, cursor, counts = given.text("sort") or "-added", given.text("cursor"), given.flag("count") is not False
        offset, at = given.integer("offset", 0), given.text("at")
        if sum(start is not None for start in (cursor, offset, at)) > 1:
            raise ConfigError("a list starts at one place: give cursor, offset or at")

        def list_them(reader: RunReader) -> dict[str, Any]:
            first, passed = start_of(reader, chosen, sort, cursor, offset, at)
            rows, following = reader.page(chosen, sort, cursor, limit, passed)
            total: Count | None = None
            if counts:
                whole = cursor is None and following is None and not passed
                total = Count(len(rows), True) if whole else quick_count(reader, chosen)
            return {
                "rows": rows,
                "first": first,
                "next": following,
                "total": None if total is None else total.value,
                "exact": total is not None and total.exact,
            }

        return await self._ask(request, list_them)

    async def histogram(self, request: Request) -> Response:
        given = Parameters(request, (*FILTER, "bins"))
        chosen, bins = chain_filter(given), given.integer("bins", 1, 200) or 20
        return await self._ask(request, lambda reader: reader.histogram(chosen, bins))

    async def groups(self, request: Request) -> Response:
        given = Parameters(request, ("step", "split"))
        step, split = _step(given), given.text("split") or "train"
        return await self._ask(request, lambda reader: reader.groups(step, split))

    async def group(self, request: Request) -> Response:
        given = Parameters(request, ("step", "task", "draw", "split"))
        step, task, draw, split = _step(given), given.required("task"), given.integer("draw"), given.text("split") or "train"

        def compare_siblings(reader: RunReader) -> dict[str, Any]:
            rows = reader.group(step, task, draw, split)
            if not rows:
                raise NotFound(f"step {step} has no {split} chain of the task {task[:200]!r}")
            rows = [row for row in rows if row.draw == rows[0].draw]  # another draw of the task is another group
            shown = rows[:MAX_SIBLINGS]
            decoder, _, note = open_tokenizer(reader.path.parent)
            if len(rows) > len(shown):
                note = f"{len(shown)} of {len(rows)} chains are shown"
            return {**group_json(shown, [reader.trajectory(row.id) for row in shown], decoder), "note": note}

        return await self._ask(request, compare_siblings)

    async def chain(self, request: Request) -> Response:
        Parameters(request, ())
        wanted = request.path_params["id"]
        return await self._ask(request, lambda reader: chain_json(reader, _known(reader, wanted)))

    async def tokens(self, request: Request) -> Response:
        Parameters(request, ())
        wanted = request.path_params["id"]

        def show(reader: RunReader) -> dict[str, Any]:
            chain = _known(reader, wanted)
            decoder, where, note = open_tokenizer(reader.path.parent)
            rows = tokens_json(reader.trajectory(chain), reader.token_series(chain), decoder)
            return {"note": note, "tokenizer": where, **rows}

        return await self._ask(request, show)

    async def envs(self, request: Request) -> Response:
        given = Parameters(request, ("since", "points"))
        since, points = given.real("since"), given.integer("points", 10, 5000) or 500
        return await self._ask(request, lambda reader: environments_json(reader, since, points))

    async def events(self, request: Request) -> Response:
        given = Parameters(request, ("after", "kind", "limit"))
        after, kind, limit = given.integer("after") or 0, given.text("kind"), given.integer("limit", 1, MAX_LIMIT) or 200
        return await self._ask(request, lambda reader: reader.events(after, kind, limit))

    async def checks(self, request: Request) -> Response:
        Parameters(request, ())
        return await self._ask(request, checks_json)

    async def sources(self, request: Request) -> Response:
        field = Parameters(request, ("field",)).text("field")
        return await self._ask(request, lambda reader: sources_json(reader, field))

    async def config(self, request: Request) -> Response:
        Parameters(request, ())
        folder = self._library.find(request.path_params["name"])
        return answer(await self._library.call(lambda: config_json(folder)))

    async def export(self, request: Request) -> Response:
        given = Parameters(request, (*FILTER, "format"))
        chosen, name = chain_filter(given), request.path_params["name"]
        if (kind := given.text("format") or "jsonl") != "jsonl":
            raise ConfigError(f"the dashboard exports jsonl, not {kind[:40]!r}; `agentfly export` writes other formats")
        self._library.find(name)
        safe = "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in name)
        return StreamingResponse(
            self._lines(name, chosen),
            media_type="application/x-ndjson",
            headers={"content-disposition": f'attachment; filename="{safe.encode("ascii", "replace").decode()}.jsonl"'},
        )

    async def _lines(self, name: str, chosen: ChainFilter) -> AsyncIterator[bytes]:
        """Trajectories as `export_jsonl` writes them, in batches: no read stays open while the browser is slow."""
        cursor: str | None = None

        def batch(reader: RunReader) -> tuple[bytes, str | None]:
            rows, following = reader.page(chosen, "added", cursor, EXPORT_BATCH)
            lines = []
            for row in rows:
                trajectory = reader.trajectory(row.id)
                head = {"step": row.step, "split": row.split, "total_reward": trajectory.total_reward}
                lines.append(json.dumps({**head, **to_json(trajectory)}) + "\n")
            return "".join(lines).encode(), following

        while True:
            lines, cursor = await self._library.ask(name, batch)
            yield lines
            if cursor is None:
                return


def start_of(
    reader: RunReader, chosen: ChainFilter, sort: str, cursor: str | None, offset: int | None, at: str | None
) -> tuple[int | None, int]:
    """The number of the first row of a page (None if a cursor was given), and the rows to pass over.

    Raises NotFound for an unknown chain.
    """
    if cursor is not None:
        return None, 0
    if at is not None:
        offset = reader.place_of(_known(reader, at), chosen, sort)
        if offset is None:
            raise NotFound(f"the filter leaves out the chain {at[:200]!r}: clear it to go there")
    return offset or 0, offset or 0


def quick_count(reader: RunReader, chosen: ChainFilter) -> Count:
    """The number of chains that match, as far as it is counted in COUNT_S: a list must not wait for it."""
    allowed, reader.timeout_s = reader.timeout_s, COUNT_S
    try:
        return reader.count(chosen)
    finally:
        reader.timeout_s = allowed


def _step(given: Parameters) -> int:
    step = given.integer("step")
    if step is None:
        raise ConfigError("the parameter 'step' is missing")
    return step


def _known(reader: RunReader, wanted: str) -> str:
    """The id of a stored chain. Raises NotFound."""
    try:
        return reader.row(wanted).id
    except ConfigError as error:
        raise NotFound(f"the run has no chain {wanted[:200]!r}") from error


def chain_filter(given: Parameters) -> ChainFilter:
    """The filter that the parameters of FILTER describe."""
    where = given.text("in")
    if where not in (None, "body"):
        raise ConfigError(f"in is body, or not given; not {where[:40]!r}")
    return ChainFilter(
        step=given.integer("step"),
        step_low=given.integer("step_low"),
        step_high=given.integer("step_high"),
        split=given.text("split"),
        task_id=given.text("task"),
        draw=given.integer("draw"),
        outcome=given.text("outcome"),
        tool=given.text("tool"),
        reward_low=given.real("low"),
        reward_high=given.real("high"),
        reward_below=given.real("below"),
        min_tokens=given.integer("min_tokens"),
        max_tokens=given.integer("max_tokens"),
        min_turns=given.integer("min_turns"),
        max_turns=given.integer("max_turns"),
        trained=given.flag("trained"),
        failed=given.flag("failed"),
        text=given.text("q"),
        in_body=where == "body",
    )


def about_json(reader: RunReader, name: str) -> dict[str, Any]:
    """What every page of a run needs."""
    folder, meta = reader.path.parent, reader.meta()
    config = read_config(folder)
    described = describe_config(config, folder.name)
    checkpoints = RunDirectory(folder).saved_steps()
    rollout = config.get("rollout")
    rollout = rollout if isinstance(rollout, dict) else {}
    return {
        "name": name,
        "state": reader.state(),
        "meta": meta,
        "config": config,
        **{key: meta.get(key) or described[key] for key in ("model", "world", "algorithm", "total_steps")},
        "step": reader.last_step(),
        "chains": reader.num_chains(),
        "chains_per_step": rollout.get("num_tasks", 8) * rollout.get("num_chains", 8) if config else None,
        "metrics": [metric_json(each) for each in reader.metric_names()],
        "splits": reader.values("split"),
        "outcomes": reader.values("outcome"),
        "tools": reader.tool_names(),
        "checkpoints": [{"name": f"step-{step:06d}", "step": step} for step in checkpoints],
        "sorts": list(SORTS),
        "live": live_json(reader),
    }


def metric_json(name: str) -> dict[str, Any]:
    """A metric with its meaning; one that the table does not have comes from a user's reward or tool."""
    row = None if unknown([name]) else describe(name)
    return {
        "name": name,
        "group": name.partition("/")[0],
        "description": "" if row is None else row.description,
        "unit": "" if row is None else row.unit,
    }


def config_json(folder: Path) -> dict[str, Any]:
    """The config file of a run as text and as a tree."""
    try:
        text = (folder / "config.toml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return {"text": text, "config": read_config(folder)}
