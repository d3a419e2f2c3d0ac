"""The learner over several ranks: one process per rank, each with a shard of the parameters and of the optimizer (FSDP2).

    environment   rank and size from the variables of torchrun                                    (no torch)
    group         the process group: commands of rank 0, sums, agreement about errors
    division      rows over ranks by their cost; the same number of micro batches on every rank
    messages      the chains of one step as bytes
    shard         modules and optimizers over the ranks, full tensors from shards and back
    files         one file of shards per rank; read by any number of ranks
    learner       `RankLearner`: rank 0 leads, `follow` runs on the other ranks

    rank 0      update ----> gather rows, send ----> score, credit, steps -----> metrics, errors
                               | command               | collectives
    ranks 1..   follow ----> receive ------------> score,         steps -----> wait for the next command

Every rank holds the flat tensors of all sampled tokens and runs the same code; only micro batches differ.
"""
