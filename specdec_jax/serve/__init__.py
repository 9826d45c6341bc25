"""Answers for others: files of prompts, and requests over HTTP."""
