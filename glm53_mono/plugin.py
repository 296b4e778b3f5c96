"""The entry point that SGLang calls in each of its processes."""

from glm53_mono.geometry import ARCHITECTURE

SPEC_PATH = "glm53_mono.spec:SPEC"
"""Where SGLang finds the spec, if a server asks for it."""


def register() -> None:
    """Tell SGLang where the spec lies; nothing of it is imported before a server asks for the monokernel.

    Raises:
        ValueError: another plugin has registered a spec for this architecture.
    """
    from glm53_mono.upstream import monokernel

    monokernel.register(backend=monokernel.BACKEND, architecture=ARCHITECTURE, path=SPEC_PATH)
