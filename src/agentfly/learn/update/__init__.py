"""The parts of one update, for one process and for several ranks.

    modules     policy, critic or value head, and reference; sharded if there are several ranks
    division    rows over ranks by their cost; the same number of micro batches on every rank
    scoring     micro batches, and passes without gradients
    objective   what the loss needs, and its terms on one micro batch
    gradients   forward and backward passes over the micro batches of a minibatch
    messages    the chains of one step as bytes, for the other ranks
"""
