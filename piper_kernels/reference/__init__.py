"""The oracle: every op in plain torch, one obvious loop each, any dtype, autograd by torch.

These functions state what an op means. They have the names and signatures of ``functional/`` and
are written to be read and trusted, not to be fast.
"""
