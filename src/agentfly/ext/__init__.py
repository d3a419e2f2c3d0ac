"""Ray, which starts processes on the nodes of a cluster: the trainer's side and the node's."""
