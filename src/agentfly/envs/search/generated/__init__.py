"""Two generated corpora with questions that no model has memorised: an invented encyclopaedia, and a small world of people."""
