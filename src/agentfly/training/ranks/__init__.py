"""A run in several processes: what each rank of the learner does (`roles`), and who starts and watches them (`supervisor`)."""
