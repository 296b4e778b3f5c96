"""The model's mathematics in PyTorch: one short function a part, SGLang 0.5.23's rounding points and cache layouts.

It is the specification of the kernels and the oracle they are tested against. Values between two rounding points are
fp32; contractions are accumulated in fp64 and rounded once (`numerics.matmul`). Start with `step.step`.
"""
