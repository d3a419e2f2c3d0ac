"""The invented worlds: facts that agree, articles that say them, questions that can be answered, splits that keep apart."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from agentfly.data import load_tasks
from agentfly.envs.search.env import SearchEnv
from agentfly.envs.search.generated.articles import encyclopaedia_passages, read_fact
from agentfly.envs.search.generated.easy import easy_passages, easy_world
from agentfly.envs.search.generated.questions import ASKS, DESCRIBED, all_questions
from agentfly.envs.search.generated.world import RELATIONS, SIZES, make_world
from agentfly.envs.search.solver import solve
from agentfly.envs.search.sources import Source, open_local
from agentfly.envs.search.tasks import easy_search, encyclopaedia
from agentfly.envs.task_sets import SPLITS
from agentfly.errors import ConfigError
from agentfly.types import Task


def test_the_world_is_the_same_for_the_same_seed_and_another_for_another():
    world = make_world(0)
    assert Counter(entity.kind for entity in world.values()) == SIZES
    again = make_world.__wrapped__(0)
    assert again == world
    assert not set(make_world(1)) & {name for name, entity in world.items() if entity.kind == "person"}


def test_every_fact_leads_where_its_relation_says():
    world = make_world(0)
    for entity in world.values():
        assert set(entity.facts) == set(RELATIONS[entity.kind])
        for relation, target in RELATIONS[entity.kind].items():
            if target:
                assert world[entity.facts[relation]].kind == target
                assert entity.facts[relation] != entity.name
    for region in (entity for entity in world.values() if entity.kind == "region"):
        assert world[region.facts["capital"]].facts["region"] == region.name
    for work in (entity for entity in world.values() if entity.kind == "work"):
        assert int(work.facts["year"]) > int(world[work.facts["author"]].facts["born"]) + 20


def test_every_fact_can_be_read_in_its_article_and_every_article_is_found_by_its_title():
    world, passages = make_world(0), encyclopaedia_passages(0)
    texts = {passage.title: passage.text for passage in passages}
    assert len(texts) == len(world) == len(passages)
    for entity in world.values():
        for relation, value in entity.facts.items():
            assert read_fact(entity.kind, entity.name, relation, texts[entity.name]) == value, texts[entity.name]
    found = open_local(Source("encyclopaedia")).find(list(world), 1)
    assert [hits[0].passage.title for hits in found] == list(world)


def test_articles_are_english_sentences():
    for passage in encyclopaedia_passages(0):
        assert "{" not in passage.text and "  " not in passage.text
        assert passage.text[0].isupper() and passage.text.endswith(".")
        assert not {" a engineer", " a astronomer", " a opera", " an painter"} & {
            passage.text[at : at + 11] for at in range(len(passage.text))
        }


def test_questions_of_one_and_two_hops_cover_every_relation_and_hide_their_answer():
    questions = all_questions(0)
    assert len({question.text for question in questions}) == len(questions) > 20_000
    assert {kind: set(relations) for kind, relations in RELATIONS.items()} == {kind: set(asks) for kind, asks in ASKS.items()}
    named = {kind: {name for name, target in relations.items() if target} for kind, relations in RELATIONS.items()}
    assert {kind: set(texts) for kind, texts in DESCRIBED.items()} == named
    assert {question.hops for question in questions} == {1, 2}
    for question in questions:
        assert question.answer not in question.text
        assert len(question.pages) == question.hops


def test_no_subject_is_asked_about_in_two_splits():
    seen: dict[str, str] = {}
    for split in SPLITS:
        for row in encyclopaedia(split, 300, seed=3):
            assert seen.setdefault(row["given"]["path"][0], split) == split
    assert encyclopaedia("train", 5) == encyclopaedia("train", 5) != encyclopaedia("train", 5, seed=1)


def test_the_people_of_the_small_world_know_only_those_of_their_split():
    world = easy_world(0)
    names = [set(people) for people in world.values()]
    assert not (names[0] & names[1] or names[1] & names[2] or names[0] & names[2])
    for people in world.values():
        for person in people.values():
            assert next(iter(person.facts.values())) in people
    assert len({passage.id for passage in easy_passages(0)}) == sum(map(len, names))


def play(tasks: list[Task], **options) -> list[tuple[str, float]]:
    async def main() -> list[tuple[str, float]]:
        env = SearchEnv(**options)
        try:
            found = []
            for task in tasks:
                await env.reset(task)
                answer = await solve(env, task)
                found.append((answer, await env.recall(task.fields["gold_titles"])))
            return found
        finally:
            await env.close()

    return asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"cut": 30}, {"top": 10}], ids=["usual", "short hits, pages are opened", "ten hits"])
def test_the_solver_answers_questions_of_every_kind_through_the_tools(options):
    some: dict[str, dict] = {}
    for row in encyclopaedia("train", 8000):
        some.setdefault(row["kind"], row)
    assert len(some) == len({question.kind for question in all_questions()})
    tasks = load_tasks([*some.values(), *encyclopaedia("test", 150)])
    assert play(tasks, **options) == [(task.fields["answer"], 1.0) for task in tasks]


def test_the_solver_answers_every_held_out_question_of_the_small_world():
    for split in ("validation", "test"):
        tasks = load_tasks(easy_search(split, 640))
        assert play(tasks) == [(task.fields["answer"], 1.0) for task in tasks]


def test_a_question_that_was_not_generated_has_no_solution():
    with pytest.raises(ConfigError, match="did not make"):
        play([Task("t", (), {"question": "?", "answer": "x"})])


def test_counts_and_splits_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="no split is called 'dev'"):
        encyclopaedia("dev")
    with pytest.raises(ConfigError, match="so count cannot be 0"):
        easy_search("test", 0)
    with pytest.raises(ConfigError, match="640 questions of the split 'test'"):
        easy_search("test", 641)
