"""What the compiler makes of every kernel, for GPUs that need not be here: ``piper inspect``.

The launchers run on tensors without memory, their launches are recorded, and what would have been
launched is compiled: there is no second description of a kernel's arguments that could drift.
"""
