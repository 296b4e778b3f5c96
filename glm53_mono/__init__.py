"""glm53_mono: GLM-5.3-Flash decode and verify steps as one persistent kernel, as an SGLang plugin."""

__version__ = "0.1.0"
