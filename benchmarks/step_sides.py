"""The parts of `step.py` that run in separate processes: prepare the weights, train with AgentFly, train with TRL.

In: a JSON file of settings, the same for both sides. Out: a JSON file, with one record for each step: seconds, chains, tokens,
reward, and seconds per phase. Both sides play the same tasks in the same order, with the same tools, chat template and limits.
The TRL side imports nothing of agentfly, so it can run in a separate environment.

    python benchmarks/step_sides.py {prepare,ours,trl} SETTINGS.json RESULT.json
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Settings = dict[str, Any]
Record = dict[str, Any]
VERSIONS = ("agentfly", "trl", "vllm", "torch", "transformers", "accelerate", "datasets", "triton")

HERMES = """{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.') }}
{%- if tools %}
{{- '\\n\\nYou may call these tools:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nTo call one, reply:\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function is defined else call %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""For models whose own template shows no tools (SmolLM2): ChatML with the calls of Hermes and Qwen."""


# ---- the tools: plain functions for TRL, coroutines of the same name and text for AgentFly ----------------------------------


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def subtract(a: float, b: float) -> float:
    """Subtract b from a.

    Args:
        a: first number
        b: second number
    """
    return a - b


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: first number
        b: second number
    """
    return a * b


FUNCTIONS = (add, subtract, multiply)


def __getattr__(name: str) -> Any:
    """`add_tool` and so on: the functions as tools of agentfly, which this module imports only if asked for them."""
    for function in FUNCTIONS:
        if name == f"{function.__name__}_tool":
            return _as_tool(function)
    raise AttributeError(name)


def _as_tool(function: Callable[[float, float], float]) -> Any:
    from agentfly import tool

    async def call(a: float, b: float) -> float:
        return function(a, b)

    call.__doc__ = function.__doc__
    return tool(call, name=function.__name__, register=False)


# ---- prepare: one folder of weights for both sides --------------------------------------------------------------------------


def prepare(settings: Settings) -> Record:
    """Write the model that both sides start from. Returns its size and the measured limits of the device."""
    import torch
    from gpu_models import measure_limits

    from agentfly.engines.local import load_model

    device, dtype = settings["device"], settings["dtype"]
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    model, tokenizer = load_model(settings["source"], device=device, dtype=dtype)
    size = model_size(model)
    if not shows_tools(tokenizer):
        tokenizer.chat_template = HERMES
    folder = Path(settings["model"])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    found: Record = {"size": size, "template": "own" if tokenizer.chat_template != HERMES else "hermes"}
    if settings["warm_start"]:
        found["warm_start"] = warm_start(settings, folder)
    limits = measure_limits(torch.device(device), getattr(torch, dtype))
    found["card"] = card(device)
    found["limits"] = {"copy_gb_per_s": limits.bytes_per_s / 1e9, "matmul_tflops": limits.flops_per_s / 1e12}
    return found


def card(device: str) -> str:
    import platform

    import torch

    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"CPU {platform.machine()}, {torch.get_num_threads()} thread(s)"


def model_size(model: Any) -> dict[str, int]:
    """Counts of weights: all, those of the layers, and those of the head (the table of embeddings itself if they are tied)."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    body = sum(weight.numel() for weight in model.parameters() if weight is not table and weight is not head)
    return {"weights": sum(weight.numel() for weight in model.parameters()), "body": body, "head": head.numel()}


def shows_tools(tokenizer: Any) -> bool:
    """Whether the chat template writes tools, calls in Hermes' format and their results."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "result-text"},
    ]
    schema = {"type": "function", "function": {"name": "add", "description": "description-text", "parameters": {}}}
    try:
        text = tokenizer.apply_chat_template(messages, tools=[schema], tokenize=False)
    except Exception:  # noqa: BLE001  templates raise what they like; any error means that tools cannot be shown
        return False
    return all(word in text for word in ("description-text", "result-text", "<tool_call>"))


def warm_start(settings: Settings, folder: Path) -> dict[str, float]:
    """Supervised steps on native dialogues, half of which go wrong, so that there is something left to learn."""
    import shutil

    import agentfly

    work = folder.parent
    demos, count = work / "demos.jsonl", min(1000, 32 + 16 * settings["warm_start"])
    demos.write_text("".join(json.dumps(row) + "\n" for row in native_demos(count, settings["seed"])), encoding="utf-8")
    tree = our_tree(settings)
    config = agentfly.Config.from_dict(
        {key: tree[key] for key in ("seed", "agent", "run")}
        | {
            "data": {"train": str(demos), "validation_count": 32},
            "rollout": {"num_tasks": 16},
            "train": {
                "steps": settings["warm_start"], "lr": 5e-5, "schedule": "cosine", "warmup_steps": settings["warm_start"] // 10,
                "validate_every": 0, "max_tokens_per_batch": 8192,
            },
        }
    )  # fmt: skip
    result = agentfly.sft(config)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    shutil.rmtree(folder)
    shutil.copytree(result.checkpoint, folder)
    if (folder / "chat_template.jinja").read_text(encoding="utf-8") != template:
        raise SystemExit("the warm start changed the chat template")
    return {"loss_before": result.before, "loss_after": result.after}


def native_demos(count: int, seed: int, mistakes: float = 0.5) -> list[Record]:
    from agentfly.pocket.demos import MISTAKES, Demo, DialogueWriter, guess_answer, plain_tools, train_problem, work_through

    rng = random.Random(f"step {seed}")
    rows = []
    for _ in range(count):
        problem = train_problem(rng, 2)
        demo = Demo([{"role": "user", "content": problem.question}])
        writer = DialogueWriter(demo, native=True)
        behaviour = rng.choice(MISTAKES) if rng.random() < mistakes else "good"
        if behaviour == "guess":
            guess_answer(rng, demo, writer, problem)
        else:
            work_through(rng, demo, writer, plain_tools(rng), problem, behaviour)
        rows.append({"messages": demo.messages})
    return rows


# ---- ours -------------------------------------------------------------------------------------------------------------------


def our_tree(settings: Settings) -> dict[str, Any]:
    """The config of the run, as tables."""
    rollout = {"num_tasks": settings["chains"] // settings["group"], "num_chains": settings["group"]}
    if settings["max_lag"]:
        rollout["max_lag"] = settings["max_lag"]
    return {
        "algorithm": "grpo",
        "seed": settings["seed"],
        "agent": {
            "kind": "tool",
            "model": settings["model"],
            "tools": [f"{Path(__file__).resolve()}:{function.__name__}_tool" for function in FUNCTIONS],
            "reward": "exact_match",
            "max_turns": settings["max_turns"],
            # TRL takes a call that it cannot read for the answer, so the chain ends there too.
            "on_invalid_call": "end",
            "engine": {"device": settings["device"], "dtype": settings["dtype"]},
        },
        "data": {"train": settings["tasks"], "validation": settings["one_task"], "shuffle": False},
        "sampling": {"temperature": 1.0, "max_tokens": settings["max_tokens"]},
        "rollout": rollout,
        "train": {
            "steps": settings["warmup"] + settings["steps"], "lr": settings["lr"],
            "max_tokens_per_batch": settings["max_tokens_per_batch"],
            "validate_every": 0, "validate_at_start": False, "save_every": 0, "save_every_s": 0,
        },
        "run": {"dir": settings["runs"]} | ({"threads": settings["threads"]} if settings["threads"] else {}),
    }  # fmt: skip


def ours(settings: Settings) -> Record:
    """Train through the public interface. Returns the records of all steps."""
    import agentfly
    from agentfly.config import apply_overrides, parse_override
    from agentfly.runs import RunDirectory, RunStore
    from agentfly.watch.progress import Progress

    class Clock(Progress):
        """Notes when the run begins and when each step ends."""

        def start(self) -> None:
            began.append((time.perf_counter(), time.process_time()))
            super().start()

        def step(self, step: int, metrics: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))
            walls.append(time.time())
            super().step(step, metrics)

    began: list[tuple[float, float]] = []
    ends: list[tuple[float, float]] = []
    walls: list[float] = []
    tree = apply_overrides(our_tree(settings), dict(map(parse_override, settings["set"])))
    config = agentfly.Config.from_dict(tree)
    result = agentfly.train(config, progress=Clock(config.train.steps))
    starts = [began[0], *ends]
    records = []
    with RunStore(RunDirectory.existing(result.directory).database, readonly=True) as store:
        for number, metrics in enumerate(result.history):
            chains = store.trajectories(step=number + 1, split="train", limit=2 * settings["chains"])
            records.append(
                {
                    "seconds": ends[number][0] - starts[number][0],
                    "cpu_s": ends[number][1] - starts[number][1],
                    "chains": len(chains),
                    "rollout_tokens_per_s": metrics["rollout/tokens_per_s"],
                    "reward": metrics["reward/mean"],
                    "calls": metrics["rollout/tool_calls"],
                    "optimizer_steps": metrics.get("train/optimizer_steps"),
                    "phases": {name: value for name, value in metrics.items() if name.startswith(("time/", "device/"))},
                    **our_tokens(chains),
                }
            )
    return {"records": records, "first_update_s": walls[0] - settings["launched"], "peak_gib": peak_gib(settings)}


def our_tokens(chains: Sequence[Any]) -> dict[str, int]:
    """Tokens of one step: sampled, of all prompts, and learned, with the prompt of a group counted once.

    A group whose rewards are all equal has no gradient and is not computed: its tokens are not learned.
    """
    groups: dict[str, list[Any]] = {}
    for chain in chains:
        groups.setdefault(chain.task.id, []).append(chain)
    learned = [group for group in groups.values() if len({chain.reward for chain in group}) > 1]
    rows = [turn for group in learned for chain in group for turn in chain.turns]
    return {
        "sampled": sum(len(turn.completion.token_ids) for chain in chains for turn in chain.turns),
        "prompts": sum(map(_prompt, chains)),
        "learned": sum(len(turn.context_ids) + len(turn.completion.token_ids) for turn in rows)
        - sum(_prompt(chain) for group in learned for chain in group[1:]),
        "learned_sampled": sum(len(turn.completion.token_ids) for turn in rows),
        "learned_groups": len(learned),
    }


def _prompt(chain: Any) -> int:
    return len(chain.turns[0].context_ids) if chain.turns else 0


# ---- TRL --------------------------------------------------------------------------------------------------------------------


class Stopwatch:
    """Adds up the seconds that methods of an object take, by phase; `take` returns them and starts again."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, method: str, phase: str, after: Callable[[Any], None] = lambda result: None) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = inner(*args, **kwargs)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
            after(result)
            return result

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        found, self.seconds = self.seconds, {}
        return found


def trl(settings: Settings) -> Record:
    """Train with TRL's GRPOTrainer and its own loop of tool calls. Returns the records of all steps."""
    for name in ("trl", *(["vllm"] if settings["sampler"] == "vllm" else [])):
        if importlib.util.find_spec(name) is None:
            return {"missing": f"{name} is not installed in {sys.executable}"}
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    tokenizer.response_template = qwen3_template  # reads Hermes' calls
    rows = [json.loads(line) for line in Path(settings["tasks"]).read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )
    records: list[Record] = []
    step: Record = {}
    watch = Stopwatch()

    def exact_match(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
        rewards = [float(final_answer(chain) == right.strip()) for chain, right in zip(completions, answer, strict=True)]
        step["reward"] = sum(rewards) / len(rewards)
        step["calls"] = sum(message["role"] == "tool" for chain in completions for message in chain) / len(rewards)
        return rewards

    def count(result: Any) -> None:
        step.update(trl_tokens(result[0], result[1], result[2], settings["group"]))

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.last, self.last_cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if settings["device"].startswith("cuda"):
                torch.cuda.synchronize()
            now, cpu = time.perf_counter(), time.process_time()
            phases = trl_phases(now - self.last, watch.take())
            speed = step["sampled"] / phases["time/rollout_s"]
            step.update(seconds=now - self.last, cpu_s=cpu - self.last_cpu, rollout_tokens_per_s=speed, phases=phases)
            records.append({**step, "wall": time.time()})
            step.clear()
            self.last, self.last_cpu = now, cpu

    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=exact_match,
        args=GRPOConfig(**trl_arguments(settings)),
        train_dataset=data,
        processing_class=tokenizer,
        tools=[_without_return(function) for function in FUNCTIONS],
        callbacks=[Steps()],
    )
    watch.wrap(trainer, "_generate", "generate", count)
    watch.wrap(trainer, "_generate_single_turn", "sample")
    watch.wrap(trainer, "_calculate_rewards", "rewards")
    watch.wrap(trainer, "_generate_and_score_completions", "score")
    if settings["sampler"] == "vllm":
        watch.wrap(trainer.vllm_generation, "sync_weights", "sync")
    trainer.train()
    first = records[0]["wall"] - settings["launched"]
    return {"records": records, "first_update_s": first, "peak_gib": peak_gib(settings)}


def trl_arguments(settings: Settings) -> dict[str, Any]:
    """TRL's defaults, except what makes it play the same task, and what makes it faster: no checkpointing, no logging."""
    cuda = settings["device"].startswith("cuda")
    turns, vllm = settings["max_turns"], settings["sampler"] == "vllm"
    return {
        "output_dir": settings["runs"],
        "per_device_train_batch_size": settings["trl_batch"],
        "gradient_accumulation_steps": settings["chains"] // settings["trl_batch"],
        "num_generations": settings["group"],
        "max_steps": settings["warmup"] + settings["steps"],
        "max_tool_calling_iterations": turns - 1,
        # The limit of one reply, as on our side; the limit of the whole chain leaves room for every turn.
        "generation_kwargs": {"max_tokens" if vllm else "max_new_tokens": settings["max_tokens"]},
        "max_completion_length": turns * settings["max_tokens"] + (turns - 1) * 64,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "bf16": cuda,
        "use_cpu": not cuda,
        "use_vllm": vllm,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "dataloader_pin_memory": cuda,
        "seed": settings["seed"],
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _without_return(function: Callable[..., Any]) -> Callable[..., Any]:
    """transformers writes the type of the result into a tool's schema, agentfly does not: prompts must be the same."""
    function.__annotations__.pop("return", None)
    return function


def final_answer(chain: Sequence[dict[str, Any]]) -> str | None:
    """The last reply of a chain; None if it is a call that was not answered, or a result without a reply."""
    last = chain[-1] if chain else {"role": "none"}
    return None if last["role"] != "assistant" or last.get("tool_calls") else str(last["content"]).strip()


def trl_tokens(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], group: int
) -> dict[str, int]:
    """As `our_tokens`, from what the trainer's `_generate` returns; a group's chains follow one another."""
    sampled, once = sum(map(sum, masks)), sum(len(prompt) for prompt in prompts[::group])
    return {
        "chains": len(completions),
        "sampled": sampled,
        "prompts": sum(map(len, prompts)),
        "learned": sum(map(len, completions)) + once,
        "learned_sampled": sampled,
        "learned_groups": len(prompts) // group,
    }


def trl_phases(seconds: float, found: dict[str, float]) -> dict[str, float]:
    """Phases by our names. Handing over the weights happens inside sampling and is taken out of it."""
    sync, generate, rewards = (found.get(name, 0.0) for name in ("sync", "generate", "rewards"))
    rollout = generate + rewards - sync
    return {
        "time/rollout_s": rollout,
        "time/sample_s": found.get("sample", 0.0) - sync,
        "time/handover_s": sync,
        "time/old_logprobs_s": found.get("score", 0.0) - generate - rewards,
        "time/learn_s": seconds - rollout - sync,
        "time/step_s": seconds,
    }


# ---- both -------------------------------------------------------------------------------------------------------------------


def peak_gib(settings: Settings) -> float | None:
    """The most memory that tensors of this process held; not known on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if settings["device"].startswith("cuda") else None


def versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main(argv: Sequence[str]) -> int:
    side, source, target = argv
    settings = json.loads(Path(source).read_text(encoding="utf-8"))
    result = {"prepare": prepare, "ours": ours, "trl": trl}[side](settings) | {"versions": versions()}
    Path(target).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
