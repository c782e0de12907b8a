"""Differentiable ops. Each picks triton, cpu or reference and can say why."""
