"""`retrieval_recall`: the share of the passages with the answer that the chain was shown.

It needs the field `gold_titles` or `gold_ids`, and the chain's `SearchEnv`. It does not score the answer: combine it with
`qa_exact_match` or `qa_f1`, and with `format`: `{"qa_f1" = 0.8, "retrieval_recall" = 0.1, "format" = 0.1}`.
"""

from __future__ import annotations

from ...errors import RewardError
from ...rewards.function import FunctionReward
from .env import SearchEnv
from .loaders import names_of


async def _retrieval_recall(library: SearchEnv, gold_titles: object = (), gold_ids: object = ()) -> float:
    """The share of the passages with the answer that the chain was shown."""
    titles, ids = names_of(gold_titles), names_of(gold_ids)
    if not titles and not ids:
        raise RewardError("reward 'retrieval_recall': the row names no passages; give it 'gold_titles' or 'gold_ids'")
    return await library.recall(titles, ids)


retrieval_recall = FunctionReward(_retrieval_recall, name="retrieval_recall")
