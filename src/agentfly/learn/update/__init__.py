"""The parts of one update. Every rank runs them on its own micro batches.

    modules     policy, critic or value head, and reference; sharded if there are several ranks
    division    rows over ranks by their cost; the same number of micro batches on every rank
    scoring     micro batches, and passes without gradients
    objective   what the loss needs, and its terms on one micro batch
    gradients   forward and backward passes over the micro batches of a minibatch
    messages    the chains of one step as bytes, for the other ranks

`learner.PolicyLearner` puts them together.
"""
