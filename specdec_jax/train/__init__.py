"""Training and distilling drafts."""
