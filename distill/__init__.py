"""The draft: how it is built from a target, what it learns, and from which signal."""
