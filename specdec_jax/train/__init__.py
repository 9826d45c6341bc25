"""Training of language models: data, loss, optimiser and loop."""
