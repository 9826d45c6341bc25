"""Models, tokenizers and texts, from and to disk.

What cannot be read or written is a ValueError that names the file.
"""
