"""The JSON of the dashboard. GET only; a run is addressed by its name in the list, URL-encoded (a name may hold slashes).

An error is {"error": sentence} with status 400 (a wrong request), 404 (no such run or chain), 503 (a query of more than two
seconds, or a store that cannot be read). A parameter that is absent or empty is not set; an unknown one is an error. A number
that is not finite is null. Times are Unix seconds. `?` marks what may be null.

    /api/runs    [{name, state?: "running" "finished" "stopped" "dead", kind: "train" "eval" "sft", model?, world?, algorithm?,
                   seed?, step?, total_steps?, chains, reward?, spark: [number?], first_validation?, best_validation?,
                   last_validation?, started?, updated?, age_s?, format?, error?, problem?}]           the newest write first
    /api/runs/N                 {name, state, format, meta: {...}, config: {...nested}, step?, total_steps?, chains,
                                 metrics: [{name, group, description, unit}], splits: [str], outcomes: [str], tools: [str],
                                 checkpoints: [{name, step}], sorts: [str], live: {name: {t, data}}}
    /api/runs/N/series?names=a,b&after=STEP         {a: [[step, time?, value?], ...], b: [...]}
    /api/runs/N/steps?after=STEP      {quantiles: [0, 0.1, ...], steps: [{step, split, chains, scored, outcomes: {name: count},
                                       mean?, quantiles: [number], started?, ended?, phase?, whole}]}
    /api/runs/N/chains?FILTER&sort=&cursor=&limit=&count=   {rows: [ROW], next?: cursor, total?: int, exact: bool}
        FILTER   step, step_low, step_high, split, task, draw, outcome, tool, low, high, below (rewards: low <= r <= high, r < below),
                 min_tokens, max_tokens, min_turns, max_turns, trained=0|1, failed=0|1, q (text), in=body (q in whole chains)
        sort     one of `sorts` of the run, "-" in front: from the largest; "-added" if not given.  limit: 1 to 1000, else 100
        count    0: do not count (total is null).  exact false: there are at least `total`
        ROW      {key, id, step, split, task_id, draw, chain, outcome, reward?, total_reward?, score?, components: {name: number},
                  prediction, num_turns, num_tokens, seconds, num_context?, num_calls?, num_invalid?, version_first?,
                  version_last?, generate_s?, tool_s?, wait_s?, started?, error?, advantage?, num_trained?}
    /api/runs/N/histogram?FILTER&bins=20            {edges: [bins + 1], counts: [bins], sampled}    rewards of scored chains
    /api/runs/N/groups?step=&split=train            [{step, task_id, draw, chains, scored, mean?, low?, high?, spread?,
                                                      num_trained?, teaches: bool}]
    /api/runs/N/group?step=&task=&draw=&split=      {task: TASK?, siblings: [ROW], turns: [[TURN? per sibling] per turn],
                                                     differences: [null, DIFFERENCE? per further sibling], note?}
        DIFFERENCE   to the first sibling: {turn, part: "reply" "context", token?, char?, ids: [id?, id?], pieces: [str?, str?]}
    /api/runs/N/chain/ID      {summary: ROW, task: TASK, messages: [MESSAGE], turns: [TURN], untrained?: sentence,
                               times: {started?, seconds, waited_s, scored_s}, siblings: [{id, chain, score?, outcome}]}
        TASK         {id, messages: [MESSAGE], fields: {...}}
        MESSAGE      {role, content, name?, tool_calls: [CALL], images: int}
        CALL         {name, arguments: {...}, id, error?}
        TURN         {turn, message?: index of its reply in messages, text, stop: "stop" "length", calls: [CALL],
                      results: [{observation, reward?, done, error?, image: bool}], reward, restarts, num_context, num_tokens,
                      versions?: [first, last], logprob?: sum, began_s, generate_s, tools_s, calls_s: [number]}
    /api/runs/N/chain/ID/tokens   {note?: why there are no pieces, tokenizer: where it is from, num_tokens: sampled,
                                   series: [names of the lists below], rows: [TOKENS]}
        TOKENS       one per training row: {turns: [{turn, start, sampled, end}], ids: [int], mask: [0|1], pieces?: [str],
                      logprob, version, and those of advantage, trainer_logprob, entropy, trained, ... in `series`: [value?]}
                     A turn's context is start..sampled, its reply sampled..end. Values are null where mask is 0.
    /api/runs/N/envs?since=TIME&points=500    {pools: {kind: {figure: [[t, value?]]}}, steps: {kind: {figure: [[step, value?]]}},
                     tools: [{name, calls, errors, p50_s?, p95_s?, max_s?}], live: {name: {t, data}},
                     events: [{key, t, step?, kind, who?, data}]}
    /api/runs/N/events?after=KEY&kind=&limit=   [{key, t, step?, kind, who?, data}]       oldest first
    /api/runs/N/checks        {state, warnings: [{name, level: "red" "yellow", text, tips: [str], evidence: [[metric, value]],
                               step}], checks: [{name, promise, ok, failed: int, steps: int, value?, bound?, step,
                               history: [[step, ok, value?, bound?]]}], time: TIME?}
        TIME         {steps, total_s, parts: [{name, label, seconds, share, description}], by_step: [[step, {name: seconds}]]}
    /api/runs/N/config        {text: the file, config: {...nested}}
    /api/compare?runs=a,b     {runs: [{name, state, ...as in /api/runs}], config: [{key, values: [value? per run]}],
                               results: [{metric, values: [number? per run]}], pairs: [PAIR], tasks: [{task_id, values: [..]}]}
        PAIR         the second run against the first: {a, b, tasks, mean_a?, mean_b?, difference?, low?, high?, p?, wins, losses, ties}
    /api/runs/N/export?FILTER&format=jsonl    a file, one trajectory per line
    /api/changes              events: data: {"run": name, "version": int}
    /api/chat ...             see `chat_api`
"""
