"""The parts of a :class:`piper_kernels.PiperMoE`: router, experts, shared experts.

A part is made around parameters that exist, so a layer can take over the parameter objects of
another model; ``build`` makes new ones.
"""
