"""SGLang's plugin contract, re-exported: importing this module imports SGLang."""

from __future__ import annotations

from sglang.kernels.plugin_kernels.amd.spec import (
    BACKEND,
    MONOKERNEL_API_VERSION,
    BuildContext,
    BuiltMonokernels,
    DeviceLimits,
    Feature,
    MonoSpec,
    Numerics,
    NumericsKind,
    Plan,
    Requirements,
    ShapeKey,
    register,
)

__all__ = [
    "BACKEND",
    "MONOKERNEL_API_VERSION",
    "BuildContext",
    "BuiltMonokernels",
    "DeviceLimits",
    "Feature",
    "MonoSpec",
    "Numerics",
    "NumericsKind",
    "Plan",
    "Requirements",
    "ShapeKey",
    "register",
]
