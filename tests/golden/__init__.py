"""Golden files: what commands print, what names mean data, and files that users have on disk; docs/golden.md says how
they are used.
"""
