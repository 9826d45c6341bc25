"""Models, tokenizers and texts, from and to disk.

What cannot be read, written or used is a ValueError that names the file, what
is wrong and what is allowed.
"""
