"""Training a language model."""
